"""The threads of the host kernel: which processors they get, several callers, forks, and the end of the process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.host import library as host_library
from lowtide.optim.host.kernel import (
    WorkerCpus,
    available_cpus,
    choose_cpus,
    one_of_each_core,
    read_cpu_quota,
    worker_cpus,
)
from lowtide.optim.update_types import Moments, Piece, Rounding
from tests.optim.host.cases import RULES, assert_same_bits, clone, make_piece, needs_kernel


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_siblings_are_avoided(tmp_path: Path) -> None:
    for cpu in range(8):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    assert one_of_each_core(tuple(range(8)), tmp_path) == (0, 1, 2, 3)
    # Where the mask has only the second of a pair, that one counts.
    assert one_of_each_core((1, 4, 5, 7), tmp_path) == (1, 4, 7)
    assert one_of_each_core((0, 9), tmp_path) == (0, 9)


@pytest.mark.parametrize(
    ("name", "text", "quota"),
    [
        ("cpu.max", "max 100000\n", None),
        ("cpu.max", "250000 100000\n", 2.5),
        ("cpu.max", "nonsense\n", None),
        ("cpu/cpu.cfs_quota_us", "400000\n", 4.0),
        ("cpu/cpu.cfs_quota_us", "-1\n", None),
    ],
)
def test_quota(tmp_path: Path, name: str, text: str, quota: float | None) -> None:
    write(tmp_path, f"sys/fs/cgroup/{name}", text)
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert read_cpu_quota(tmp_path) == quota
    assert read_cpu_quota(tmp_path / "nowhere") is None


def test_one_core_is_left_and_ranks_share() -> None:
    assert choose_cpus(tuple(range(16)), cpu_quota=None) == WorkerCpus(num_threads=15, pinned=tuple(range(16)))
    assert choose_cpus((3,), cpu_quota=None) == WorkerCpus(num_threads=1, pinned=())
    parts = [choose_cpus(tuple(range(10)), cpu_quota=None, part=part, num_parts=3) for part in range(3)]
    assert [part.pinned for part in parts] == [(0, 1, 2), (3, 4, 5), (6, 7, 8, 9)]
    assert [part.num_threads for part in parts] == [2, 2, 3]
    # More ranks than cores: one thread each, nowhere in particular.
    crowd = [choose_cpus((0, 1), cpu_quota=None, part=part, num_parts=5) for part in range(5)]
    assert crowd == [WorkerCpus(num_threads=1, pinned=())] * 5


def test_a_quota_forbids_pinning() -> None:
    assert choose_cpus(tuple(range(64)), cpu_quota=4.0) == WorkerCpus(num_threads=3, pinned=())
    assert choose_cpus(tuple(range(64)), cpu_quota=0.5) == WorkerCpus(num_threads=1, pinned=())
    assert choose_cpus((0, 1, 2), cpu_quota=8.0).pinned == (0, 1, 2)


def test_ranks_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kernel, "available_cpus", lambda: tuple(range(os.cpu_count() or 1)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host_kernel._rank_on_this_machine() == (1, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert host_kernel._rank_on_this_machine() == (0, 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(host_kernel, "available_cpus", lambda: ())
    assert host_kernel._rank_on_this_machine() == (0, 1)


def test_this_machine() -> None:
    chosen = worker_cpus()
    assert 1 <= chosen.num_threads <= (os.cpu_count() or 1)
    assert set(chosen.pinned) <= set(host_kernel.available_cpus())


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


def _update_in_child(piece: Piece, queue: multiprocessing.SimpleQueue[int]) -> None:
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=2)
    queue.put(zlib.crc32(piece.weight.numpy().tobytes()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    piece = make_piece(1 << 18, RULES["adamw"])
    # Made here: torch's own threads do not outlive a fork, so the child must not need them.
    piece_of_child = clone(piece)
    host_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, num_threads=2)
    assert host_library.load().num_threads() >= 2
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=_update_in_child, args=(piece_of_child, queue))
    child.start()
    child.join(60)
    child.kill()  # one that hangs would hold up the end of this process
    assert child.exitcode == 0
    assert queue.get() == zlib.crc32(piece.weight.numpy().tobytes())


def test_threads_end_and_begin_again_and_the_process_ends() -> None:
    program = """
import torch
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.host import library as host_library
from lowtide.optim.update_types import Moments, Piece, Rounding
from lowtide.optim.rules import Sgd
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
def test_threads_keep_to_their_processors() -> None:
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
        library.pin_threads((cpus[-1],))
        later = [os.sched_getaffinity(task) for task in made]
    finally:
        library.stop_threads()
    assert masks == [{cpus[0], cpus[-1]}] * 2
    assert later == [{cpus[-1]}] * 2
