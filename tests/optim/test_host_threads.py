"""The threads of the host kernel: several callers, forks, and the end of the process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowtide.optim import host_kernel, host_library
from lowtide.optim.cpu_topology import available_cpus
from lowtide.optim.update_types import Moments, Rounding
from tests.optim.host_cases import RULES, assert_same_bits, clone, make_piece, needs_kernel

pytestmark = needs_kernel


def test_python_runs_and_updates_take_turns() -> None:
    pieces = [make_piece(1 << 20, RULES["adamw"], seed=seed) for seed in range(3)]
    expected = [clone(piece) for piece in pieces]
    threads = [
        threading.Thread(
            target=lambda piece=piece: host_kernel.update(  # type: ignore[misc]
                [piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=2
            )
        )
        for piece in pieces
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host_kernel.update(expected, rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=1)
    for one, other in zip(pieces, expected, strict=True):
        assert_same_bits(one, other)


def _update_in_child(queue: multiprocessing.SimpleQueue[float]) -> None:
    piece = make_piece(1 << 18, RULES["adamw"])
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=2)
    queue.put(piece.weight.double().sum().item())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    piece = make_piece(1 << 18, RULES["adamw"])
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=2)
    assert host_library.load().num_threads() >= 2
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[float] = context.SimpleQueue()
    child = context.Process(target=_update_in_child, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == piece.weight.double().sum().item()


def test_threads_end_and_begin_again_and_the_process_ends() -> None:
    program = """
import torch
from lowtide.optim import host_kernel, host_library
from lowtide.optim.update_types import Moments, Piece, Rounding, Sgd
def step():
    n = 1 << 18
    piece = Piece(weight=torch.ones(n), gradient=torch.ones(n), state={}, rule=Sgd(lr=0.5), step=1)
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=3)
    assert (piece.weight == 0.5).all()
step()
assert host_library.load().num_threads() == 3
host_library.load().stop_threads()
assert host_library.load().num_threads() == 0
step()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_threads_are_pinned() -> None:
    library = host_library.load()
    cpus = available_cpus()
    library.stop_threads()
    before = set(Path("/proc/self/task").iterdir())
    piece = make_piece(1 << 18, RULES["sgd"])
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=2)
    made = [int(task.name) for task in set(Path("/proc/self/task").iterdir()) - before]
    try:
        library.pin_threads((cpus[-1], cpus[0]))
        masks = [os.sched_getaffinity(task) for task in made]
    finally:
        library.stop_threads()
    assert sorted(map(tuple, masks)) == sorted([(cpus[0],), (cpus[-1],)])
