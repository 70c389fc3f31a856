"""Interrupts and exceptions at any line leave a session in a good condition; see `tests.runtime.injection`."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.errors import SessionError, StepLostError
from lowtide.memory.pools import Arena
from lowtide.runtime.passes.lock import HELD_INTERRUPTS, HeldInterrupts
from lowtide.runtime.updates.worker import HostWorker
from tests.runtime.injection import CASES
from tests.runtime.twins import TrippedError, Twins, make_batch, twins

ROOT = Path(__file__).parents[2]
SAMPLE = 3
"""Injections for each case in the quick form; the whole one has 2,500 to 11,000."""


def inject(*arguments: str) -> list[dict[str, object]]:
    """Run the injections in a process of their own; what they left wrong."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.injection", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert lines, run.stderr[-2000:]
    assert lines[-1].get("injections"), run.stderr[-2000:]
    return lines[:-1]


def test_a_sample_of_lines() -> None:
    assert inject("--each", str(SAMPLE), "--seed", "0") == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize(("setting", "schedule"), CASES)
def test_every_line(setting: str, schedule: str) -> None:
    assert inject("--setting", setting, "--schedule", schedule) == []


# -- held interrupts ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    # A shell lets its jobs in the background ignore interrupts.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert HELD_INTERRUPTS._depth == 0
    signal.signal(signal.SIGINT, outside)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_at_the_end_of_the_outermost_section() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # where it is raised is what is tested
        with HELD_INTERRUPTS:
            with HELD_INTERRUPTS:
                interrupt()
                reached.append("inside")
            reached.append("after the inner one")
        reached.append("after")
    HELD_INTERRUPTS.restore_handler()
    assert reached == ["inside", "after the inner one"]


def test_it_goes_to_the_handler_that_was_there() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with HELD_INTERRUPTS:
            interrupt()
            assert heard == []
        assert heard == [signal.SIGINT]
        interrupt()
        HELD_INTERRUPTS.restore_handler()
        interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 3


def test_a_second_one_is_not_held() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), HELD_INTERRUPTS:  # noqa: PT012
        interrupt()
        reached.append("once")
        interrupt()
        reached.append("twice")
    HELD_INTERRUPTS.restore_handler()
    assert reached == ["once"]


def test_a_section_that_was_left_without_its_end_holds_nothing() -> None:
    held = HeldInterrupts()

    def enter() -> None:
        held.__enter__()

    enter()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    held.restore_handler()


def test_a_section_that_was_left_without_its_end_is_forgotten() -> None:
    """A second interrupt may break the end of a section off; the next sections hold again, and its frame is let go."""
    held = HeldInterrupts()
    reached: list[str] = []

    def enter() -> None:
        held.__enter__()

    enter()
    held.restore_handler()
    assert held._owner is None
    with pytest.raises(KeyboardInterrupt), held:  # noqa: PT012
        interrupt()
        reached.append("inside")
    held.restore_handler()
    assert reached == ["inside"]


def test_sections_of_other_threads_hold_nothing() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with HELD_INTERRUPTS:
            inside.set()
            go_on.wait(timeout=30)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(timeout=30)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        go_on.set()
        thread.join()


# -- a session ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device", "resident-host"])
def test_an_interrupt_in_a_step_waits_until_all_groups_have_taken_it(place: str) -> None:
    with twins(place) as both:
        both.step(0)
        model, optimizer = both.model, both.optimizer
        both.each(lambda model, _: model(*make_batch(1)).backward())
        finisher = both.session._open()._executor.finisher
        assert finisher is not None
        updater, num_calls = finisher.updater, 0
        settings = updater.optimizer.settings

        def settings_and_interrupt() -> object:
            interrupt()
            return settings()

        updater.optimizer.settings = settings_and_interrupt  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        del updater.optimizer.settings, num_calls, model
        both.plain_optimizer.step()
        both.each(lambda _, optimizer: optimizer.zero_grad())
        both.assert_same()
        both.step(2)


def break_update(both: Twins, monkeypatch: pytest.MonkeyPatch, *, after: int, times: int) -> None:
    """Let `step` of torch's class raise after so many calls, so many times."""
    whole, calls = torch.optim.AdamW.step, [0]

    def step(optimizer: torch.optim.Optimizer, closure: object = None) -> object:
        calls[0] += 1
        if after < calls[0] <= after + times:
            raise TrippedError("broken")
        return whole(optimizer)  # type: ignore[arg-type]  # a shadow of the user's

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


def test_a_step_that_is_torn_on_the_device_is_lost_and_says_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Twins("streamed-device")
    both.step(0)
    both.model(*make_batch(1)).backward()
    with monkeypatch.context() as patch:
        break_update(both, patch, after=2, times=100)
        with pytest.raises(TrippedError):
            both.optimizer.step()
    with pytest.raises(StepLostError, match=r"step\(\) raised after it had updated 3 of 5 groups .*these have taken"):
        both.optimizer.step()
    both.optimizer.zero_grad()
    both.model(*make_batch(2)).backward()
    both.optimizer.step()
    both.session.close()


def test_a_half_step_that_nobody_was_told_of_is_told_by_zero_grad() -> None:
    both = Twins("streamed-host", "in_backward")
    both.step(0)
    both.trip("backward", layer=1)
    with pytest.raises(TrippedError):
        both.model(*make_batch(1)).backward()
    with pytest.warns(RuntimeWarning, match=r"2 of 5 groups \(\(rest of the model\), layers.2\)"):
        both.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both.optimizer.zero_grad()  # once
    both.session.close()


