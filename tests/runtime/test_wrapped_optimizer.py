"""Optimizers that step another: the one inside is managed, and the wrapper goes on as in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedOptimizerError
from tests.runtime.side_by_side import Tower, adamw, assert_same_values, in_all_places, loss_of, manage, seeded, steps
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


class Lookahead(Optimizer):
    """Every second step halfway back: as in the packages, it shows the inner groups as its own and has no hooks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0
        self.slow: dict[Tensor, Tensor] = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # torch declares an attribute
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.slow.setdefault(parameter, parameter.clone())
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


class Sharpness(Optimizer):
    """SAM: the gradient of the step is taken where the loss is higher."""

    def __init__(self, params: Any, base: Callable[..., Optimizer]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held if p.grad is not None]).norm()
        moves = [0.05 * p.grad / norm for p in held if p.grad is not None]
        for parameter, move in zip(held, moves, strict=True):
            parameter.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for parameter, move in zip(held, moves, strict=True):
            parameter.sub_(move)
        self.base_optimizer.step()
        return loss


def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    def closure(seed: int) -> Tensor:
        loss = loss_of(model, seed)
        loss.backward()
        return loss.detach()

    losses: list[Tensor] = []
    for seed in range(5):
        losses.append(closure(seed))
        if isinstance(optimizer, Sharpness):
            optimizer.step(lambda seed=seed: closure(seed))
        else:
            optimizer.step()
        optimizer.zero_grad()
    return losses


WRAPPERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lookahead": lambda model: Lookahead(adamw(model)),
    "sharpness": lambda model: Sharpness(
        model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    ),
    "lookahead of lookahead": lambda model: Lookahead(Lookahead(adamw(model))),
}


@in_all_places
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_goes_on_as_in_plain_torch(name: str, place: str) -> None:
    plain, managed = seeded(Tower), seeded(Tower)
    expected = loop(plain, WRAPPERS[name](plain))
    wrapper = WRAPPERS[name](managed)
    with manage(managed, wrapper, place) as session:
        assert session.optimizer is not wrapper
        assert_same_values(expected, loop(managed, wrapper))
    assert_same_tensors(plain.state_dict(), managed.state_dict())


def test_in_backward_a_wrapper_is_refused_with_the_reason() -> None:
    model = seeded(Tower)
    wrapper = Lookahead(adamw(model))
    with pytest.raises(
        UnsupportedOptimizerError,
        match="Lookahead does more in its step than the AdamW in it.*use the schedule 'deferred'",
    ):
        manage(model, wrapper, "streamed-host", "in_backward")
    loop(model, wrapper)
    with manage(model, wrapper.optimizer, "streamed-host", "in_backward"):
        steps(model, wrapper.optimizer)


class Several(Optimizer):
    def __init__(self, parts: list[Optimizer]) -> None:
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.parts = parts


def test_several_optimizers_in_one_are_refused() -> None:
    model = Tower()
    parts = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model.stem, model.head)]
    with pytest.raises(
        UnsupportedOptimizerError, match=r"Several steps other optimizers \(SGD, SGD\).*a session has one"
    ):
        manage(model, Several(list(parts)), "streamed-host")
    more = Several(parts[:1])
    more.add_param_group({"params": list(model.head.parameters())})
    with pytest.raises(UnsupportedOptimizerError, match=r"Several steps other optimizers \(SGD\) beside its own"):
        manage(model, more, "streamed-host")


# accelerate


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_accelerates_optimizer_is_unwrapped(accelerator: Any, schedule: str) -> None:
    plain, managed = seeded(Tower), seeded(Tower)
    expected = steps(plain, adamw(plain))
    inner = adamw(managed)
    wrapper = accelerator.prepare(inner)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    with manage(managed, wrapper, "streamed-host", schedule) as session:
        assert session.optimizer is inner
        assert_same_values(expected, steps(managed, wrapper))
        scheduler.step()
        assert len(wrapper.state_dict()["state"]) == len(list(managed.parameters()))
    assert_same_tensors(plain.state_dict(), managed.state_dict())
    steps(managed, wrapper)
    with manage(managed, inner, "streamed-host", schedule):
        steps(managed, wrapper)


def test_a_step_that_was_kept_from_before_is_refused(accelerator: Any) -> None:
    """With a GradScaler accelerate calls the step that it found when it was made, past the session."""
    from accelerate.optimizer import AcceleratedOptimizer

    model = seeded(Tower)
    inner = adamw(model)
    wrapper = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        UnsupportedOptimizerError, match="AcceleratedOptimizer has kept the step of the AdamW in it from before"
    ):
        manage(model, wrapper, "streamed-host")
    steps(model, inner)
    # What the message names: managed first, and wrapped afterwards. A scale of 1 changes no bit.
    plain = seeded(Tower)
    expected = steps(plain, adamw(plain))
    managed = seeded(Tower)
    inner = adamw(managed)
    with manage(managed, inner, "streamed-host"):
        later = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
        later.scaler.scale(torch.ones(()))
        assert_same_values(expected, steps(managed, later))
    assert_same_tensors(plain.state_dict(), managed.state_dict())
