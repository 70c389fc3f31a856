"""Requests to stop: the first one waits for the step, the second one and the end of a scheduler's patience do not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.config import write_config
from lowtide.train.stopping import StopRequests
from tests.train.runs import ask_to_stop, losses, rows, small_recipe, train


def wait_until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


class Left:
    """Remembers what would have ended the process."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []

    def __call__(self, code: int, why: str) -> None:
        self.calls.append((code, why))


def test_the_first_request_waits_and_the_second_leaves() -> None:
    left, asked = Left(), threading.Event()
    stop = StopRequests(30, left, asked.set)
    with stop.watching(), stop.guarded():
        signal.raise_signal(signal.SIGINT)
        wait_until(asked.is_set)
        assert (stop.is_requested, stop.exit_code, stop.left_s, left.calls) == (True, 130, None, [])
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: left.calls)
    assert left.calls == [(130, "asked a second time")]


def test_sigterm_has_a_deadline() -> None:
    left = Left()
    stop = StopRequests(2.5, left)
    began_s = time.monotonic()
    with stop.watching(), stop.guarded():
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: stop.is_requested)
        assert stop.left_s is not None
        assert 0 < stop.left_s <= 0.5
        wait_until(lambda: left.calls)
    assert left.calls == [(143, "2.5 s after SIGTERM are nearly over")]
    assert 0.4 < time.monotonic() - began_s < 2.5


def test_before_there_is_anything_to_save_a_request_leaves_at_once() -> None:
    left = Left()
    with StopRequests(30, left).watching():
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: left.calls)
    assert left.calls == [(130, "nothing is to be saved now")]


def test_handlers_are_put_back() -> None:
    # Python's own: a shell that runs tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequests(30, Left()).watching():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_in_another_thread_nothing_is_watched() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopRequests(30, Left()).watching() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.is_requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


@pytest.mark.slow
def test_a_save_that_takes_longer_than_is_left_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.train.keeper.Keeper.expected_s", property(lambda self: 100.0))
    stop = StopRequests(30, Left())
    heard = ask_to_stop(stop, 5, signal.SIGTERM)
    recipe = small_recipe(tmp_path, "checkpoints.every=2")
    result = train(recipe, tmp_path / "out", heard=heard, stop=stop)
    assert (result.is_finished, result.saved_step) == (False, 4)
    assert any(note.startswith("a save takes about 100 s, and ") for note in heard.notes)
    monkeypatch.undo()
    assert train(recipe, tmp_path / "out", resume=True).is_finished
    assert [step for step, _ in losses(tmp_path / "out")] == list(range(1, 9))


HANGING_SAVE = """
import sys, time
from pathlib import Path
from lowtide.runtime.checkpoints.format import CheckpointWriter
from lowtide.cli.main import app

real = CheckpointWriter.finish
def finish(self, *, step, state):
    if step > 2:
        print("hanging", flush=True)
        time.sleep(600)
    return real(self, step=step, state=state)
CheckpointWriter.finish = finish
app(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "code", "words"),
    [((signal.SIGINT, signal.SIGINT), 130, "asked a second time"), ((signal.SIGTERM,), 143, "nearly over")],
    ids=["a second Ctrl-C", "the end of SIGTERM's grace"],
)
def test_a_save_that_hangs_is_left(tmp_path: Path, signals: tuple[signal.Signals, ...], code: int, words: str) -> None:
    recipe = small_recipe(tmp_path, "checkpoints.every=2", "faults.grace_s=4")
    (tmp_path / "run.py").write_text(HANGING_SAVE)
    config_file = tmp_path / "recipe.yaml"
    write_config(recipe, config_file)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", "train", config_file, "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    began_s = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.5)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began_s < 10
    assert process.returncode == code, errors
    assert words in errors
    assert f"lowtide train {out} --resume" in errors
    assert train(recipe, out, resume=True).is_finished
    assert [step for step, _ in losses(out)] == list(range(1, 9))


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "steps=40", "checkpoints.every=3", "evaluation.every=5")
    write_config(recipe, tmp_path / "recipe.yaml")
    out, starts = tmp_path / "out", 0
    while True:
        starts += 1
        command = [sys.executable, "-m", "lowtide", "train", tmp_path / "recipe.yaml", "--out", out, "--resume"]
        process = subprocess.Popen(
            command[: None if (out / "recipe.yaml").exists() else -1], stderr=subprocess.PIPE, text=True
        )
        num_before = len(losses_so_far(out))
        while process.poll() is None and len(losses_so_far(out)) < num_before + 5 * starts:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
    assert starts > 3
    train(recipe, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")
    assert [row["loss"] for row in rows(out, "evaluation")] == [
        row["loss"] for row in rows(tmp_path / "whole", "evaluation")
    ]


def losses_so_far(out: Path) -> list[bytes]:
    path = out / "metrics.jsonl"
    return [line for line in path.read_bytes().splitlines() if b'"step_s"' in line] if path.exists() else []
