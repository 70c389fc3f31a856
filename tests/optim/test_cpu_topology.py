"""Which processors the threads get: from trees like those under /sys, and from this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide.optim import cpu_topology
from lowtide.optim.cpu_topology import WorkerCpus, choose_cpus, one_of_each_core, read_cpu_quota, worker_cpus


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
    assert choose_cpus(tuple(range(16)), cpu_quota=None) == WorkerCpus(num_threads=15, pinned=tuple(range(1, 16)))
    assert choose_cpus((3,), cpu_quota=None) == WorkerCpus(num_threads=1, pinned=())
    parts = [choose_cpus(tuple(range(10)), cpu_quota=None, part=part, num_parts=3) for part in range(3)]
    assert [part.pinned for part in parts] == [(1, 2), (4, 5), (7, 8, 9)]
    # More ranks than cores: one thread each, nowhere in particular.
    crowd = [choose_cpus((0, 1), cpu_quota=None, part=part, num_parts=5) for part in range(5)]
    assert crowd == [WorkerCpus(num_threads=1, pinned=())] * 5


def test_a_quota_forbids_pinning() -> None:
    assert choose_cpus(tuple(range(64)), cpu_quota=4.0) == WorkerCpus(num_threads=3, pinned=())
    assert choose_cpus(tuple(range(64)), cpu_quota=0.5) == WorkerCpus(num_threads=1, pinned=())
    assert choose_cpus((0, 1, 2), cpu_quota=8.0).pinned == (1, 2)


def test_ranks_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_topology, "available_cpus", lambda: tuple(range(os.cpu_count() or 1)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cpu_topology._rank_on_this_machine() == (1, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert cpu_topology._rank_on_this_machine() == (0, 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cpu_topology, "available_cpus", lambda: ())
    assert cpu_topology._rank_on_this_machine() == (0, 1)


def test_this_machine() -> None:
    chosen = worker_cpus()
    assert 1 <= chosen.num_threads <= (os.cpu_count() or 1)
    assert set(chosen.pinned) <= set(cpu_topology.available_cpus())
