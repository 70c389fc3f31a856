"""How many bytes each tier of this machine has, and what a budget that a person wrote means in bytes."""

from __future__ import annotations

import psutil
import torch

from lowtide.errors import BudgetError, ConfigError, HardwareError
from lowtide.memory.host_memory import HostMemory
from lowtide.units import format_bytes, parse_bytes

PINNABLE_SHARE = 0.72
"""Of the host's capacity, what may be locked. Locked pages can be neither dropped nor swapped: near the limit Linux
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
