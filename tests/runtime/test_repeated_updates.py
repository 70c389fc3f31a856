"""From its second step on an update is made from what the first has found; whatever else changes is looked at again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BadPieceError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.host import library as host_library
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer
from tests.runtime.kernel_loops import adamw, batch, network

pytestmark = pytest.mark.skipif(host_library.why_missing() is not None, reason="needs the host kernel")
NUM_STEPS = 5
PLACES = [{"weights": "resident", "update": "device"}, {"weights": "streamed", "update": "host"}]
Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def train(
    place: dict[str, Any], change: Change, *, schedule: str = "deferred", moments: str = "fp32"
) -> list[torch.Tensor]:
    """What the weights and the states are after some steps; the change is made before the fourth."""
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    plan = lowtide.make_plan(lay_out(find_groups(model), chunk_bytes=1 << 14), schedule=schedule, **place)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="bf16 stochastic", moments=moments, seed=3):
        for step in range(NUM_STEPS):
            model(batch(step, torch.bfloat16)).float().square().mean().backward()
            if step == NUM_STEPS - 2:
                change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
    entries = [value for entries in state.values() for value in entries.values() if isinstance(value, torch.Tensor)]
    return [*(parameter.detach().clone() for parameter in model.parameters()), *entries]


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Changes it."""


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    for entries in state["state"].values():
        entries["exp_avg"] = entries["exp_avg"] * 2
    optimizer.load_state_dict(state)


def set_in_groups(name: str, value: object) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0][name] = value

    return change


def turn_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.t().contiguous().t()


def drop_gradient(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].up.weight.grad = None  # type: ignore[union-attr]


def give_other_memory(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


CHANGES: list[Change] = [
    nothing,
    load_state,
    turn_gradients,
    drop_gradient,
    give_other_memory,
    set_in_groups("lr", 0.5),
    set_in_groups("amsgrad", True),
    set_in_groups("maximize", True),
]


@pytest.mark.parametrize("place", PLACES, ids=["device", "host"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__qualname__)
def test_bits_are_those_of_updates_that_look_at_everything(
    change: Change, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(place, change)
    monkeypatch.setattr(KernelOptimizer, "_repeat", lambda self, updates, rules, settings: False)
    expected = train(place, change)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
@pytest.mark.parametrize("place", PLACES, ids=["device", "host"])
def test_pieces_are_looked_at_once(
    place: dict[str, Any], schedule: str, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    check = host_kernel.check_pieces
    monkeypatch.setattr(
        host_kernel, "check_pieces", lambda pieces, **words: (looks.append(len(pieces)), check(pieces, **words))
    )
    train(place, nothing, schedule=schedule, moments=moments)
    num_parameters = len([*network(torch.bfloat16).parameters()])
    assert sum(looks) == num_parameters
    looks.clear()
    if schedule == "deferred":
        train(place, load_state, moments=moments)
        assert sum(looks) == 2 * num_parameters


def test_a_gradient_that_shares_memory_with_a_weight_is_refused_in_later_steps_too() -> None:
    def share(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[0].up.weight.grad = model[1].up.weight.detach()  # type: ignore[union-attr]

    with pytest.raises(BadPieceError, match="share memory"):
        train(PLACES[0], share)
