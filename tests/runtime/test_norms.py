"""Norms that are taken on the way: those of the gradients as the update finds them, whoever wrote to them since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.updates.norms import norm_of, norms_to_judge

WIDTH = 16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def backward(model: nn.Module, step: int) -> None:
    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def weight(model: nn.Module) -> nn.Parameter:
    parameter = next(model.parameters())
    assert isinstance(parameter, nn.Parameter)
    return parameter


def a_view(gradient: torch.Tensor) -> Callable[[], object]:
    view = gradient.view(-1)
    return lambda: view.mul_(100)


def a_row(gradient: torch.Tensor) -> Callable[[], object]:
    row = gradient[2]
    return lambda: row.fill_(7)


def data(gradient: torch.Tensor) -> Callable[[], object]:
    inner = gradient.data  # writes through it raise no version
    return lambda: inner.mul_(100)


def an_array(gradient: torch.Tensor) -> Callable[[], object]:
    array: Any = gradient.numpy()

    def write() -> None:
        array[:] = array * 100

    return write


@pytest.mark.parametrize("hold", [a_view, a_row, data, an_array])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
@pytest.mark.parametrize("is_own", [False, True], ids=["found", "set by the user"])
def test_a_view_that_outlives_an_accumulation(
    hold: Callable[[torch.Tensor], Callable[[], object]], weights: str, is_own: bool
) -> None:
    models = network(), network()
    norms = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        plan = lowtide.make_plan(model, weights=weights, update="host")
        is_managed = model is models[1]
        session = (
            lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", max_grad_norm=1.0)
            if is_managed
            else None
        )
        write = None
        if is_own:
            own = torch.ones(WIDTH, WIDTH)
            write = hold(own)
            weight(model).grad = own
        else:
            backward(model, 0)
            gradient = weight(model).grad
            assert gradient is not None
            write = hold(gradient)
            del gradient
        backward(model, 1)
        backward(model, 2)
        if session is not None:
            session.settle()
        write()
        if session is None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        if session is not None:
            assert session.last_grad_norm is not None
            norms.append(session.last_grad_norm)
            session.close()
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_look_counts_for_as_long_as_the_gradient_lives(set_to_none: bool) -> None:
    """A look costs a pass over that gradient, and none over the next one; clearing it is no look."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with lowtide.manage(
        model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32", max_grad_norm=1.0
    ) as session:
        plan_run = session._plan_run
        assert plan_run is not None
        members = [managed for group in plan_run._groups.values() for managed in group.members]
        managed = next(managed for managed in members if managed.parameter is weight(model))
        known = []
        for step in range(4):
            backward(model, step)
            if step == 2:
                assert weight(model).grad.sum().isfinite()  # type: ignore[union-attr]  # there is one
            assert managed.host_gradient is not None
            managed.host_gradient.settle()
            known.append(managed.host_gradient.known_norm is not None)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert known == [True, True, False, set_to_none]


def test_a_cleared_gradient_has_no_norm_from_before() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with lowtide.manage(
        model, optimizer, lowtide.make_plan(model), device="cpu", precision="fp32", max_grad_norm=1.0
    ) as session:
        backward(model, 0)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert session.last_grad_norm is not None
        assert float(session.last_grad_norm) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [1.0, 0.0, 3e4, torch.inf, -torch.inf, torch.nan])
def test_what_is_judged_is_finite_where_the_norm_is(value: float, dtype: torch.dtype) -> None:
    gradients = [torch.ones(3, 5, dtype=dtype), torch.full((7,), value, dtype=dtype), torch.zeros(0, dtype=dtype)]
    judged, alone = norms_to_judge(gradients), [norm_of(gradient) for gradient in gradients]
    assert [bool(norm.isfinite()) for norm in judged] == [bool(norm.isfinite()) for norm in alone]
    torch.testing.assert_close(judged, alone, equal_nan=True)


def test_a_norm_whose_square_is_beyond_fp32_is_judged_as_infinite() -> None:
    assert [bool(norm.isfinite()) for norm in norms_to_judge([torch.full((2,), 1e19), torch.full((2,), 2e19)])] == [
        True,
        False,
    ]
