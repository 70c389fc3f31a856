"""How much host memory this process uses and may still take, container limits included.

In a container the machine's free memory is not what may be used: the kernel kills the process at the limit of its
control group, or of any group above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")

# Version 1 writes "no limit" as the largest multiple of a page; no machine has 4 EiB.
_NO_LIMIT_BYTES = 1 << 62


class HostMemory:
    """Reads the host tier of this process. The control groups are looked up once, their numbers at each reading.

    Args:
        root: Where `proc` and `sys` are; another folder for tests.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._process = psutil.Process()
        self._groups = [group for group in _groups(root) if _limit_of(group) < _NO_LIMIT_BYTES]

    def rss_bytes(self) -> int:
        """What this process occupies right now (resident set)."""
        return int(self._process.memory_info().rss)

    def available_bytes(self) -> int:
        """What can still be taken: what the machine has free, or what the tightest control group allows."""
        return min([int(psutil.virtual_memory().available), *map(_room_in, self._groups)])

    def limit_bytes(self) -> int | None:
        """The tightest limit of the control groups; None where there is none."""
        return min(map(_limit_of, self._groups), default=None)


def _groups(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # Inside a container the path may be the host's, and its folder not here: then the mount is the group.
        group = mount / path.lstrip("/")
        while group != mount and mount in group.parents:
            if group.is_dir():
                yield group
            group = group.parent
        yield mount


def _limit_of(group: Path) -> int:
    found = _number(group / "memory.max", group / "memory.limit_in_bytes")
    return _NO_LIMIT_BYTES if found is None else found


def _room_in(group: Path) -> int:
    used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
    # Cached files count as used, but the kernel drops them before it kills anybody.
    return max(0, _limit_of(group) - used + _cached_files(group))


def _cached_files(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.partition(" ")[::2] for line in lines)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None  # version 2 writes "max" for no limit
    return None
