"""Optimizers that know more than one parameter are refused with what gave them away; those that do not are run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import UnsupportedOptimizerError
from lowtide.runtime.host_memory import state_bytes_per_parameter_byte
from lowtide.runtime.updates.proof import prove
from tests.runtime.side_by_side import Tower, in_turn, manage, seeded, side_by_side, steps

HOST = [torch.device("cpu")]


class Sgd(torch.optim.Optimizer):
    """p -= lr * grad, and what a subclass does beside it."""

    def __init__(self, params: Any, lr: float = 0.01, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.before()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.update(group, number, parameter, parameter.grad)
        return None

    def before(self) -> None:
        """Nothing."""

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"])


class CountsOnItself(Sgd):
    count = 0

    def before(self) -> None:
        self.count += 1

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"] / self.count)


class CountsInAList(Sgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates: list[float] = []

    def before(self) -> None:
        self.rates.append(self.param_groups[0]["lr"])


class CountsUnderAForeignKey(Sgd):
    def before(self) -> None:
        shared: Any = self.state
        shared["all"]["step"] = shared["all"].get("step", 0) + 1


class NormOfAll(Sgd):
    def before(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))


class SumInItsGroup(Sgd):
    """As Prodigy and D-Adaptation estimate their rate."""

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        group["sum"] = group.get("sum", 0.0) + float(gradient.abs().sum())
        parameter.sub_(gradient, alpha=group["lr"])


class Noise(Sgd):
    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient + torch.randn_like(gradient), alpha=group["lr"])


class PythonsNoise(Sgd):
    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"] * random.random())


class NumpysNoise(Sgd):
    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"] * float(np.random.random()))


class NoiseOfItsOwn(Sgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.numbers = random.Random(0)

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"] * self.numbers.random())


class FirstIsSpecial(Sgd):
    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"] if number == 0 else 2 * group["lr"])


class RateOfTheFirstGroup(Sgd):
    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=self.param_groups[0]["lr"])


class Rebinds(Sgd):
    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.data = parameter.data - group["lr"] * gradient


class DecaysWithoutGradient(Sgd):
    def before(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


class Buffers(Sgd):
    """Keeps its momenta in a list, by the parameters' places."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.buffers = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(self.buffers[number].mul_(0.9).add_(gradient), alpha=group["lr"])


class Momentum(Sgd):
    """State under the parameter's own key, made anew in each step."""

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        before = self.state[parameter].get("buffer", torch.zeros_like(parameter))
        self.state[parameter] = {"buffer": 0.9 * before + gradient, "step": self.state[parameter].get("step", 0) + 1}
        parameter.sub_(self.state[parameter]["buffer"], alpha=group["lr"])


class LooksAtItsState(Sgd):
    """And keeps nothing there: plain torch has an empty entry then."""

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        assert not self.state[parameter]
        parameter.sub_(gradient, alpha=group["lr"])


