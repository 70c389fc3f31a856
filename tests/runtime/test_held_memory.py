"""Tensors that the user holds over the memory of parameters and gradients, and memory that the user gives to parameters.

Everything is as in plain torch, with a worker that is far slower than the loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import StaleBackwardError
from lowtide.planning.budget_plans import WarmUp
from lowtide.runtime.updates.worker import HostWorker, Job
from tests.runtime.side_by_side import (
    Tower,
    adamw,
    assert_same_values,
    in_all_places,
    in_turn,
    inputs,
    loss_of,
    manage,
    plan_for,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


@pytest.fixture
def slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    before_each_job(monkeypatch, lambda: time.sleep(0.003))


def before_each_job(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], Any]) -> None:
    """The host's worker does this before each update and each addition of gradients."""
    submit = HostWorker.submit

    def late(worker: HostWorker, work: Callable[[], None], **options: Any) -> Job:
        def wait_and_work() -> None:
            wait()
            work()

        return submit(worker, wait_and_work, **options)

    monkeypatch.setattr(HostWorker, "submit", late)


# Tensors that are held


def detached(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


HOLDERS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "detach": detached,
    "data": lambda model: [parameter.data for parameter in model.parameters()],
    "state_dict": lambda model: list(model.state_dict().values()),
    "view": lambda model: [parameter.detach().view(-1)[1:] for parameter in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(parameter.detach().numpy()) for parameter in model.parameters()],
}


