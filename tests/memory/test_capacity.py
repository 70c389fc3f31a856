"""Capacities and host memory against made-up machines and control groups, and every form in which a budget may be written."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BudgetError, ConfigError, HardwareError
from lowtide.memory.tier import (
    PINNABLE_SHARE,
    HostMemory,
    device_capacity_bytes,
    host_capacity_bytes,
    pinned_capacity_bytes,
    resolve_budget,
)
from lowtide.units import GiB, MiB

MACHINE_BYTES = 64 * GiB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(total=MACHINE_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def host_with_limit(root: Path, limit_bytes: int) -> HostMemory:
    group = root / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text(f"{limit_bytes}\n")
    return HostMemory(root)


@pytest.mark.usefixtures("machine")
def test_host_is_the_machine_without_control_groups(tmp_path: Path) -> None:
    assert host_capacity_bytes(HostMemory(tmp_path)) == MACHINE_BYTES


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("limit_bytes", "expected"), [(8 * GiB, 8 * GiB), (100 * GiB, MACHINE_BYTES)])
def test_host_is_bounded_by_its_control_group(tmp_path: Path, limit_bytes: int, expected: int) -> None:
    host = host_with_limit(tmp_path, limit_bytes)
    assert host_capacity_bytes(host) == expected
    assert pinned_capacity_bytes(host) == int(expected * PINNABLE_SHARE)


def test_this_machine() -> None:
    assert 256 * MiB < host_capacity_bytes() <= psutil.virtual_memory().total
    # Whatever `ulimit -l` says: 64 KiB there would not stop CUDA.
    assert pinned_capacity_bytes() == int(host_capacity_bytes() * 0.72)


def test_the_processor_has_no_device_memory() -> None:
    with pytest.raises(HardwareError, match="the device cpu has no memory of its own to measure; give its budget"):
        device_capacity_bytes(torch.device("cpu"))


def test_a_device_that_is_not_there() -> None:
    num_devices = torch.cuda.device_count()
    with pytest.raises(HardwareError, match=f"no device cuda:99, this machine has {num_devices} CUDA devices"):
        device_capacity_bytes(torch.device("cuda", 99))


@pytest.mark.gpu
def test_device_is_the_whole_card() -> None:
    assert device_capacity_bytes(torch.device("cuda", 0)) == torch.cuda.mem_get_info(0)[1]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, 64 * GiB),
        (123, 123),
        (0, 0),
        (1, 1),
        (1.0, 64 * GiB),
        (0.25, 16 * GiB),
        ("14GiB", 14 * GiB),
        ("1 GB", 10**9),
        ("512", 512),
        ("64GiB", 64 * GiB),
        ("50%", 32 * GiB),
        ("12.5 % ", 8 * GiB),
        ("100%", 64 * GiB),
    ],
)
def test_forms_of_a_budget(written: str | int | float | None, expected: int) -> None:
    assert resolve_budget(written, 64 * GiB, what="host budget") == expected


@given(share=st.floats(0, 1, exclude_min=True), capacity_bytes=st.integers(0, 2**44))
def test_a_share_is_never_more_than_the_capacity(share: float, capacity_bytes: int) -> None:
    budget_bytes = resolve_budget(share, capacity_bytes, what="host budget")
    assert 0 <= budget_bytes <= capacity_bytes
    assert budget_bytes == pytest.approx(share * capacity_bytes, abs=1)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (14e9, "host budget: 14000000000.0 as a share must be above 0 and at most 1"),
        (0.0, "host budget: 0.0 as a share"),
        (-0.5, "host budget: -0.5 as a share"),
        (float("nan"), "host budget: nan as a share"),
        ("0%", "host budget: '0%' as a share"),
        ("150%", "host budget: '150%' as a share"),
        ("nan%", "host budget: 'nan%' as a share"),
        ("much%", "host budget: 'much%' is not a share; write it as '80%'"),
        ("much", "host budget: 'much' is not a size; .* a share such as '80%'"),
        ("14GeB", "host budget: unknown unit 'GeB'"),
        (-5, "host budget: a size cannot be negative"),
        (True, "host budget: True is not a size"),
    ],
)
def test_what_is_no_budget(written: str | int | float, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_budget(written, 64 * GiB, what="host budget")
    assert caught.value.key == "host budget"


@pytest.mark.parametrize("written", [120 * GiB, "120GiB"])
def test_a_budget_beyond_the_capacity(written: str | int) -> None:
    with pytest.raises(BudgetError) as caught:
        resolve_budget(written, 92 * GiB, what="host budget", limit="what can be pinned")
    assert str(caught.value) == (
        "the host budget of 120.0 GiB is beyond what can be pinned, 92.0 GiB; give that much or less, or a share of it"
        " such as '80%'"
    )
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (120 * GiB, 92 * GiB)
    assert (caught.value.tier, caught.value.owner) == ("host budget", None)


@pytest.fixture(autouse=True)
def machine_with(monkeypatch: pytest.MonkeyPatch) -> None:
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
