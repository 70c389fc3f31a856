"""Runs a function in several processes that share a gloo group, and hands their failures on: no child fails in silence."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0


class RankFailedError(AssertionError):
    """A rank raised, was killed, or did not end in time."""


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank.

    Args:
        function: Of a module, so that a process of its own finds it.
        size: How many ranks.
        arguments: The same for all.
        timeout_s: For all of them together; what has not ended then is killed, and fails.

    Raises:
        RankFailedError: With the traceback of each rank that raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lowtide.runtime.manage", "tests.ranks"])
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, Path(folder), rank, size, function, arguments))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline_s = time.monotonic() + timeout_s
        waiting = dict(enumerate(ends))
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for end in wait([*waiting.values()], timeout=left_s):
                rank = next(each for each, other in waiting.items() if other is end)
                del waiting[rank]
                try:
                    answers[rank] = pickle.loads(ends[rank].recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    answers[rank] = (False, f"it ended with exit code {processes[rank].exitcode} and said nothing")
        for rank in waiting:
            processes[rank].kill()
            answers[rank] = (False, f"no answer after {timeout_s:.0f} s")
        for process in processes:
            process.join()
    failed = [f"rank {rank}: {answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]
    if failed:
        raise RankFailedError("\n".join(failed))
    return [answers[rank][1] for rank in range(size)]


def _run(
    end: Connection, folder: Path, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        torch.set_num_threads(1)
        torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=size,
            timeout=dt.timedelta(seconds=TIMEOUT_S),
        )
        answer = (True, function(rank, *arguments))
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    # Not `send`, which would leave tensors in memory that goes with this process.
    end.send_bytes(pickle.dumps(answer))
    end.close()
