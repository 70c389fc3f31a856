"""Start the ranks of a run on this machine, one process each, and hand on what they answer, tell and fail with.

The processes meet over a store of this process, which listens on the loopback only: there is no file to leave behind.

Note [No rank is left behind]
Whatever ends the call, its processes have ended when it returns. One that fails makes the others fail soon, by the connections
that close; those that have not after `GRACE_S` are killed, as is one that is silent for too long. If this process is killed
itself, the ranks notice that their pipe to it closes, and end.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it, and does not list it

from lowtide.errors import ConfigError, HardwareError, RankFailedError, RanksError

SILENCE_S = 600.0
"""How long a rank may say nothing, neither a message nor its answer."""
GRACE_S = 10.0
"""How long the others have after a rank has failed, to end with an error that may say more."""
LOOPBACK = "127.0.0.1"


def run_on_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    device: str = "cpu",
    silence_s: float = SILENCE_S,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of `size` processes, which are one process group.

    Args:
        function: Of a module, so that a process of its own finds it. There the default group is initialized, and LOCAL_RANK and
            LOCAL_WORLD_SIZE are set as torchrun sets them. A script that calls this guards its own call with
            `if __name__ == "__main__"`.
        size: How many ranks.
        arguments: The same for all. They and the answers must be picklable.
        device: `cpu`, where the ranks meet over gloo; or `cuda`, where each has a device of its own, and NCCL.
        silence_s: A rank that neither tells nor answers anything for so long is killed, and has failed.
        on_message: Called here with the rank and what it has told (`tell`).

    Raises:
        ConfigError: There can be no such ranks.
        HardwareError: There are fewer CUDA devices than ranks.
        RankFailedError: A rank raised, was killed or stood still.
    """
    require_devices(size, device)
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )
    running: list[_Running] = []
    try:
        context = _context({each.__module__ for each in (function, *arguments) if callable(each)})
        for rank in range(size):
            seat = _Seat(rank, size, device, port, threads_of_each(size), dt.timedelta(seconds=2 * silence_s))
            running.append(_start(context, seat, function, arguments))
        answers, failures = _collect(running, silence_s, on_message)
    finally:
        for each in running:
            each.stop()
        del store
    if failures:
        raise _told(failures, size)
    return [answers[rank] for rank in range(size)]


def require_devices(size: int, device: str) -> None:
    """Refuse ranks that cannot be, before anything is started.

    Raises:
        ConfigError: There are none, or they would run on neither a CPU nor on CUDA.
        HardwareError: There are fewer CUDA devices than ranks.
    """
    if size < 1:
        raise ConfigError(f"the number of ranks is {size}; give 1 or more", key="ranks")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"ranks run on the device cpu or cuda, not on {device!r}", key="device")
    if device == "cuda" and torch.cuda.device_count() < size:
        raise HardwareError(
            f"{size} ranks need {size} CUDA devices, one each, and torch sees {torch.cuda.device_count()}; start fewer ranks, or "
            "set device=cpu to run them on emulated ones"
        )


