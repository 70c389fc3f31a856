"""Where the time of a step goes: phases add up to the time that the loop took, however it is planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import compat
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.runtime.statistics.recording import PhaseClock
from lowtide.runtime.statistics.session_stats import PhaseSeconds

NAP_S = 0.02


@dataclass
class At:
    """A ticket at a time; not done until the device is said to have passed it."""

    when_s: float
    device: Device

    def is_done(self) -> bool:
        return self.when_s <= self.device.passed_s

    def wait(self) -> None:
        self.device.num_waits += not self.is_done()

    def time_s(self) -> float:
        self.wait()
        return self.when_s


class Device(EmulatedMover):
    """Its tickets are 1 s apart, and are passed when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = self.told_s = 0.0
        self.num_waits = 0

    def now(self) -> At:  # type: ignore[override]  # another kind of ticket
        self.told_s += 1.0
        return At(self.told_s, self)


def test_phases_follow_each_other_and_the_innermost_counts() -> None:
    clock = PhaseClock(Device())
    for phase in ("update", "forward", "backward"):
        clock.enter(phase)
    clock.leave("backward")
    clock.leave("forward")
    clock.leave("update")
    clock.enter("forward")
    clock.leave("forward")
    assert clock.seconds() == PhaseSeconds(update_s=2, forward_s=3, backward_s=1, rest_s=1)


def test_an_update_inside_a_backward_needs_no_mark_of_its_own() -> None:
    device = Device()
    clock = PhaseClock(device)
    clock.enter("backward")
    clock.insert("update", At(1.25, device), At(1.75, device))
    clock.leave("backward")
    assert device.told_s == 2.0
    assert clock.seconds() == PhaseSeconds(backward_s=0.5, update_s=0.5)
    clock.enter("update")
    clock.insert("update", At(3.25, device), At(3.5, device))  # inside of a step this is the same phase
    clock.leave("update")
    assert clock.seconds() == PhaseSeconds(backward_s=0.5, update_s=1.5, rest_s=1)


def test_nothing_is_waited_for_before_somebody_asks_and_what_has_passed_is_forgotten() -> None:
    device = Device()
    clock = PhaseClock(device)
    for _ in range(50):
        clock.enter("forward")
        clock.leave("forward")
    assert device.num_waits == 0
    assert len(clock._marks) == 100
    device.passed_s = 99.0
    clock.enter("forward")
    assert device.num_waits == 0
    assert len(clock._marks) == 3
    assert clock.seconds() == PhaseSeconds(forward_s=50, rest_s=50)


def test_marks_that_are_passed_in_another_order_keep_the_sum() -> None:
    device = Device()
    clock = PhaseClock(device)
    clock.enter("backward")
    clock.insert("update", At(5.0, device), At(4.0, device))
    clock.leave("backward")  # at 2
    assert clock.seconds() == PhaseSeconds(backward_s=4.0)


