"""How many bytes each tier of this machine has, and what a budget that a person wrote means in bytes.

In a container the machine's free memory is not what may be used: the kernel kills the process at the limit of its
control group, or of any group above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from lowtide.errors import BudgetError, ConfigError, HardwareError
from lowtide.units import format_bytes, parse_bytes

PINNABLE_SHARE = 0.72
"""The share of the host's capacity that may be locked. Locked pages can be neither dropped nor swapped: near the limit Linux
kills the process, without an exception. The rest is for the interpreter, the libraries and cached files."""


def host_capacity_bytes(host: HostMemory | None = None) -> int:
    """The memory of the machine, or the limit of the tightest control group where that is less.

    Args:
        host: Where to read the limits from; this process when None.
    """
    total_bytes = int(psutil.virtual_memory().total)
    limit_bytes = (host or HostMemory()).limit_bytes()
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def pinned_capacity_bytes(host: HostMemory | None = None) -> int:
    """What can safely be locked for copies: `PINNABLE_SHARE` of the host's capacity.

    The limit of locked memory that `ulimit -l` shows has no part in it: it bounds `mlock`, while CUDA locks pages
    through its driver, which does not look at it. The usual 64 KiB there would forbid what works.

    Args:
        host: Where to read the limits from; this process when None.
    """
    return int(host_capacity_bytes(host) * PINNABLE_SHARE)


def device_capacity_bytes(device: torch.device) -> int:
    """The whole memory of a CUDA device, whoever may be using it.

    Raises:
        HardwareError: The device is not a CUDA device, or not there.
    """
    if device.type != "cuda":
        raise HardwareError(f"the device {device} has no memory of its own to measure; give its budget in bytes")
    num_devices = torch.cuda.device_count()
    if num_devices == 0 or (device.index or 0) >= num_devices:
        raise HardwareError(
            f"there is no device {device}, this machine has {num_devices} CUDA devices; choose one of them, or give the"
            " budget in bytes"
        )
    return int(torch.cuda.get_device_properties(device).total_memory)


def resolve_budget(
    given: str | int | float | None, capacity_bytes: int, *, what: str, limit: str = "what there is"
) -> int:
    """A budget in bytes, from bytes, a size, a share of the capacity, or nothing (all of it).

    An int is bytes and a float is a share: 1 is one byte, 1.0 is everything.

    Args:
        given: An int of bytes, text such as "14GiB" or "80%", a float above 0 up to 1, or None.
        capacity_bytes: What there is.
        what: The name of the budget for messages, such as `host budget`.
        limit: What the capacity is, for messages, such as `what can be pinned`.

    Example:
        >>> resolve_budget("80%", 1000, what="host budget"), resolve_budget(0.5, 1000, what="host budget")
        (800, 500)

    Raises:
        ConfigError: The budget is not of any of these forms.
        BudgetError: It is more than the capacity.
    """
    if given is None:
        return capacity_bytes
    share = _share(given, what)
    if share is not None:
        return int(share * capacity_bytes)
    assert not isinstance(given, float)
    try:
        budget_bytes = parse_bytes(given)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}, a share such as '80%', or a float above 0 up to 1", key=what) from error
    if budget_bytes > capacity_bytes:
        raise BudgetError(
            f"the {what} of {format_bytes(budget_bytes)} is beyond {limit}, {format_bytes(capacity_bytes)};"
            " give that much or less, or a share of it such as '80%'",
            tier=what,
            needed_bytes=budget_bytes,
            free_bytes=capacity_bytes,
            budget_bytes=capacity_bytes,
        )
    return budget_bytes


def _share(given: str | int | float, what: str) -> float | None:
    """The share of the capacity that a float or a percentage is; None for what is not a share."""
    if isinstance(given, float):
        share = given
    elif isinstance(given, str) and given.rstrip().endswith("%"):
        try:
            share = float(given.rstrip().removesuffix("%")) / 100
        except ValueError as error:
            raise ConfigError(f"{what}: {given!r} is not a share; write it as '80%'", key=what) from error
    else:
        return None
    if not 0 < share <= 1:
        raise ConfigError(
            f"{what}: {given!r} as a share must be above 0 and at most 1 (100%); write bytes as an int or as '14GiB'",
            key=what,
        )
    return share


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