def threads_of_each(size: int) -> int:
    """Threads of torch's that each of so many ranks computes with: together those of one process."""
    return max(1, torch.get_num_threads() // size)


def tell(message: object) -> None:
    """Send the process that has started this rank a message, which also says that the rank is alive. Elsewhere: nothing."""
    if _TO_PARENT is not None:
        _TO_PARENT.send_bytes(pickle.dumps(_Message(message)))


_TO_PARENT: Connection | None = None


@dataclass(frozen=True, slots=True)
class _Seat:
    """What a process is told before it begins."""

    rank: int
    size: int
    device: str
    port: int
    num_threads: int
    timeout: dt.timedelta
    """The limit for what the ranks send each other. It is longer than a rank may be silent, which the process that started it sees
    first."""


@dataclass(frozen=True, slots=True)
class _Message:
    content: object


@dataclass(frozen=True, slots=True)
class _Answer:
    content: object


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank gave no answer."""

    rank: int
    words: str
    """The last line of its traceback, or what happened to the process."""
    trace: str = ""
    error: BaseException | None = None
    """None where there is none, or where it does not survive the way here."""


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """A rank's process, and the end of its pipe."""

    rank: int
    process: BaseProcess
    end: Connection

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.end.close()


def _context(modules: set[str]) -> multiprocessing.context.ForkServerContext:
    """Processes that fork from one that has imported torch already, and these modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *sorted(modules - {"__main__"})])
    # It and its children inherit this: a Ctrl-C on the terminal reaches them too, and it is this process that ends them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _start(
    context: multiprocessing.context.ForkServerContext,
    seat: _Seat,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> _Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, seat, function, arguments), name=f"rank {seat.rank}")
    try:
        process.start()
    finally:
        theirs.close()
    return _Running(seat.rank, process, ours)


def _collect(
    running: list[_Running], silence_s: float, on_message: Callable[[int, Any], None] | None
) -> tuple[dict[int, Any], list[_Failure]]:
    """Listen to the ranks until each has answered or failed."""
    answers: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = {each.end: each for each in running}
    until_s = dict.fromkeys(waiting, time.monotonic() + silence_s)
    is_ending = False
    while waiting:
        for heard in wait([*waiting], timeout=max(0.0, min(until_s[end] for end in waiting) - time.monotonic())):
            assert isinstance(heard, Connection)
            found = _received(heard, waiting[heard])
            if isinstance(found, _Message):
                if not is_ending:
                    until_s[heard] = time.monotonic() + silence_s
                if on_message is not None:
                    on_message(waiting[heard].rank, found.content)
                continue
            rank = waiting.pop(heard).rank
            if isinstance(found, _Answer):
                answers[rank] = found.content
            else:
                failures.append(found)
        silent = [waiting.pop(end) for end in [*waiting] if until_s[end] <= time.monotonic()]
        for each in silent:
            each.process.kill()
            if not is_ending:
                failures.append(_Failure(each.rank, f"no answer after {silence_s:.0f} s, so that it was killed"))
        if failures and not is_ending:
            is_ending = True
            until_s = {end: min(until_s[end], time.monotonic() + GRACE_S) for end in waiting}
    return answers, failures


def _received(end: Connection, sender: _Running) -> _Message | _Answer | _Failure:
    try:
        found = pickle.loads(end.recv_bytes())
    except (EOFError, OSError):
        sender.process.join(5)
        return _Failure(sender.rank, f"it ended with exit code {sender.process.exitcode} and said nothing")
    assert isinstance(found, _Message | _Answer | _Failure)
    return found


def _told(failures: list[_Failure], size: int) -> RankFailedError:
    """One error: the failure that came first, and on which ranks. Others only followed from it, and are in the notes."""
    first = next((each for each in failures if not isinstance(each.error, RanksError)), failures[0])
    ranks = sorted(each.rank for each in failures if each.words == first.words)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    error = RankFailedError(f"{who} of {size}: {first.words}", rank=ranks[0])
    for each in failures:
        if each.trace:
            error.add_note(f"rank {each.rank}:\n{each.trace}")
    error.__cause__ = first.error
    return error


def _run(end: Connection, seat: _Seat, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The process of a rank."""
    global _TO_PARENT
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="lowtide parent", daemon=True).start()
    _TO_PARENT = end
    try:
        with _joined(seat):
            answer = pickle.dumps(_Answer(function(seat.rank, *arguments)))
    except BaseException as error:
        end.send_bytes(pickle.dumps(_failure(seat.rank, error)))
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: what tidies up at exit may wait for the others, who notice by the connections that close now.
        os._exit(1)
    end.send_bytes(answer)
    end.close()


@contextlib.contextmanager
def _joined(seat: _Seat) -> Iterator[None]:
    """This process is a rank of its group."""
    os.environ.update(LOCAL_RANK=str(seat.rank), LOCAL_WORLD_SIZE=str(seat.size))
    torch.set_num_threads(seat.num_threads)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # Without this gloo looks the machine's own name up, which may be another network's, or none's.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = None
    if seat.device == "cuda":
        device = torch.device("cuda", seat.rank)
        torch.cuda.set_device(device)
    store = TCPStore(LOOPBACK, seat.port, is_master=False, timeout=seat.timeout)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        store=store,
        rank=seat.rank,
        world_size=seat.size,
        timeout=seat.timeout,
        device_id=device,
    )
    # Nobody begins, and perhaps ends, while others still connect to it.
    if store.add("joined", 1) == seat.size:
        store.set("all joined", "yes")
    store.wait(["all joined"])
    yield
    dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _failure(rank: int, error: BaseException) -> _Failure:
    kept: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kept = None
    return _Failure(rank, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), kept)