class CountsInItsGroup(Sgd):
    def before(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        parameter.sub_(gradient, alpha=group["lr"] / group["step"])


class Cached(Sgd):
    """A table that each step fills the same, whoever comes first."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, table=[None] * 3)

    def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        group["table"][state["step"] % 3] = (state["step"], 1 / state["step"])
        parameter.sub_(gradient, alpha=group["lr"] * group["table"][state["step"] % 3][1])


REFUSED: dict[type[Sgd], str] = {
    CountsOnItself: "changes its own count in each step",
    CountsInAList: "changes its own rates in each step",
    CountsUnderAForeignKey: "keeps 'all' in its state beside that of its parameters",
    NormOfAll: "updates a parameter otherwise when it has the others beside it",
    SumInItsGroup: "changes sum of its param group 0 in each step, by what it sees of all parameters",
    Noise: "draws random numbers in its step",
    PythonsNoise: "draws random numbers in its step",
    NumpysNoise: "draws random numbers in its step",
    NoiseOfItsOwn: "updates a parameter otherwise when it has the others beside it",
    FirstIsSpecial: "updates a parameter otherwise when it has the others beside it",
    Rebinds: r"gives its parameters other memory in its step \(p.data = ...\)",
    DecaysWithoutGradient: "updates a parameter otherwise when it has the others beside it",
    Buffers: "could not take a step|changes its own buffers|updates a parameter otherwise",
}
RUN: list[type[Sgd]] = [Sgd, Momentum, LooksAtItsState, CountsInItsGroup, Cached]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_knows_more_than_one_parameter_is_refused(kind: type[Sgd]) -> None:
    model = seeded(Tower)
    optimizer = kind(model.parameters())
    steps(model, optimizer, [0])  # it has state, counts and lists of its own
    before = copy.deepcopy(vars(optimizer)), numbers()
    with pytest.raises(UnsupportedOptimizerError, match=f"^{kind.__name__} ({REFUSED[kind]}).*schedule 'deferred'"):
        manage(model, optimizer, "streamed-host")
    assert same_plain_values(vars(optimizer), before[0])
    assert numbers() == before[1]
    # What the message names: all resident, updated on the device, deferred.
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident", update="device"), device="cpu"):
        steps(model, optimizer, [1])


@in_turn
@pytest.mark.parametrize("kind", RUN, ids=lambda kind: kind.__name__)
def test_what_looks_at_one_parameter_is_run(kind: type[Sgd], place: str, schedule: str) -> None:
    side_by_side(
        lambda model, optimizer: steps(model, optimizer, range(4)),
        place,
        schedule=schedule,
        make_optimizer=lambda model: kind(model.parameters()),
    )


def test_two_groups_that_differ_in_a_number_are_both_tried() -> None:
    """One of them would not show that the first one's rate is taken for all."""
    model = seeded(Tower)
    groups: list[dict[str, Any]] = [
        {"params": list(block.parameters()), "lr": 0.01 * (1 + number)} for number, block in enumerate(model.children())
    ]
    prove(Sgd(groups), HOST)
    with pytest.raises(UnsupportedOptimizerError, match="updates a parameter otherwise"):
        prove(RateOfTheFirstGroup(groups), HOST)
    prove(RateOfTheFirstGroup(model.parameters()), HOST)


def test_the_proof_is_for_kinds_of_groups_and_not_for_each() -> None:
    """Names and rates that every group has of its own make no kinds; a mode does."""

    class Counted(Sgd):
        num_updates = 0

        def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
            Counted.num_updates += 1
            super().update(group, number, parameter, gradient)

    def num_updates(groups: list[dict[str, Any]]) -> int:
        Counted.num_updates = 0
        prove(Counted(groups), HOST)
        return Counted.num_updates

    weights = [nn.Parameter(torch.ones(3, 3)) for _ in range(800)]
    many = [{"params": [weight], "lr": 0.1 / (1 + n), "name": f"layer {n}"} for n, weight in enumerate(weights)]
    few = num_updates(many[:2])
    assert num_updates(many) == few < 60
    assert num_updates([{**group, "nesterov": n == 700} for n, group in enumerate(many)]) > few


class TwoClosures(Sgd):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().step(closure)


def test_a_closure_that_would_be_called_twice_is_refused_when_it_is_given() -> None:
    model = seeded(Tower)
    optimizer = TwoClosures(model.parameters())
    with manage(model, optimizer, "streamed-host"):
        steps(model, optimizer, [0])
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UnsupportedOptimizerError, match="TwoClosures calls its closure 2 times in a step"):
            optimizer.step(lambda: torch.zeros(()))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_mode_for_evaluation_does_not_hide_the_step() -> None:
    class Modal(Sgd):
        """As schedule-free optimizers are before `train()`."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, is_training=False)

        def train(self) -> None:
            for group in self.param_groups:
                group["is_training"] = True

        def before(self) -> None:
            assert all(group["is_training"] for group in self.param_groups), "call train() first"

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        assert isinstance(optimizer, Modal)
        with pytest.raises(AssertionError, match="call train"):
            optimizer.before()
        optimizer.train()
        return steps(model, optimizer)

    side_by_side(loop, "streamed-device", make_optimizer=lambda model: Modal(model.parameters()))


def test_what_the_optimizer_holds_beside_its_parameters_is_not_touched() -> None:
    """A list that it fills, a writer that cannot be copied, another module."""

    class Holder(Sgd):
        def __init__(self, params: Any, log: Any, model: nn.Module) -> None:
            super().__init__(params)
            self.log, self.model, self.seen = log, model, {}

    model = seeded(Tower)
    with open(__file__, encoding="utf-8") as file:  # noqa: PTH123 - a thing that cannot be copied
        optimizer = Holder(model.parameters(), file, model)
        prove(optimizer, HOST)
        assert optimizer.log is file
        assert optimizer.model is model


def numbers() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2:]


def same_plain_values(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether what the classes above keep on themselves is the same."""
    names = [
        name for name, value in expected.items() if isinstance(value, int | float | list) and name != "param_groups"
    ]
    return vars_equal([found[name] for name in names], [expected[name] for name in names])


def vars_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(vars_equal, one, other))
    return bool(one == other)


def test_what_only_large_matrices_show_is_found() -> None:
    class Projects(Sgd):
        def update(self, group: dict[str, Any], number: int, parameter: Tensor, gradient: Tensor) -> None:
            if parameter.dim() == 2 and min(parameter.shape) >= 128:
                gradient = gradient + torch.randn_like(gradient)
            super().update(group, number, parameter, gradient)

    prove(Projects([nn.Parameter(torch.ones(64, 64))]), HOST)
    with pytest.raises(UnsupportedOptimizerError, match="draws random numbers"):
        prove(Projects([nn.Parameter(torch.ones(256, 512))]), HOST)


class StateInConstructor(torch.optim.Optimizer):
    """As torch's Adagrad up to 2.12: its step cannot do without what the constructor made."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, 0.5)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total = self.state[parameter]["sum"].addcmul_(parameter.grad, parameter.grad)
                    parameter.addcdiv_(parameter.grad, total.sqrt(), value=-group["lr"])


def test_state_that_a_constructor_makes_is_taken_along() -> None:
    model = nn.Sequential(nn.Linear(200, 3), nn.Linear(3, 2))
    optimizer = StateInConstructor(model.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    assert not prove(optimizer, HOST).advances_groups
    assert same_state(optimizer.state_dict(), before)
    assert state_bytes_per_parameter_byte(optimizer) == 1


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one["state"][key]["sum"], other["state"][key]["sum"]) for key in other["state"])


def test_a_class_that_makes_its_state_in_the_constructor_trains_as_plainly() -> None:
    def train(is_managed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 6), nn.Linear(6, 2))
        optimizer = StateInConstructor(model.parameters(), lr=0.1)
        plan = lowtide.make_plan(model, weights="streamed", update="host")
        with lowtide.manage(model, optimizer, plan, device="cpu") if is_managed else nullcontext():
            for _ in range(3):
                model(torch.ones(4, 20)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, train(is_managed=True), train(is_managed=False)))