def test_the_last_update_of_a_backward_that_is_torn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups have moved by then, but one of them perhaps by half."""
    both = Twins("resident-device", "in_backward")
    both.step(0)
    with monkeypatch.context() as patch:
        break_update(both, patch, after=4, times=1)
        with pytest.raises(TrippedError):
            both.model(*make_batch(1)).backward()
    with pytest.warns(RuntimeWarning, match=r"5 of 5 groups .*these have taken the step, one of them perhaps by half"):
        both.optimizer.zero_grad()
    both.session.close()


def test_a_verdict_is_sent_before_it_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception between the two leaves nothing that `close` would wait for in vain."""

    class Tripping(list[object]):
        def append(self, item: object) -> None:
            raise TrippedError("broken")

    both = Twins("resident-device", "in_backward")
    both.step(0)
    watch = both.session._open()._executor.gradient_watch
    with monkeypatch.context() as patch:
        patch.setattr(watch, "_unsent", Tripping())
        with pytest.raises(TrippedError):
            both.model(*make_batch(1)).backward()
    both.session.close()


def test_a_half_step_that_ends_the_session_is_noted_at_the_exception() -> None:
    both = Twins("streamed-host", "in_backward")
    both.step(0)
    both.trip("backward", layer=1)
    with pytest.raises(TrippedError) as caught, both.session:
        both.model(*make_batch(1)).backward()
    assert not both.session.is_open
    assert "2 of 5 groups ((rest of the model), layers.2)" in caught.value.__notes__[0]


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device", "mixed", "resident-host"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_checkpoint_that_is_loaded_right_after_a_broken_backward(place: str, schedule: str) -> None:
    both = Twins(place, schedule)
    both.step(0)
    (weights, _), state = both.snapshot(), copy.deepcopy(both.optimizer.state_dict())
    weights = {name: value / 2 for name, value in weights.items()}
    both.plain.load_state_dict(weights)
    both.trip("backward", layer=1)
    with pytest.raises(TrippedError):
        both.model(*make_batch(1)).backward()
    both.mend()
    both.model.load_state_dict(weights)
    both.optimizer.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both.optimizer.zero_grad()
    both.assert_same()
    both.step(2)
    both.session.close()


def test_a_backward_that_breaks_off_before_the_first_window_is_lost() -> None:
    """The head stays on the device, and has its gradients by then."""
    both = Twins("streamed-device", weights={"*": "streamed"}, device_memory=1 << 20)
    both.step(0)

    def fail(gradient: torch.Tensor) -> None:
        raise TrippedError("broken")

    hook = both.model.layers[2].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(TrippedError):
        both.model(*make_batch(1)).backward()
    hook.remove()
    assert both.model.head.weight.grad is not None
    with pytest.raises(StepLostError, match="weights and optimizer are as before the step"):
        both.optimizer.step()
    both.optimizer.zero_grad()
    both.step(2)
    both.assert_same()
    both.session.close()


def test_staging_that_an_exception_left_is_not_in_the_way_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Twins("streamed-host", "in_backward")
    view = Arena.view

    def broken(arena: Arena, key: str) -> torch.Tensor:
        if key.startswith("staging"):
            raise TrippedError("broken")
        return view(arena, key)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "view", broken)
        with pytest.raises(TrippedError):
            both.model(*make_batch(0)).backward()
    both.optimizer.zero_grad()
    both.step(0)
    both.step(1)
    both.assert_same()
    both.session.close()


def test_close_goes_on_where_an_exception_broke_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Twins("mixed")
    both.step(0)
    plan_run = both.session._open()
    with monkeypatch.context() as patch:
        patch.setattr(plan_run.calls, "remove", lambda: (_ for _ in ()).throw(TrippedError("broken")).__next__())
        with pytest.raises(TrippedError):
            both.session.close()
    assert both.session.is_open
    both.session.close()
    assert not both.session.is_open
    assert "step" not in vars(both.optimizer)


# -- the worker --------------------------------------------------------------------------------------------------------


def test_a_job_that_waits_for_itself_raises() -> None:
    worker = HostWorker()
    jobs = [worker.new_job()]
    worker.submit(lambda: jobs[0].wait(), job=jobs[0])
    with pytest.raises(SessionError, match="would wait for itself for ever"):
        jobs[0].wait()
    with pytest.raises(SessionError):
        worker.check()
    worker.close()


def test_an_update_on_the_host_that_fails_says_that_others_may_have_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Twins("streamed-host", "in_backward")
    both.step(0)
    with monkeypatch.context() as patch:
        break_update(both, patch, after=4, times=1)
        with pytest.raises(TrippedError) as caught:  # noqa: PT012  # whichever call hears of it first
            both.model(*make_batch(1)).backward()
            both.optimizer.step()
            both.session.settle()
    assert [note for note in caught.value.__notes__ if "some groups may have taken this step" in note] != []
    assert len(caught.value.__notes__) == 1
    with contextlib.suppress(TrippedError):  # it is told by the next call as well
        both.session.close()
    assert not both.session.is_open


class Nosy(torch.optim.SGD):
    """Reads the model's parameters in its step."""

    seen: torch.nn.Parameter | None = None

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.seen is not None:
            self.seen.sum()
        super().step()


def test_an_update_that_looks_at_a_parameter_raises() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = Nosy(model.parameters(), lr=0.1)
    plan = lowtide.make_plan(model, weights="streamed", update="host")
    session = lowtide.manage(model, optimizer, plan, device="cpu")
    model(torch.ones(2, 4)).sum().backward()
    Nosy.seen = model[0].weight
    try:
        optimizer.step()
        with pytest.raises(SessionError, match="looks at a parameter of group 0, which waits for updates"):
            session.settle()
        with pytest.raises(SessionError):
            session.close()
    finally:
        Nosy.seen = None
