"""Host memory against made-up control groups, of both versions, and against this process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lowtide.memory.host_memory import HostMemory
from lowtide.units import GiB, MiB

MACHINE_BYTES = 64 * GiB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=MACHINE_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def test_version_2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/job"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job",
            f"{group}/memory.max": 8 * GiB,
            f"{group}/memory.current": 3 * GiB,
            f"{group}/memory.stat": f"anon 5\ninactive_file {1 * GiB}",
        },
    )
    host = HostMemory(root)
    assert host.limit_bytes() == 8 * GiB
    assert host.available_bytes() == 6 * GiB  # 8 - 3 + 1 that is only cache


def test_version_2_the_tightest_group_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job",
            "sys/fs/cgroup/user/job/memory.max": "max",
            "sys/fs/cgroup/user/memory.max": 4 * GiB,
            "sys/fs/cgroup/user/memory.current": 1 * GiB,
            "sys/fs/cgroup/memory.max": 6 * GiB,
            "sys/fs/cgroup/memory.current": 5 * GiB,
        },
    )
    host = HostMemory(root)
    assert host.limit_bytes() == 4 * GiB
    assert host.available_bytes() == 1 * GiB  # the root's, though its limit is the larger one


def test_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/",
            f"{group}/memory.limit_in_bytes": 2 * GiB,
            f"{group}/memory.usage_in_bytes": 1 * GiB,
            f"{group}/memory.stat": f"inactive_file 7\ntotal_inactive_file {256 * MiB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        },
    )
    host = HostMemory(root)
    assert host.limit_bytes() == 2 * GiB
    assert host.available_bytes() == 1 * GiB + 256 * MiB


def test_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123abcd",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 3 * GiB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 4 * GiB,
        },
    )
    host = HostMemory(root)
    assert host.limit_bytes() == 3 * GiB
    assert host.available_bytes() == 0  # never negative


def test_without_control_groups(tmp_path: Path) -> None:
    host = HostMemory(tmp_path)
    assert host.limit_bytes() is None
    assert host.available_bytes() == MACHINE_BYTES


def test_this_process() -> None:
    host = HostMemory()
    assert host.rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0 < host.available_bytes() <= MACHINE_BYTES
