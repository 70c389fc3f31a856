"""HostGradient: the states of a gradient that waits on the host, and who may move it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import GradientStateError
from lowtide.memory.chunk import Chunk, lay_out
from lowtide.memory.groups import find_groups
from lowtide.runtime.parameters.gradients import LEGAL, GradientState, HostGradient

HOST = torch.device("cpu")


def gradient_of(parameter: nn.Parameter, home: torch.Tensor | None = None) -> HostGradient:
    module = nn.Module()
    module.weight = parameter
    (spec,) = lay_out(find_groups(module)).chunks
    chunk = Chunk(spec, None, torch.empty(0, dtype=torch.uint8))
    return HostGradient(parameter, spec.spans[0].parameter, chunk, HOST, home)


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(("now", "to"), list(itertools.product(GradientState, repeat=2)))
def test_only_the_tables_moves_are_made(now: GradientState, to: GradientState, parameter: nn.Parameter) -> None:
    gradient = gradient_of(parameter)
    gradient.state = now
    if to in LEGAL[now]:
        gradient.become(to)
        assert gradient.state is to
        return
    with pytest.raises(
        GradientStateError, match=f"the gradient of weight cannot go from {now.value!r} to {to.value!r}"
    ):
        gradient.become(to)
    assert gradient.state is now


def test_what_was_there_is_set_aside_and_comes_back_where_a_backward_brings_none(parameter: nn.Parameter) -> None:
    before = parameter.grad = torch.ones(3)
    gradient = gradient_of(parameter)
    gradient.set_aside(is_summed_on_device=False)
    assert parameter.grad is None
    gradient.show_aside()
    assert parameter.grad is before
    assert gradient.state is GradientState.RESTING


def test_hooks_of_the_user_find_the_sum_at_the_parameter(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(3)
    gradient = gradient_of(parameter)
    gradient.set_aside(is_summed_on_device=True)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(3))
    assert gradient.take_aside() is None, "it is in the sum already"


def test_a_second_backward_lands_on_the_first_ones_gradient(parameter: nn.Parameter) -> None:
    gradient = gradient_of(parameter, home=torch.zeros(3))
    gradient.set_aside(is_summed_on_device=False)
    target, adds = gradient.land()
    assert not adds
    target.fill_(2.0)
    gradient.become(GradientState.ARRIVING)
    assert gradient.land()[1], "a second gradient of the same backward is added"
    parameter.grad = gradient.tensor
    gradient.end_backward()
    gradient.set_aside(is_summed_on_device=False)
    target, adds = gradient.land()
    assert adds, "accumulation"
    assert torch.equal(target, torch.full((3,), 2.0))


def test_a_norm_is_known_until_somebody_looks(parameter: nn.Parameter) -> None:
    gradient = gradient_of(parameter, home=torch.zeros(3))
    gradient.note_norm(gradient.count_take(), torch.tensor(3.0))
    assert float(gradient.known_norm or 0) == 3.0
    gradient.count_take()
    assert gradient.known_norm is None, "of an earlier take"
    gradient.note_norm(2, torch.tensor(4.0))
    gradient.mark_seen()
    assert gradient.known_norm is None, "whoever looked may have written"
    assert float(gradient.sent_norm or 0) == 4.0


def test_after_steps_and_exceptions_all_of_them_rest() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, weights="streamed", update="host")

    def states(session: lowtide.Session) -> set[GradientState]:
        groups = session._open()._groups.values()
        gradients = [managed.host_gradient for group in groups for managed in group.members]
        return {gradient.state for gradient in gradients if gradient is not None}

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("a hook of the user's")

    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert states(session) == {GradientState.RESTING}
        output = model(torch.ones(2, 4))
        hook = model[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="a hook of the user's"):
            output.sum().backward()
        hook.remove()
        optimizer.zero_grad()
        assert states(session) == {GradientState.RESTING}
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
