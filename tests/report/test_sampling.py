from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.report.phase_runs import phase_runs
from lowtide.report.sampling import MAX_POINTS, kept_positions
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from tests.tracing.samples import TraceBuilder, transformer_trace


def random_step(seed: int, num_events: int) -> StepTrace:
    """A step that allocates and frees at random through the four phases."""
    random = np.random.default_rng(seed)
    builder = TraceBuilder()
    builder.allocate(4096, Category.WEIGHTS)
    alive: list[int] = []
    for index in range(num_events):
        phase = list(Phase)[4 * index // num_events]
        builder.enter(phase)
        if alive and random.random() < 0.5:
            builder.free(alive.pop(int(random.integers(len(alive)))))
        else:
            alive.append(builder.allocate(512 * int(random.integers(1, 2000)), Category.ACTIVATIONS))
    return builder.build()


def test_few_points_are_all_kept() -> None:
    trace = transformer_trace(layers=2)
    assert kept_positions(trace).tolist() == list(range(len(trace.events) + 1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), num_events=st.integers(50, 1500), limit=st.integers(40, 300))
def test_the_bound_holds_and_every_summit_survives(seed: int, num_events: int, limit: int) -> None:
    trace = random_step(seed, num_events)
    kept = kept_positions(trace, limit=limit)
    assert len(kept) <= limit
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(trace.events))
    assert trace.peak_event + 1 in kept
    assert trace.curve[kept].max() == trace.peak_bytes
    for run in phase_runs(trace):
        inside = kept[(kept >= run.first) & (kept <= run.last)]
        assert trace.curve[inside].max() == trace.curve[run.first : run.last + 1].max()


def test_a_spike_of_one_event_in_a_hundred_thousand_survives() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    for index in range(50_000):
        size = 512 * (10_000 if index == 31_234 else 1 + index % 3)
        builder.free(builder.allocate(size, Category.TEMPORARIES))
    trace = builder.build()
    kept = kept_positions(trace)
    assert len(kept) <= MAX_POINTS
    assert trace.peak_event == 2 * 31_234
    assert trace.peak_event + 1 in kept
    assert np.diff(kept).max() < 150


def test_every_spike_survives_not_only_the_highest() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    spikes = range(123, 5000, 250)
    for index in range(5000):
        size = 512 * (100 + index // 100 if index in spikes else 1 + index % 3)
        builder.free(builder.allocate(size, Category.TEMPORARIES))
    kept = set(kept_positions(builder.build(), limit=400).tolist())
    assert {2 * index + 1 for index in spikes} <= kept


def test_phases_that_alternate_by_the_event_leave_room_for_the_curve() -> None:
    builder = TraceBuilder()
    for index in range(5000):
        builder.enter(Phase.FORWARD if index % 2 else Phase.BACKWARD)
        builder.allocate(512, Category.ACTIVATIONS)
    trace = builder.build()
    kept = kept_positions(trace, limit=400)
    assert len(kept) <= 400
    assert np.diff(kept).max() < 100


@pytest.mark.parametrize("limit", [20, 100, 4000])
def test_kept_points_are_states_of_the_step(limit: int) -> None:
    trace = transformer_trace(layers=8)
    kept = kept_positions(trace, limit=limit)
    assert sum(int(values[kept[3]]) for values in trace.stacked.values()) == trace.curve[kept[3]]
