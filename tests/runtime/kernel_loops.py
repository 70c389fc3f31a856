"""Loops through our own kernels, plain and managed, whose numbers are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.optim import reference
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import require_rule
from lowtide.optim.state import new_state
from lowtide.optim.update_types import Piece, numerics_of, rounding_for, update_key

WIDTH = 64
PLACES: list[dict[str, Any]] = [
    {"weights": "resident", "update": "device"},
    {"weights": "streamed", "update": "device"},
    {"weights": "streamed", "update": "host"},
    {"weights": "resident", "update": "host"},
    {"weights": "streamed", "update": 0.5},
    {"weights": "streamed", "update": "paged"},
    {"weights": "resident", "update": "paged"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]  # a module's call has no type


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).to(dtype)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


class PlainKernels:
    """The reference loop: gradients of plain autograd, and the same kernel on each parameter by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, moments: str, seed: int) -> None:
        self.optimizer = optimizer
        self.numerics = numerics_of(precision, moments, seed=seed)[1]
        self.states: dict[int, Any] = {}

    def step(self, max_norm: float | None = None) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        factor = 1.0
        if max_norm is not None:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters]
            factor = float(torch.clamp(max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0))
        number = 0
        for group in self.optimizer.param_groups:
            rule = require_rule(self.optimizer, group)
            for p in group["params"]:
                state = self.states.setdefault(id(p), new_state(p, rule, self.numerics))
                state.step += 1
                piece = Piece(
                    weight=p.detach().flatten(),
                    gradient=p.grad.flatten(),
                    state=state.tensors,
                    rule=rule,
                    step=state.step,
                    remainder=state.remainder,
                    master=state.master,
                    key=update_key(self.numerics.seed, number, state.step),
                )
                kernel = host_kernel.update if host_kernel.is_available() else reference.update
                kernel(
                    [piece],
                    rounding=rounding_for(p, self.numerics),
                    moments=self.numerics.moments,
                    gradient_factor=factor,
                )
                number += 1

    def zero_grad(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


def train(
    model: nn.Module, optimizer: Any, scheduler: Any, *, accumulate: int = 1, clip: float | None = None
) -> list[float]:
    losses = []
    for step in range(6):
        for part in range(accumulate):
            dtype = next(model.parameters()).dtype
            loss = model(batch(10 * step + part, dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip is None:
            optimizer.step()
        else:
            optimizer.step(clip)
        scheduler.step()
        optimizer.zero_grad()
    return losses


def run(
    place: dict[str, Any] | None,
    precision: str,
    moments: str = "fp32",
    *,
    clip: float | None = None,
    accumulate: int = 1,
    schedule: str = "deferred",
) -> tuple[nn.Module, list[float]]:
    dtype = numerics_of(precision)[0].dtype
    model = network(dtype)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if place is None:
        plain = PlainKernels(optimizer, precision, moments, 5)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks
        return model, train(model, plain, scheduler, accumulate=accumulate, clip=clip)
    layout = lay_out(find_groups(model), chunk_bytes=1 << 14)
    plan = lowtide.make_plan(layout, schedule=schedule, **place)
    with lowtide.manage(
        model, optimizer, plan, device="cpu", precision=precision, moments=moments, seed=5, max_grad_norm=clip
    ):
        losses = train(model, optimizer, scheduler, accumulate=accumulate)
    return model, losses


def assert_same(one: tuple[nn.Module, list[float]], other: tuple[nn.Module, list[float]]) -> None:
    assert one[1] == other[1]
    for (name, expected), found in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert torch.equal(expected, found), name


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_in_turn(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> tuple[nn.Sequential, nn.Sequential, torch.optim.Optimizer]:
    """A model after nine plain steps; one after three plain, three managed and three plain ones, and its optimizer."""
    plain, model = network(torch.float32), network(torch.float32)
    optimizer, other = make(plain), make(model)
    for step in range(9):
        one_step(plain, optimizer, step)
    for step in range(3):
        one_step(model, other, step)
    with lowtide.manage(model, other, lowtide.make_plan(model), device="cpu", precision="fp32"):
        for step in range(3, 6):
            one_step(model, other, step)
    for step in range(6, 9):
        one_step(model, other, step)
    return plain, model, other
