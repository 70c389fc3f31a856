"""Budgets that hold: `Tier` counts what is taken of one, `DeviceLimit` makes the CUDA allocator keep one.

A tier owns no memory. Whoever allocates charges the tier first and credits it after the memory is gone, so that the
budget is never exceeded, not even between two calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection

import torch

from lowtide.errors import BudgetError, ConfigError, OwnershipError
from lowtide.memory.capacity import device_capacity_bytes
from lowtide.units import format_bytes

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
        """What all owners have taken."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever taken at once."""
        return self._peak_bytes

    @property
    def free_bytes(self) -> int:
        """What can still be taken."""
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
        """Take back all that these owners have; right also where an exception left a charge or a credit half made."""
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
    """The share of the device that all may reserve together.

    Example:
        >>> allowed_share([20, 30], 100), allowed_share([20, None], 100), allowed_share([], 100)
        (0.5, 1.0, 1.0)
    """
    known = [budget for budget in budgets if budget is not None]
    return 1.0 if len(known) < len(budgets) or not known else min(1.0, sum(known) / capacity_bytes)
