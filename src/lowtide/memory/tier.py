"""Budgets that hold: `Tier` counts what is taken of one, `DeviceLimit` makes the CUDA allocator keep one.

A tier owns no memory. Whoever allocates charges the tier first and credits it after the memory is gone, so that the
budget is never exceeded, not even between two calls.

Below them: how many bytes each tier of this machine has, and what a budget that a person wrote means in bytes. In a
container the machine's free memory is not what may be used: the kernel kills the process at the limit of its control
group, or of any group above it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
import torch

from lowtide.errors import BudgetError, ConfigError, HardwareError, OwnershipError
from lowtide.units import format_bytes, parse_bytes

_NUM_OWNERS_SHOWN = 3

_ADVICE = {
    "device": "raise the device budget, stream more groups, or update more chunks on the host",
    "host": "raise the host budget, or keep more groups and more optimizer state on the device",
    "pinned": "raise the pinned budget, or prefetch fewer groups ahead",
}


class Tier:
    """Counts the bytes taken of one budget, by owner. Safe to use from several threads.

    Example:
        >>> tier = Tier("host", 1000)
        >>> tier.charge(600, "weights"); tier.charge(300, "staging"); tier.credit(300, "staging")
        >>> tier.used_bytes, tier.peak_bytes, tier.free_bytes, tier.by_owner()
        (600, 900, 400, {'weights': 600})
    """

    def __init__(self, name: str, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the budget of the {name} tier is {budget_bytes} bytes; give 0 or more")
        self.name = name
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._by_owner: dict[str, int] = {}
        self._used_bytes = 0
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that all owners have taken."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were ever taken at once."""
        return self._peak_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be taken."""
        return self.budget_bytes - self._used_bytes

    def by_owner(self) -> dict[str, int]:
        """Bytes of each owner that has any, the largest first."""
        with self._lock:
            return self._sorted_owners()

    def charge(self, num_bytes: int, owner: str) -> None:
        """Take bytes for an owner, all or none; an owner may come several times.

        Raises:
            BudgetError: The budget has fewer bytes left. Nothing was taken.
        """
        self._check_size(num_bytes, owner)
        with self._lock:
            if num_bytes > self.free_bytes:
                raise self._over_budget(num_bytes, owner)
            # The owner first: the sum can be made again from what they have.
            self._set(owner, self._by_owner.get(owner, 0) + num_bytes)
            self._used_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)

    def credit(self, num_bytes: int, owner: str) -> None:
        """Give back bytes of an owner.

        Raises:
            OwnershipError: The owner has fewer. Nothing was given back.
        """
        self._check_size(num_bytes, owner)
        with self._lock:
            held_bytes = self._by_owner.get(owner, 0)
            if num_bytes > held_bytes:
                raise OwnershipError(
                    f"{owner!r} gives {format_bytes(num_bytes)} back to the {self.name} tier, but holds"
                    f" {format_bytes(held_bytes)} of it; give back what was charged, once, under the same name"
                )
            self._set(owner, held_bytes - num_bytes)
            self._used_bytes -= num_bytes

    def clear(self, owners: Collection[str]) -> None:
        """Take back all bytes of these owners; right also after an exception left a charge or a credit half made."""
        with self._lock:
            for owner in owners:
                self._by_owner.pop(owner, None)
            self._used_bytes = sum(self._by_owner.values())

    def _set(self, owner: str, num_bytes: int) -> None:
        # No entry for zero: over a long run the owners that came and went would pile up.
        if num_bytes:
            self._by_owner[owner] = num_bytes
        else:
            self._by_owner.pop(owner, None)

    def _sorted_owners(self) -> dict[str, int]:
        return dict(sorted(self._by_owner.items(), key=lambda item: (-item[1], item[0])))

    def _check_size(self, num_bytes: int, owner: str) -> None:
        if num_bytes < 0:
            raise ConfigError(f"{owner!r} asks {num_bytes} bytes of the {self.name} tier; give 0 or more")

    def _over_budget(self, num_bytes: int, owner: str) -> BudgetError:
        largest = list(self._sorted_owners().items())[:_NUM_OWNERS_SHOWN]
        held = ", ".join(f"{name!r} {format_bytes(size)}" for name, size in largest) or "nobody"
        advice = _ADVICE.get(self.name, f"raise the budget of the {self.name} tier, or keep less on it")
        return BudgetError(
            f"{owner!r} needs {format_bytes(num_bytes)} of the {self.name} tier, which has"
            f" {format_bytes(self.free_bytes)} free of {format_bytes(self.budget_bytes)}"
            f" (largest owners: {held}); {advice}",
            tier=self.name,
            needed_bytes=num_bytes,
            free_bytes=self.free_bytes,
            budget_bytes=self.budget_bytes,
            owner=owner,
        )


_LOCK = threading.RLock()
"""Taken again by a finaliser, where a collection inside finds a forgotten session."""
_BUDGETS: dict[int, dict[int, int | None]] = {}
"""By the device's index, then by the holder."""
_BEFORE: dict[int, float] = {}
"""What the user had set, by the device's index, while sessions limit it."""


class DeviceLimit:
    """One session's limit on the CUDA allocator; ended by `lift`, or when it is freed.

    The allocator frees what it has cached before it fails, so the budget holds whatever the model allocates. It cannot
    tell sessions apart: together they may reserve the sum of their budgets, and all there is where one has none.

    Args:
        device: A CUDA device with its index.
        budget_bytes: None for all of it.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        with _LOCK:
            _BUDGETS.setdefault(device.index, {})[id(self)] = budget_bytes
            _enforce(device)
        self._lift = weakref.finalize(self, _forget, device, id(self))
        self._lift.atexit = False

    def lift(self) -> None:
        """End this session's limit; those of other sessions stay."""
        self._lift()


def _forget(device: torch.device, holder: int) -> None:
    with _LOCK:
        _BUDGETS[device.index].pop(holder, None)
        _enforce(device)


def _enforce(device: torch.device) -> None:
    budgets = list(_BUDGETS[device.index].values())
    if any(budget is not None for budget in budgets) and all(budget is not None for budget in budgets):
        before = _BEFORE.setdefault(device.index, torch.cuda.get_per_process_memory_fraction(device))
        share = min(before, allowed_share(budgets, device_capacity_bytes(device)))
        torch.cuda.set_per_process_memory_fraction(share, device)
    elif device.index in _BEFORE:
        torch.cuda.set_per_process_memory_fraction(_BEFORE.pop(device.index), device)


def allowed_share(budgets: list[int | None], capacity_bytes: int) -> float:
    """The share of the device that all may reserve together.

    Example:
        >>> allowed_share([20, 30], 100), allowed_share([20, None], 100), allowed_share([], 100)
        (0.5, 1.0, 1.0)
    """
    known = [budget for budget in budgets if budget is not None]
    return 1.0 if len(known) < len(budgets) or not known else min(1.0, sum(known) / capacity_bytes)


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
