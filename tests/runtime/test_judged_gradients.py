"""Whose gradients a session judges, of which types, and what it leaves to others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import NonFiniteGradientError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from tests.runtime.test_bad_input import loss_of, network, spoilt, take_step

WIDTH = 16
KB = 1024
schedules = pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
sites = pytest.mark.parametrize("update", ["host", "device"])
homes = pytest.mark.parametrize("weights", ["streamed", "resident"])


class Block(nn.Module):
    """Uses one of its two matrices; the other is for whoever holds the block."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner


class Blocks(nn.Module):
    """Multiplies by a weight of its first block, after it has called the blocks: its gradient comes before theirs."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        outer: Any = self.blocks[0].outer
        factor = outer.mean()
        return (x * (factor if self.value is None else spoilt(factor, self.value))).square().mean()


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@schedules
@sites
@homes
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_weights_of_other_types_train_as_in_plain_torch(
    dtype: torch.dtype, weights: str, update: str, schedule: str
) -> None:
    models = network(dtype), network(dtype)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    plan = lowtide.make_plan(models[1], weights=weights, update=update, schedule=schedule)
    with lowtide.manage(models[1], optimizers[1], plan, device="cpu"):
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, WIDTH, dtype=dtype)).abs().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@sites
@homes
def test_a_group_of_which_a_backward_has_only_dropped_a_gradient(weights: str, update: str) -> None:
    """The optimizer holds the matrix that nobody uses: there is nothing to judge, nor to refuse."""
    blocks = [Block(), Block()]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW([block.outer for block in blocks], lr=1e-2)
    plan = lowtide.make_plan(model, weights=weights, update=update, schedule="in_backward")
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@sites
@pytest.mark.parametrize("chunk_bytes", [KB, 4 * KB])
def test_what_step_updates_of_a_group_that_a_backward_has_updated_is_judged(update: str, chunk_bytes: int) -> None:
    model = Blocks(float("nan"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    layout = lay_out(find_groups(model), chunk_bytes=chunk_bytes)
    plan = lowtide.make_plan(layout, weights="streamed", update=update, schedule="in_backward")
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        model(torch.ones(2, WIDTH)).backward()
        with pytest.raises(
            NonFiniteGradientError,
            match=r"gradients of blocks\.0\.outer are .*; what step\(\) itself updates is as before, and all other weights "
            "took the step in the backward",
        ):
            optimizer.step()
        optimizer.zero_grad()
        model.value = None
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    for name, one, other in zip(dict(model.named_parameters()), before, model.parameters(), strict=True):
        assert other.isfinite().all(), name
        assert torch.equal(one, other) == (name == "blocks.1.outer"), name


@schedules
@sites
@pytest.mark.parametrize("chunk_bytes", [KB, 4 * KB])
def test_a_gradient_that_came_before_its_group_was_reached_is_not_lost(
    update: str, schedule: str, chunk_bytes: int
) -> None:
    models = Blocks(), Blocks()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    layout = lay_out(find_groups(models[1]), chunk_bytes=chunk_bytes)
    plan = lowtide.make_plan(layout, weights="streamed", update=update, schedule=schedule)
    with lowtide.manage(models[1], optimizers[1], plan, device="cpu"):
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, WIDTH)).backward()
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_is_not_managed_is_named_by_its_number_in_the_optimizer() -> None:
    model = network()
    plan = lowtide.make_plan(model, schedule="in_backward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        added = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [added]})
        loss_of(model).backward()
        added.grad = torch.full((3,), float("inf"))
        with pytest.raises(NonFiniteGradientError, match="gradients of parameter 8 of the optimizer are"):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", [None, "fp32"])
@sites
@homes
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("cpu"), lowtide.optim.LossScaler], ids=["torch", "own"])
def test_a_scaler_judges_by_itself(make: Any, is_fused: bool, weights: str, update: str, precision: str | None) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=is_fused)
    plan = lowtide.make_plan(model, weights=weights, update=update)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision=precision):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler = make()

        def step() -> bool:
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = {torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)}
            assert len(same) == 1, "some weights took the step"
            return not same.pop()

        hook = model[1].register_forward_hook(lambda module, args, out: spoilt(out, float("inf")))
        # The last layers' gradients are finite.
        assert not step()
        hook.remove()
        assert step()


@sites
def test_a_default_device_is_for_the_users_tensors(update: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = lowtide.make_plan(model, update=update)
    rows = torch.ones(2, WIDTH)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32", max_grad_norm=1.0) as session:
        with torch.device("meta"):
            model(rows).square().mean().backward()
            optimizer.step()
        assert session.last_grad_norm is not None


@sites
@pytest.mark.parametrize("where", [torch.inference_mode, lambda: torch.device("meta")])
def test_a_call_after_a_backward_that_broke_off(where: Callable[[], AbstractContextManager[None]], update: str) -> None:
    """What the backward has judged is sent by then, in the modes of the call."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = lowtide.make_plan(model, update=update, schedule="in_backward")

    def break_off(*args: object) -> None:
        raise ValueError("enough")

    with lowtide.manage(model, optimizer, plan, device="cpu"):
        hook = model[0].register_full_backward_pre_hook(break_off)
        with pytest.raises(ValueError, match="enough"):
            loss_of(model).backward()
        hook.remove()
        rows = torch.ones(2, WIDTH)
        with where():
            model(rows)
        with pytest.warns(RuntimeWarning, match="raised after it had updated 3 of 4 groups"):
            optimizer.zero_grad()
        take_step(model, optimizer, 1)


@sites
def test_a_backward_that_broke_off_is_told_of_once(update: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = lowtide.make_plan(model, update=update, schedule="in_backward")

    def break_off(*args: object) -> None:
        raise ValueError("enough")

    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        hooks = [
            model[2].register_forward_hook(lambda module, args, out: spoilt(out, float("nan"))),
            model[0].register_full_backward_pre_hook(break_off),
        ]
        with pytest.raises(ValueError, match="enough"):
            loss_of(model).backward()
        for hook in hooks:
            hook.remove()
        with pytest.raises(NonFiniteGradientError, match="All other weights that it reached, if any, took the step"):
            session.settle()
        with pytest.warns(RuntimeWarning, match="raised after it had updated 3 of 4 groups"):
            optimizer.zero_grad()
        model.load_state_dict(saved)
        take_step(model, optimizer, 1)
        session.settle()
