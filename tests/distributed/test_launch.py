"""Processes that are started as ranks: their answers come back, no failure is silent, and none of them outlives the call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lowtide.distributed import launch
from lowtide.distributed.launch import require_devices, run_on_ranks, tell, threads_of_each
from lowtide.errors import ConfigError, HardwareError, RankFailedError

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
from lowtide.distributed.launch import run_on_ranks
from tests.distributed.test_launch import sleep
if __name__ == "__main__":
    run_on_ranks(sleep, 2, on_message=lambda rank, pid: print(pid, flush=True))
"""


def facts(rank: int, offset: int) -> tuple[Any, ...]:
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    place = (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
    return rank, dist.get_rank(), total, torch.get_num_threads(), place


def fail(rank: int, how: str) -> int:
    if rank == 1:
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)
            case "exit":
                sys.exit(3)
            case "closure":
                raise local_error()
            case "unpicklable answer":
                return lambda: 1  # type: ignore[return-value]
        raise ConfigError("on purpose", key="how")
    if how == "others wait":
        dist.barrier()
    return rank


def local_error() -> Exception:
    class LocalError(Exception):
        """Of no module: it cannot be sent."""

    return LocalError("on purpose")


def chat(rank: int) -> None:
    # Each message says that the rank is alive: together they take longer than it may be silent.
    for number in range(6):
        time.sleep(0.5)
        tell((rank, number))


def sleep(rank: int) -> None:
    del rank
    tell(os.getpid())
    time.sleep(60)


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_answers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    answers = run_on_ranks(facts, size, 10)
    total = torch.tensor([float(sum(range(10, 10 + size)))])
    assert answers == [(rank, rank, total, 7 // size, (str(rank), str(size))) for rank in range(size)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1 of 2: ConfigError: on purpose"),
        ("others wait", "rank 1 of 2: ConfigError: on purpose"),
        ("kill", "rank 1 of 2: it ended with exit code -9 and said nothing"),
        ("exit", "rank 1 of 2: SystemExit: 3"),
        ("closure", "LocalError: on purpose"),
        ("unpicklable answer", "rank 1 of 2: .*pickle"),
    ],
)
def test_a_rank_that_fails_fails_the_call(how: str, words: str) -> None:
    begin_s = time.monotonic()
    with pytest.raises(RankFailedError, match=words) as raised:
        run_on_ranks(fail, 2, how)
    assert raised.value.rank == 1
    assert "rank 0" not in raised.value.message, "it only followed"
    assert time.monotonic() - begin_s < 60
    if how in ("raise", "others wait"):
        assert isinstance(raised.value.__cause__, ConfigError)
        assert any('raise ConfigError("on purpose"' in note for note in raised.value.__notes__), "the traceback"


def test_a_rank_that_hangs_fails_the_call() -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2: no answer after 4 s, so that it was killed"):
        run_on_ranks(fail, 2, "hang", silence_s=4)


def test_the_others_are_ended_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    with pytest.raises(RankFailedError, match="rank 0 of 2: ValueError: on purpose") as raised:
        run_on_ranks(fail_and_hang, 2)
    assert "rank 1" not in str(raised.value)


def fail_and_hang(rank: int) -> None:
    if rank == 0:
        raise ValueError("on purpose")
    time.sleep(60)


def test_a_rank_that_tells_is_alive() -> None:
    heard: list[Any] = []
    run_on_ranks(chat, 2, silence_s=2.5, on_message=lambda rank, message: heard.append((rank, message)))
    for rank in range(2):
        assert [message for sender, message in heard if sender == rank] == [(rank, number) for number in range(6)]


def test_telling_outside_of_a_rank_does_nothing() -> None:
    tell("nobody")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    temporary = Path(tempfile.mkdtemp())  # not in `tmp_path`: the names of sockets are short
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}:{folder}", "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert all(lines), process.stderr.read()
        ranks = [int(line) for line in lines]
        family = psutil.Process(process.pid).children(recursive=True)
        assert {*ranks} <= {each.pid for each in family}
        # A Ctrl-C on a terminal reaches all processes of the command.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.wait(20)
        assert process.returncode == -number
        until(lambda: not any(map(psutil.Process.is_running, family)))
        errors = process.stderr.read()
    assert errors.count("Traceback") == (number == signal.SIGINT), errors
    left = [*temporary.iterdir()]
    shutil.rmtree(temporary)
    if number == signal.SIGINT:
        assert left == []


def until(is_so: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="the number of ranks is 0; give 1 or more"):
        run_on_ranks(facts, 0, 1)
    with pytest.raises(ConfigError, match="on the device cpu or cuda, not on 'meta'"):
        require_devices(1, "meta")
    with pytest.raises(
        HardwareError, match=f"99 ranks need 99 CUDA devices, .* torch sees {torch.cuda.device_count()};"
    ):
        require_devices(99, "cuda")


def test_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [threads_of_each(size) for size in (1, 3, 8, 9)] == [8, 2, 1, 1]
