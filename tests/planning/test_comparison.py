"""A simulated step against a session's timeline: seconds by lane counted by hand, and what cannot be compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.planning.lanes import StepTimes
from lowtide.planning.simulator import SimulatedStep
from lowtide.planning.timeline import WAIT_PREFIX, Lane, LaneSpan, Timeline
from tests.tracing.samples import tiny_trace


def span(step: int, lane: Lane, start_s: float, end_s: float, name: str = "block") -> LaneSpan:
    return LaneSpan(step=step, lane=lane, name=name, phase="forward", start_s=start_s, end_s=end_s)


SIMULATED = SimulatedStep(
    times=StepTimes(
        step_s=9.0,
        busy_s={Lane.COMPUTE: 6.0, Lane.TO_DEVICE: 4.0, Lane.TO_HOST: 0.0, Lane.HOST_UPDATE: 1.0},
        launch_s=0.5,
    ),
    timeline=Timeline(
        spans=(span(2, Lane.COMPUTE, 0.0, 1.5, f"{WAIT_PREFIX}block"), span(2, Lane.COMPUTE, 1.5, 7.5)),
        residency=(),
        is_emulated=False,
    ),
)
OBSERVED = Timeline(
    spans=(
        # The whole model's module is around the block's: what both cover counts once, and the wait inside not at all.
        span(4, Lane.COMPUTE, 0.0, 8.0, "model"),
        span(4, Lane.COMPUTE, 2.0, 5.0),
        span(4, Lane.COMPUTE, 1.0, 2.0, f"{WAIT_PREFIX}block"),
        span(4, Lane.TO_DEVICE, 0.0, 3.0),
        span(5, Lane.COMPUTE, 10.0, 15.0, "model"),
        # A copy of the step before its first computation does not move its beginning.
        span(5, Lane.TO_DEVICE, 8.5, 11.5),
        span(5, Lane.HOST_UPDATE, 15.0, 19.0),
    ),
    residency=(),
    is_emulated=True,
)


def test_seconds_a_step_are_those_counted_by_hand() -> None:
    found = lowtide.compare(SIMULATED, OBSERVED)
    assert (found.step.simulated_s, found.step.observed_s) == (9.0, 10.0)
    assert found.step.error == pytest.approx(-0.1)
    observed = {row.what: row.observed_s for row in found.lanes}
    assert observed == {"compute": (7.0 + 5.0) / 2, "to device": 3.0, "to host": 0.0, "host update": 2.0}
    assert (found.waits.simulated_s, found.waits.observed_s) == (1.5, 0.5)
    assert (found.num_steps, found.is_emulated) == (2, True)
    assert [row.error for row in found.rows if row.what == "to host"] == [None]


def test_one_step_alone_ends_with_its_last_computation() -> None:
    assert lowtide.compare(SIMULATED, OBSERVED.last_steps(1)).step.observed_s == 5.0


def test_what_cannot_be_compared() -> None:
    nothing = Timeline(spans=(), residency=(), is_emulated=False)
    with pytest.raises(ConfigError, match="the timeline holds no step; train one"):
        lowtide.compare(SIMULATED, nothing)
    with pytest.raises(ConfigError, match="a StepTrace cannot be compared with a Timeline; give two traces"):
        lowtide.compare(tiny_trace(), OBSERVED)  # type: ignore[call-overload]  # what is refused


def test_a_session_on_the_emulated_device_moves_what_its_plan_simulates() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, 64)
    found = lowtide.plan(
        model, batch, optimizer=optimizer, loss=lambda m, x: m(x).sum(), device_memory="66MiB", hardware="rtx-4090"
    )
    streamed = lowtide.make_plan(model)
    with lowtide.manage(model, optimizer, streamed, device="cpu") as session:
        for _ in range(3):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        result = lowtide.compare(found.simulated, session.timeline())
    assert result.is_emulated
    assert result.num_steps == 2  # the first one is left out
    assert result.step.observed_s > 0
    assert all(row.observed_s > 0 for row in result.lanes)
    assert sum(row.observed_s for row in result.lanes if row.what == "compute") <= result.step.observed_s * 1.5