class Slow(nn.Module):
    """Sleeps in its forward and twice as long in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        out: torch.Tensor = self.linear(x)
        out.register_hook(_nap) if out.requires_grad else None
        return out


def _nap(gradient: torch.Tensor) -> None:
    del gradient
    time.sleep(2 * NAP_S)


def _stack() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Slow(), Slow(), nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> PhaseSeconds:
    """What the loop itself measures, from the first forward to the last update."""
    times: list[float] = []
    for _ in range(steps):
        batch = torch.ones(2, 8)
        times.append(time.perf_counter())
        out = model(batch)
        times.append(time.perf_counter())
        loss = out.sum()
        time.sleep(NAP_S)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        optimizer.zero_grad()
    spans = [end_s - start_s for start_s, end_s in pairwise(times)]
    forward_s, loss_s, backward_s, update_s, between_s = (sum(spans[place::5]) for place in range(5))
    return PhaseSeconds(forward_s=forward_s, backward_s=backward_s, update_s=update_s, rest_s=loss_s + between_s)


def _assert_alike(seconds: PhaseSeconds, measured: PhaseSeconds) -> None:
    slack_s = 0.05 * measured.total_s
    for key in ("forward_s", "backward_s", "update_s", "rest_s", "total_s"):
        assert getattr(seconds, key) == pytest.approx(getattr(measured, key), abs=slack_s), key


PLANS: list[dict[str, Any]] = [
    {"weights": "resident", "update": "device"},
    {"weights": "resident", "update": "host"},
    {"weights": "streamed", "update": "host"},
    {"weights": "streamed", "update": "device", "schedule": "in_backward"},
    {"weights": "streamed", "activations": "recompute"},
]


@pytest.mark.parametrize("settings", PLANS, ids=lambda settings: "-".join(settings.values()))
def test_the_phases_of_a_session_are_its_wall_time(settings: dict[str, Any]) -> None:
    model, optimizer = _stack()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, **settings)) as session:
        measured = _train(model, optimizer)
        stats = session.stats()
    if settings.get("schedule") == "in_backward":
        # Updates inside of `backward` count as such, which the loop cannot see.
        moved_s = stats.seconds.update_s - measured.update_s
        measured = replace(measured, update_s=stats.seconds.update_s, backward_s=measured.backward_s - moved_s)
        assert moved_s > 0
    _assert_alike(stats.seconds, measured)
    assert stats.seconds.update_s > 0
    assert (stats.host_update_s > 0) == (settings.get("update") != "device")


def test_updates_of_the_worker_are_counted_over_all_steps_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer

    run = ChunkOptimizer.run

    def slow_run(*args: Any) -> None:
        time.sleep(NAP_S)
        run(*args)

    monkeypatch.setattr(ChunkOptimizer, "run", slow_run)
    model, optimizer = _stack()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="streamed", update="host")) as session:
        measured = _train(model, optimizer, steps=5)  # more than the spans that are kept
        session.settle()
        stats = session.stats()
    assert stats.host_update_s >= 5 * len(stats.chunks) * NAP_S
    _assert_alike(stats.seconds, measured)


def _session(model: nn.Module, optimizer: torch.optim.Optimizer, weights: str) -> lowtide.Session:
    update = "device" if weights == "resident" else "host"
    return lowtide.manage(model, optimizer, lowtide.make_plan(model, weights=weights, update=update))


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_backward_that_breaks_off_ends_with_the_next_forward(weights: str) -> None:
    model, optimizer = _stack()

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("broken")

    with _session(model, optimizer, weights) as session:
        hook = model[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        out = model(torch.ones(2, 8))
        hook.remove()
        with pytest.raises(RuntimeError, match="broken"):
            out.sum().backward()
        del out
        before = session.stats().seconds
        optimizer.zero_grad()
        measured = _train(model, optimizer)
        seconds = session.stats().seconds
    slack_s = 0.1 * measured.total_s
    assert seconds.forward_s - before.forward_s == pytest.approx(measured.forward_s, abs=slack_s)
    assert seconds.rest_s - before.rest_s == pytest.approx(measured.rest_s, abs=slack_s)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_a_forward_that_raises_and_an_evaluation_are_over_when_they_return(weights: str) -> None:
    model, optimizer = _stack()
    with _session(model, optimizer, weights) as session:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 9))
        time.sleep(NAP_S)
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(2, 8))
            time.sleep(NAP_S)
        seconds = session.stats().seconds
    assert seconds.rest_s >= 2 * NAP_S  # and not what follows the last of them
    assert seconds.forward_s >= 5 * NAP_S


def test_gradients_inside_a_forward_and_closures_are_told_apart() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow = Slow()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.slow(x)
            loss: torch.Tensor = self.slow(x).sum()
            return loss

    model = Penalised()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident", update="device")) as session:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 8))
            loss.backward()
            return loss

        optimizer.step(closure)
        seconds = session.stats().seconds
    assert seconds.forward_s >= 2 * NAP_S
    assert seconds.backward_s >= 2 * NAP_S
    assert 0 < seconds.update_s < seconds.total_s - 4 * NAP_S


def test_a_model_without_windows_is_called_as_before_and_given_back() -> None:
    model, optimizer = _stack()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident", update="device")):
        assert compat.call_of(model) is not None
        out = model(torch.ones(2, 8))
        assert not out._backward_hooks
    assert compat.call_of(model) is None
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident", update="device")):
        model.compile(backend="eager")
        compiled = compat.call_of(model)
    assert compat.call_of(model) is compiled


def _around(model: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, backend="eager", fullgraph=True)
    return compiled


def _inside(model: nn.Module) -> Callable[..., Any]:
    @torch.compile(backend="eager", fullgraph=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x).sum()
        return out

    return loss


@pytest.mark.parametrize("compiled", [_around, _inside])
def test_a_compiler_goes_through_a_model_without_windows(compiled: Callable[[nn.Module], Callable[..., Any]]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident", update="device")) as session:
        call = compiled(model)
        for _ in range(3):
            call(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.stats().num_steps == 3
        assert session.stats().seconds.update_s > 0
