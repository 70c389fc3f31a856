"""DeviceLimit: what this process's allocator may reserve of a CUDA device, over all sessions that use it."""

from __future__ import annotations

import threading
import weakref

import torch

from lowtide.memory.capacity import device_capacity_bytes

_LOCK = threading.RLock()
"""Taken again by a finaliser, where a collection inside finds a forgotten session."""
_BUDGETS: dict[int, dict[int, int | None]] = {}
"""By the device's index, then by the holder."""
_BEFORE: dict[int, float] = {}
"""What the user had set, by the device's index, while sessions limit it."""


class DeviceLimit:
    """One session's part in the limit; `lift` it, or forget it.

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
        """The session is over; the others' limits stay."""
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
    """Of the device, what all may reserve together.

    Example:
        >>> allowed_share([20, 30], 100), allowed_share([20, None], 100), allowed_share([], 100)
        (0.5, 1.0, 1.0)
    """
    known = [budget for budget in budgets if budget is not None]
    return 1.0 if len(known) < len(budgets) or not known else min(1.0, sum(known) / capacity_bytes)
