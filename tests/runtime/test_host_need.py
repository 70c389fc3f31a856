"""What a plan needs of the host: the state of each parameter by the rule of its own param group."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BudgetError
from lowtide.memory.chunk import lay_out
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.groups import find_groups
from lowtide.optim.update_types import numerics_of
from lowtide.planning import placement as staging
from lowtide.runtime.host_memory import HostNeed, host_need

WIDTH = 32
WEIGHT = WIDTH * WIDTH
"""Elements of each layer."""


def network(num_layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


def need(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: str | None = None,
    moments: str = "fp32",
    update: str = "host",
) -> HostNeed:
    layout = lay_out(find_groups(model))
    numerics = None if precision is None else numerics_of(precision, moments)[1]
    plan = lowtide.make_plan(layout, update=update)
    return host_need(layout, plan, optimizer, numerics, dict(model.named_parameters()))


def groups_of(model: nn.Sequential, *settings: Mapping[str, object]) -> list[dict[str, object]]:
    return [{"params": list(layer.parameters()), **each} for layer, each in zip(model, settings, strict=True)]


@pytest.mark.parametrize("precision", [None, "fp32"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_momentum_of_some_groups(order: tuple[int, ...], precision: str | None) -> None:
    model = network()
    settings: list[dict[str, object]] = [{"momentum": 0.9}, {"momentum": 0.0}, {"momentum": 0.9}]
    optimizer = torch.optim.SGD(groups_of(model, *(settings[place] for place in order)), lr=0.1)
    assert need(model, optimizer, precision).state_bytes == 2 * 4 * WEIGHT


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_amsgrad_of_the_last_group(precision: str | None) -> None:
    model = network(2)
    optimizer = torch.optim.AdamW(groups_of(model, {"amsgrad": False}, {"amsgrad": True}), lr=0.1)
    assert need(model, optimizer, precision).state_bytes == (2 + 3) * 4 * WEIGHT


def test_state_that_visits() -> None:
    model = network(2)
    optimizer = torch.optim.SGD(groups_of(model, {"momentum": 0.0}, {"momentum": 0.9}), lr=0.1)
    found = need(model, optimizer, "fp32", "bf16", update="paged")
    assert (found.state_bytes, found.paged_bytes) == (0, 2 * WEIGHT + 2 * 4096)


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_what_the_optimizer_does_not_hold_has_none(precision: str | None) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model[2].parameters())
    assert need(model, optimizer, precision).state_bytes == 2 * 4 * WEIGHT


def test_tied_parameters_are_found_by_their_name() -> None:
    model = network()
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    assert need(model, optimizer).state_bytes == 2 * 2 * 4 * WEIGHT


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_the_budget_that_is_asked_for_is_enough_and_not_less(precision: str | None) -> None:
    """The first group alone has momentum: a budget for its state, and not for three times as much."""
    for momenta, is_enough in (((0.9, 0.0, 0.0), True), ((0.0, 0.9, 0.9), False)):
        model = network()
        optimizer = torch.optim.SGD(groups_of(model, *({"momentum": momentum} for momentum in momenta)), lr=0.1)
        others = need(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        plan = lowtide.make_plan(model, host_memory=others.everything_bytes + 4 * WEIGHT)
        if is_enough:
            lowtide.manage(model, optimizer, plan, device="cpu", precision=precision).close()
            continue
        with pytest.raises(lowtide.errors.BudgetError, match="optimizer state"):
            lowtide.manage(model, optimizer, plan, device="cpu", precision=precision)


@pytest.mark.parametrize(("activations", "is_more_useful"), [("keep", True), ("recompute", True), ("offload", False)])
def test_staging_takes_no_room_from_activations(
    monkeypatch: pytest.MonkeyPatch, activations: str, is_more_useful: bool
) -> None:
    """The device updates a half of the model; two gigabytes are two kibibytes here."""
    monkeypatch.setattr(staging, "ENOUGH_BYTES", 2 * 1024)
    model = network(8)
    layout = lay_out(find_groups(model), chunk_bytes=4096)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(layout, update=0.5, schedule="in_backward", activations={"0": activations})
    found = host_need(layout, plan, optimizer, None, dict(model.named_parameters()))
    assert (found.useful_staging_bytes > found.staging_bytes) is is_more_useful
    assert found.with_room(1 << 40, 1 << 40).staging_bytes == found.useful_staging_bytes


@pytest.mark.parametrize("is_held", [True, False])
def test_staging_has_room_for_what_is_sent_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch, is_held: bool) -> None:
    """No gradient is sent there from a table that stays on the host, nor from layers that the optimizer does not hold."""
    monkeypatch.setattr(staging, "ENOUGH_BYTES", 2 * 1024)
    model = nn.Sequential(nn.Embedding(64 * WIDTH, WIDTH), *(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(8)))
    layout = lay_out(find_groups(model))
    on_host = (0, 6, 7, 8)
    sites = {str(place): "host" if place in on_host else "device" for place in range(9)}
    plan = lowtide.make_plan(layout, weights={"0": "host"}, update=sites, schedule="in_backward")
    optimizer = torch.optim.AdamW(
        [each for place in (on_host if is_held else (0, 8)) for each in model[place].parameters()]
    )
    found = host_need(layout, plan, optimizer, None, dict(model.named_parameters()))
    (chunk,) = layout.chunks_of("8")
    # Two in any case; the rest is for rounding.
    assert found.useful_staging_bytes // chunk.nbytes == (3 if is_held else 2)


@pytest.mark.parametrize(
    "error", [BudgetError("no", tier="pinned", needed_bytes=1, free_bytes=0, budget_bytes=0), RuntimeError("no")]
)
def test_room_that_is_not_to_be_had_does_not_end_the_plan(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A driver may lock less than the machine's memory promises."""
    monkeypatch.setattr(staging, "ENOUGH_BYTES", 2 * 1024)
    model = network(8)
    layout = lay_out(find_groups(model), chunk_bytes=4096)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(layout, update=0.5, schedule="in_backward")
    least = host_need(layout, plan, optimizer, None, dict(model.named_parameters()))
    asked: list[int] = []
    original = EmulatedMover.host_buffer

    def host_buffer(self: EmulatedMover, num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        if num_bytes > lockable_bytes:
            raise error
        return original(self, num_bytes)

    monkeypatch.setattr(EmulatedMover, "host_buffer", host_buffer)
    lockable_bytes = least.total_bytes
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        assert asked[0] > asked[1] == least.total_bytes
        host = next(row for row in session.stats().tiers if row.tier == "host")
        assert host.peak_bytes == host.predicted_bytes == least.everything_bytes
    lockable_bytes = least.total_bytes - 1
    with pytest.raises(type(error), match="no"):
        lowtide.manage(model, optimizer, plan, device="cpu")
