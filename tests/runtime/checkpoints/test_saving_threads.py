"""The threads of a save: they end with the process and with a second interrupt, and no forked child waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from lowtide.runtime.checkpoints import snapshot
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.format import CheckpointReader
from tests.runtime.checkpoints.test_saving import SlowDisk, assert_is, contents_now, use_disk
from tests.runtime.checkpoints.training_runs import STREAMED_HOST, Run, draw_from, training

ROOT = Path(__file__).parents[3]
HOST_RUN = Run(place=STREAMED_HOST)

PROGRAM = """
import os, signal, sys, threading, time
import torch
import lowtide
from lowtide.runtime.checkpoints import saving
from tests.runtime.checkpoints.test_saving import SlowDisk
from tests.runtime.checkpoints.training_runs import STREAMED_HOST, Run, Training

made = saving.Saver.__init__
saving.Saver.__init__ = lambda saver: made(saver, SlowDisk(bytes_per_s=RATE))
run = Training(Run(place=STREAMED_HOST))
run.steps(2)
"""


def start(program: str, folder: Path, rate: float) -> subprocess.Popen[str]:
    text = PROGRAM.replace("RATE", str(rate)) + textwrap.dedent(program).replace("FOLDER", repr(str(folder)))
    return subprocess.Popen(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def steps_in(folder: Path) -> list[int]:
    """The checkpoints, each of which is whole."""
    found = RunFolder(folder).checkpoints()
    for path in found.values():
        CheckpointReader(path).verify()
    return sorted(found)


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    process = start("run.session.save(FOLDER, allowance='64MiB')", tmp_path, rate=4e5)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert steps_in(tmp_path) == [2]


def test_an_exception_that_nobody_catches_lets_the_save_end(tmp_path: Path) -> None:
    program = """
    with run.session:
        run.session.save(FOLDER, allowance='16KiB')
        raise ValueError("the loop's own")
    """
    process = start(program, tmp_path, rate=4e5)
    _, errors = process.communicate(timeout=120)
    assert "ValueError: the loop's own" in errors
    assert steps_in(tmp_path) == [2]


def test_an_interrupt_finishes_the_save_and_a_second_one_leaves_at_once(tmp_path: Path) -> None:
    # Some 100 KB, in pieces of 5 KB at most: without a second interrupt it would take longer than the test waits.
    program = """
    run.session.save(FOLDER)
    print("begun", flush=True)
    with run.session:
        run.session.save(FOLDER, step=9, allowance='64MiB')
        run.session._management._saver._under_way.order.disk._bytes_per_s = 1000.0
        print("slow", flush=True)
        while True:
            run.step()
            time.sleep(0.01)
    """
    process = start(program, tmp_path, rate=1e6)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert process.stdout.readline() == "slow\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None, "the first one waits for the save"
    began_s = time.perf_counter()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.perf_counter() - began_s < 40
    assert "KeyboardInterrupt" in errors
    assert steps_in(tmp_path) == [2]


def test_a_forked_child_waits_for_nobody(tmp_path: Path) -> None:
    gate = threading.Event()
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        use_disk(patch, SlowDisk(gate=gate))
        trained.steps(2)
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance="40KiB")
        reading = next(iter(snapshot._LIVING))
        pid = os.fork()
        if pid == 0:
            try:
                reading.wait_for_all()
                reading.reads_of(trained.model.parameters()).wait()
                names = [path.name for path in tmp_path.iterdir()]
                print("NAMES", names, flush=True)
                os._exit(0 if any("partial" in name for name in names) else 2)
            finally:
                os._exit(1)
        deadline_s = time.monotonic() + 30
        status = (0, 0)
        while status[0] == 0 and time.monotonic() < deadline_s:
            status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child waits for its parent's threads")
        assert os.waitstatus_to_exitcode(status[1]) == 0
        gate.set()
        trained.session.wait_for_save()
        assert_is(folder, expected)


def test_a_session_that_is_forgotten_finishes_its_save(tmp_path: Path) -> None:
    import gc

    draw_from(5)
    with pytest.MonkeyPatch.context() as patch:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        run = HOST_RUN
        with training(run) as trained:
            pass
        from tests.runtime.checkpoints.training_runs import Training

        trained = Training(run)
        trained.steps(2)
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance="8KiB")
        del trained
        gc.unfreeze()
        gc.collect()
        deadline_s = time.monotonic() + 30
        while not folder.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert_is(folder, expected)


def test_no_thread_outlives_its_save(tmp_path: Path) -> None:
    draw_from(5)
    with training(HOST_RUN) as trained:
        trained.step()
        for _ in range(3):
            trained.session.save(tmp_path, allowance="64MiB")
            trained.step()
            trained.session.wait_for_save()
            assert not trained.session.is_saving
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s and _threads():
            time.sleep(0.01)
        assert not _threads()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "lowtide checkpoint"]


def test_an_interrupt_in_save_takes_back_what_was_begun(tmp_path: Path) -> None:
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        disk = SlowDisk(bytes_per_s=1e5)
        use_disk(patch, disk)
        trained.step()
        outside = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                trained.session.save(tmp_path)
        finally:
            timer.join()
            signal.signal(signal.SIGINT, outside)
        trained.step()
        with pytest.raises(Exception, match="KeyboardInterrupt"):
            trained.session.wait_for_save()
        assert steps_in(tmp_path) == []
        assert not any("partial" in path.name for path in tmp_path.iterdir())
        disk._bytes_per_s = None
        expected = contents_now(trained)
        assert_is(trained.session.save(tmp_path, state=trained.state), expected)
        assert torch.isfinite(next(iter(trained.model.parameters()))).all()
