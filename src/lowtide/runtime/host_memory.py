"""The session's host memory: its budgets, and one locked buffer for weights, gradients and staging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lowtide import compat
from lowtide.errors import BudgetError, GraphAliveError
from lowtide.memory.allocation_cache import AllocationCache, CacheCounts
from lowtide.memory.arena import Arena, ArenaCounts
from lowtide.memory.capacity import HostMemory, host_capacity_bytes, pinned_capacity_bytes, resolve_budget
from lowtide.memory.mover import Mover
from lowtide.memory.tier import Tier
from lowtide.planning.plan import Budgets
from lowtide.runtime.emulation.device import mark_of, set_mark
from lowtide.runtime.updates.host_need import HostNeed
from lowtide.runtime.updates.worker import HostWorker


class HostPool:
    """Hands out parts of one buffer; staging goes through a cache, so that equal requests find it ready.

    Staging that is asked for while all of it is in use waits for the host's work, which gives some back: the
    computation is slowed down to the host's pace instead of taking memory without end.

    Args:
        num_bytes: Of the whole buffer, which is on the tiers' books already.
        tiers: Charged for what does not fit the buffer.
        on_move: Told where a part lies after a defragmentation.
        may_move: Whether parts may be moved now.
    """

    def __init__(
        self,
        mover: Mover,
        worker: HostWorker,
        num_bytes: int,
        tiers: Sequence[Tier],
        *,
        cached_buffers: int,
        defragment_every: int,
        on_move: Callable[[str, torch.Tensor], None],
        may_move: Callable[[], bool],
        poison: bool,
    ) -> None:
        self.buffer = mover.host_buffer(num_bytes)
        self._mover = mover
        self._worker = worker
        self._lock = threading.RLock()
        self._num_staged = 0
        self._staged: dict[int, str] = {}
        self._extras: set[int] = set()
        self._tiers = tuple(tiers)
        self._arena = Arena(
            self.buffer,
            on_move,
            may_move=lambda: may_move() and self._has_let_go(),
            defragment_every=defragment_every,
            name="host",
            poison=poison,
        )
        self.staging = AllocationCache(self._take_staging, cached_buffers, self._free_staging, poison=poison)

    def allocate(self, key: str, num_bytes: int) -> torch.Tensor:
        """A part that stays until `free`."""
        with self._lock:
            return self._arena.allocate(key, num_bytes)

    def free(self, key: str) -> None:
        """Give a part back."""
        with self._lock:
            self._arena.free(key)

    def tick(self) -> None:
        """A step is over: the arena may tidy up."""
        # Without the lock: whether parts may move is found out by waiting for the worker, which gives staging back
        # under the lock. When they may, the worker has nothing to do, so nobody else is in the arena.
        self._arena.tick()

    def counts(self) -> tuple[CacheCounts, ArenaCounts]:
        """What the cache and the arena did so far."""
        return self.staging.counts, self._arena.counts

    def close(self) -> None:
        """Unlock the buffer; views of it must be gone."""
        self.staging.clear()
        self._mover.free_host_buffer(self.buffer)

    def _take_staging(self, num_bytes: int) -> torch.Tensor:
        while True:
            try:
                with self._lock:
                    key = f"staging {self._num_staged}"
                    self._num_staged += (
                        1  # before it is taken: after an exception in between the key is not asked for again
                    )
                    buffer = self._arena.allocate(key, num_bytes)
                    self._staged[buffer.data_ptr()] = key
                    return buffer
            except (BudgetError, GraphAliveError):
                if self.staging.counts.held_bytes:
                    # Kept for requests of another size, which must not make this one take memory beside the buffer.
                    self.staging.clear()
                elif not self._worker.wait_for_one():
                    return self._extra(num_bytes)

    def _extra(self, num_bytes: int) -> torch.Tensor:
        """Memory beside the buffer: gradients of more chunks than foreseen are unfinished at once."""
        for tier in self._tiers:
            tier.charge(num_bytes, "staging beside the arena")
        # It is the host's like the buffer itself, also where the host plays the device.
        with compat.without_modes():
            buffer = self._mover.host_buffer(num_bytes)
        set_mark(buffer.untyped_storage(), mark_of(self.buffer.untyped_storage()))
        self._extras.add(buffer.data_ptr())
        return buffer

    def _has_let_go(self) -> bool:
        """Give kept staging back to the arena; whether none of it is in use."""
        self.staging.clear()
        return not self._staged

    def _free_staging(self, buffer: torch.Tensor) -> None:
        with self._lock:
            if buffer.data_ptr() in self._extras:
                self._extras.discard(buffer.data_ptr())
                for tier in self._tiers:
                    tier.credit(buffer.nbytes, "staging beside the arena")
                self._mover.free_host_buffer(buffer)
            else:
                key = self._staged.pop(buffer.data_ptr(), None)
                if key is not None:  # else an exception broke off where it was taken
                    self._arena.free(key)


_ENDLESS_BYTES = 1 << 62
"""The budget of a device that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The budgets of a plan on this machine, charged with what the plan needs."""

    host: Tier
    pinned: Tier
    """What is locked of the host."""
    device: Tier
    """Counts chunks alone; an emulated device keeps books of its own."""
    need: HostNeed
    """What the host was charged with: all of the staging that there is room for."""


def charged_tiers(budgets: Budgets, need: HostNeed) -> Tiers:
    """The plan's tiers, with the host's need on their books.

    Raises:
        BudgetError: A tier has not the bytes.
    """
    host = Tier("host", resolve_budget(budgets.host_bytes, host_capacity_bytes(), what="host budget"))
    pinned_bytes = resolve_budget(
        budgets.pinned_bytes, pinned_capacity_bytes(), what="pinned budget", limit="what can be pinned"
    )
    pinned = Tier("pinned", pinned_bytes)
    # Of what nobody has yet: other processes, and what the loop keeps beside the model, go before what is of use alone.
    need = need.with_room(min(host.budget_bytes, HostMemory().available_bytes()), pinned.budget_bytes)
    for tier in (host, pinned):
        tier.charge(need.weight_bytes, "weights")
        tier.charge(need.gradient_bytes, "gradients")
        tier.charge(need.staging_bytes, "staging")
    host.charge(need.state_bytes, "optimizer state")
    for tier in (host, pinned):
        tier.charge(need.paged_bytes, "optimizer state that visits the device")
    host.charge(need.table_bytes, "tables that stay, and their gradients")
    device_bytes = budgets.device_bytes if budgets.device_bytes is not None else _ENDLESS_BYTES
    return Tiers(host=host, pinned=pinned, device=Tier("device", device_bytes), need=need)
