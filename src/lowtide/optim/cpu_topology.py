"""Which processors the threads of the host kernel run on: one of each physical core that this process may use.

Two threads on one core share its load and store units, and an update does little else. One core is left to the thread that
launches the device's work: where it waits for a turn, the device waits.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCpus:
    """Where the threads run, in the order in which they are made."""

    num_threads: int
    """How many threads are worth having."""
    pinned: tuple[int, ...]
    """The processor of each; empty where threads are better left to the system."""


def worker_cpus(root: Path = _ROOT) -> WorkerCpus:
    """What suits this process: its affinity mask, its control group's quota, and its share of the machine's ranks.

    Args:
        root: Where `proc` and `sys` are; another folder for tests.
    """
    allowed = available_cpus()
    part, num_parts = _rank_on_this_machine()
    return choose_cpus(one_of_each_core(allowed, root), cpu_quota=read_cpu_quota(root), part=part, num_parts=num_parts)


def available_cpus() -> tuple[int, ...]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def one_of_each_core(cpus: tuple[int, ...], root: Path = _ROOT) -> tuple[int, ...]:
    """The first of the given processors of each physical core; all of them where the system does not tell."""
    cores: dict[tuple[str, str] | int, int] = {}
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            siblings = (folder / "thread_siblings_list").read_text().strip()
            core: tuple[str, str] | int = ("siblings", siblings)
        except OSError:
            core = cpu
        cores.setdefault(core, cpu)
    return tuple(cores.values())


def read_cpu_quota(root: Path = _ROOT) -> float | None:
    """How many processors' time the control group allows; None without a limit."""
    try:
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = root / "sys/fs/cgroup/cpu"
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def choose_cpus(cores: tuple[int, ...], *, cpu_quota: float | None, part: int = 0, num_parts: int = 1) -> WorkerCpus:
    """Share cores among the ranks of a machine, leave the first of each share to the launcher, and obey the quota.

    Under a quota that is smaller than the share nothing is pinned: the other containers of the machine would choose the
    same processors.

    Example:
        >>> choose_cpus((0, 1, 2, 3), cpu_quota=None)
        WorkerCpus(num_threads=3, pinned=(1, 2, 3))
        >>> choose_cpus((0, 1, 2, 3), cpu_quota=2.5)
        WorkerCpus(num_threads=2, pinned=())
    """
    begin, end = part * len(cores) // num_parts, (part + 1) * len(cores) // num_parts
    share = cores[begin:end]
    if cpu_quota is not None and cpu_quota / num_parts < len(share):
        return WorkerCpus(num_threads=max(1, math.ceil(cpu_quota / num_parts) - 1), pinned=())
    if len(share) < 2:
        # The launcher is on that core too, or more ranks than cores share the machine.
        return WorkerCpus(num_threads=1, pinned=())
    return WorkerCpus(num_threads=len(share) - 1, pinned=share[1:])


def _rank_on_this_machine() -> tuple[int, int]:
    """(this rank, number of ranks) as torchrun and its like tell every process; (0, 1) for a process by itself."""
    try:
        rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    # A launcher that gave each rank an affinity mask of its own has divided the machine already.
    is_divided = len(available_cpus()) < (os.cpu_count() or 1)
    return (rank, num_ranks) if 0 <= rank < num_ranks and not is_divided else (0, 1)