@in_turn
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_held_tensor_shows_each_step_whole(slow_worker: None, place: str, schedule: str, holder: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        held = HOLDERS[holder](model)
        seen = []
        for seed in range(3):
            loss_of(model, seed).backward()
            optimizer.step()
            seen += [tensor.clone() for tensor in held]
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@with_both_schedules
@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_written_to_a_held_tensor_counts(slow_worker: None, place: str, schedule: str, is_kept: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for seed in range(4):
            held = HOLDERS["data" if seed % 2 else "detach"](model)
            seen += steps(model, optimizer, [seed])
            for tensor in held:
                tensor.mul_(0.9)
            if not is_kept:
                del held, tensor
            with torch.no_grad():
                seen.append(model(inputs(50 + seed)))
        return seen

    side_by_side(loop, place, schedule=schedule)


@in_turn
def test_writes_between_an_evaluation_and_a_step(slow_worker: None, place: str, schedule: str) -> None:
    """Copies on the device from before the write must not be used after it."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        held = detached(model)
        seen: list[Tensor] = []
        for seed in range(3):
            with torch.no_grad():
                seen.append(model(inputs(50 + seed)))
            held[2].mul_(0.5)
            held[-1].add_(1.0)
            seen += steps(model, optimizer, [seed])
        return seen

    side_by_side(loop, place, schedule=schedule)


@contextmanager
def locked_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    may_run = threading.Event()
    before_each_job(monkeypatch, lambda: may_run.wait(20))
    try:
        yield may_run
    finally:
        may_run.set()


@pytest.mark.parametrize("place", ["streamed-host", "resident-host"])
@pytest.mark.parametrize("precision", [None, "fp32"])
def test_step_waits_for_no_update_of_memory_that_nobody_holds(
    monkeypatch: pytest.MonkeyPatch, place: str, precision: str | None
) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, precision=precision, max_grad_norm=1.0) as session:
        steps(model, optimizer)
        session.settle()
        with locked_worker(monkeypatch) as may_run:
            loss_of(model, 7).backward()
            started_s = time.perf_counter()
            optimizer.step()
            assert time.perf_counter() - started_s < 10
            may_run.set()


# Gradients


@in_all_places
def test_a_view_of_a_gradient_shows_what_was_added(slow_worker: None, place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        loss_of(model, 0).backward()
        held = [parameter.grad.detach() for parameter in model.parameters() if parameter.grad is not None]
        loss_of(model, 1).backward()
        return [gradient.clone() for gradient in held]

    side_by_side(loop, place)


@in_all_places
def test_what_is_written_to_a_view_of_a_gradient_after_step_comes_too_late(slow_worker: None, place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            held = [parameter.grad.detach() for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            for gradient in held:
                gradient.zero_()
            losses.append(loss.detach())
        return losses

    side_by_side(loop, place)


# Memory that the user gives


class Average:
    """An average of the weights whose memory is exchanged for the model's, as some programs do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [parameter.detach().clone() for parameter in model.parameters()]
        self.backup: list[Tensor] = []

    def update(self) -> None:
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.mul_(0.5).add_(parameter.detach(), alpha=0.5)

    def swap_in(self) -> None:
        self.backup = [parameter.data for parameter in self.model.parameters()]
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            parameter.data = value

    def swap_back(self) -> None:
        for value, parameter in zip(self.backup, self.model.parameters(), strict=True):
            parameter.data = value
        self.backup = []


def evaluate(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model(inputs(60)), model(inputs(61))]


@in_all_places
@with_both_schedules
@pytest.mark.parametrize("evaluates", [True, False])
def test_an_average_that_is_swapped_in_and_out(slow_worker: None, place: str, schedule: str, evaluates: bool) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        average = Average(model)
        seen: list[Tensor] = []
        for seed in range(3):
            seen += steps(model, optimizer, [seed])
            average.update()
            average.swap_in()
            seen += evaluate(model) if evaluates else []
            average.swap_back()
            seen += [parameter.detach().clone() for parameter in model.parameters()]
        return seen + average.values

    side_by_side(loop, place, schedule=schedule)


@in_all_places
@with_both_schedules
def test_training_in_memory_of_the_users(slow_worker: None, place: str, schedule: str) -> None:
    """The weights that are put aside stay as they are, and the others are trained where they lie."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        average = Average(model)
        seen = steps(model, optimizer)
        average.swap_in()
        seen += steps(model, optimizer)
        seen += [value.clone() for value in [*average.values, *average.backup]]
        average.values[3].mul_(0.5)
        seen += steps(model, optimizer)
        average.swap_back()
        seen += steps(model, optimizer)
        return seen + average.values

    side_by_side(loop, place, schedule=schedule)


@in_all_places
def test_a_session_that_ends_in_memory_of_the_users(place: str) -> None:
    plain, model = seeded(Tower), seeded(Tower)
    plain_average, average = Average(plain), Average(model)
    plain_average.values[0].mul_(2)
    average.values[0].mul_(2)
    plain_average.swap_in()
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        average.swap_in()
        assert_same_values(evaluate(plain), evaluate(model))
    assert_same_tensors(plain.state_dict(), model.state_dict())


@in_all_places
def test_an_evaluation_with_an_average_in_the_middle_of_a_step(place: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        average = Average(model)
        seen: list[Tensor] = []
        for seed in range(3):
            loss = loss_of(model, seed)
            average.swap_in()
            seen += evaluate(model)
            average.swap_back()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    side_by_side(loop, place)


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device"])
def test_a_backward_through_memory_that_was_exchanged_is_refused(place: str) -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        steps(model, optimizer)
        loss = loss_of(model, 0)
        average = Average(model)
        average.swap_in()
        with pytest.raises(
            StaleBackwardError, match="group blocks.2 as they were before p.data was set to other memory"
        ):
            loss.backward()
        average.swap_back()
        optimizer.zero_grad()
        steps(model, optimizer)


def test_resident_weights_keep_the_memory_that_a_graph_goes_through() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        loss = loss_of(model, 0)
        for parameter in model.parameters():
            parameter.data = parameter.detach() * 0.5
        loss.backward()
        optimizer.step()
        return steps(model, optimizer)

    side_by_side(loop, "resident-host")


def test_values_that_nobody_else_shows_are_taken_home() -> None:
    """So that the group streams as ever: its next updates are not waited for, and copies are fetched ahead."""
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host"):
        steps(model, optimizer)
        homes = [parameter.data_ptr() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.detach() * 0.5
        assert [parameter.data_ptr() for parameter in model.parameters()] != homes
        steps(model, optimizer)
        assert [parameter.data_ptr() for parameter in model.parameters()] == homes


def test_a_forward_that_writes_to_memory_of_the_users() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        average = Average(model)
        average.swap_in()
        with torch.no_grad():
            seen = [model(inputs(1))]
        seen += [*average.values, *(value.clone() for value in average.backup)]
        average.swap_back()
        return seen

    side_by_side(loop, "streamed-host", build=lambda: nn.Sequential(Clamped(8, 16), Clamped(16, 4)))


def test_defragmentation_leaves_memory_of_the_users_where_it_is() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for seed in range(4):
            seen += steps(model, optimizer, [seed])
            for parameter in model.parameters():
                parameter.data = parameter.detach() * 0.5
        return seen

    plain, model = seeded(Tower), seeded(Tower)
    expected, optimizer = loop(plain, adamw(plain)), adamw(model)
    plan = lowtide.make_plan(model, weights="streamed", update="host", defragment_every=1)
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        assert_same_values(expected, loop(model, optimizer))


def test_a_warm_up_ends_when_nobody_holds_memory_of_its_weights() -> None:
    model = seeded(Tower)
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, WarmUp(device_memory="1MiB"), device="cpu") as session:
        held = detached(model)
        steps(model, optimizer)
        assert session.is_warming_up
        assert_same_values(held, detached(model))
        del held
        steps(model, optimizer)
        assert not session.is_warming_up


def test_a_plan_of_a_model_says_where_nothing_is_held() -> None:
    """Under no kind of plan does a parameter seem to be held when nobody holds one: everything would be slow."""
    for place in ("streamed-host", "streamed-device", "resident-host", "mixed"):
        model = seeded(Tower)
        optimizer = adamw(model)
        session = lowtide.manage(model, optimizer, plan_for(model, place), device="cpu")
        steps(model, optimizer)
        plan_run = session._plan_run
        assert plan_run is not None
        assert not any(group.is_held() for group in plan_run._groups.values())
        held = next(model.parameters()).detach()
        assert [group.name for group in plan_run._groups.values() if group.is_held()] == ["stem"]
        del held
        session.close()
