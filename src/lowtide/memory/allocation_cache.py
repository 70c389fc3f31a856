"""AllocationCache: released buffers wait for the next request of their size, a few of each.

Pinning costs half a second per GiB and a device allocation may wait for the whole device, while training asks for the
same few sizes over and over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide.errors import BudgetError, ConfigError, OwnershipError
from lowtide.memory.layout import POISON, aligned
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """What a cache has done so far and holds now."""

    num_hits: int
    """Requests served by a kept buffer."""
    num_misses: int
    """Requests that had to allocate."""
    num_releases: int
    """Buffers let go: the queue of their size was full, or the cache was cleared."""
    held_bytes: int
    """In kept buffers, free to be taken or released."""
    lent_bytes: int
    """In buffers that were taken and not given back."""


class AllocationCache:
    """Keeps up to `limit` released buffers per size class, first in, first out. Safe to use from several threads.

    A size class is a multiple of 512 bytes, and a buffer only ever serves its own: bytes are not wasted on a request
    for less. Buffers come as they are, never filled with zeros. A buffer that is given back may be handed out at once:
    on a device, give it back after the event of its last use.

    Args:
        allocate: Makes a buffer of uint8 with exactly the bytes asked for. When it raises BudgetError while buffers of
            other sizes are kept, those are released and it is asked once more.
        limit: Buffers kept per size class; 0 keeps none.
        release: Called with a buffer that is let go; None drops it.
        poison: Fill what is given back with 0xFF, so that whoever still reads it finds NaN. For tests.

    Example:
        >>> cache = AllocationCache(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        >>> cache.give_back(cache.take(1000)); cache.take(900).numel()  # both of the class 1024
        900
        >>> cache.counts.num_hits, cache.counts.num_misses
        (1, 1)
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        limit: int = 2,
        release: Callable[[torch.Tensor], None] | None = None,
        *,
        poison: bool = False,
    ) -> None:
        if limit < 0:
            raise ConfigError(f"the limit of kept buffers is {limit}; give 0 or more")
        self._allocate = allocate
        self._limit = limit
        self._release = release
        self._poison = poison
        self._lock = threading.Lock()
        self._kept: dict[int, deque[torch.Tensor]] = {}
        # By identity of the view that was handed out, which is held here so that its id cannot come again. An address
        # would not do: after the next take the same address is lent again, to another holder.
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_hits = self._num_misses = self._num_releases = 0
        self._held_bytes = self._lent_bytes = 0

    @property
    def counts(self) -> CacheCounts:
        """What has been done so far and is held now."""
        with self._lock:
            return CacheCounts(
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_releases=self._num_releases,
                held_bytes=self._held_bytes,
                lent_bytes=self._lent_bytes,
            )

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of `num_bytes` of uint8 with whatever is in it. Give this very tensor back."""
        if num_bytes < 0:
            raise ConfigError(f"a buffer of {num_bytes} bytes was asked for; give 0 or more")
        class_bytes = aligned(max(1, num_bytes))
        with self._lock:
            queue = self._kept.get(class_bytes)
            buffer = queue.popleft() if queue else None
            if buffer is not None:
                self._num_hits += 1
                self._held_bytes -= class_bytes
            else:
                self._num_misses += 1
        if buffer is None:
            # Outside the lock: it may take seconds, and another thread may only want to give something back.
            buffer = self._allocated(class_bytes)
        view = buffer.narrow(0, 0, num_bytes)
        with self._lock:
            self._lent[id(view)] = (view, buffer)
            self._lent_bytes += class_bytes
        return view

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return what `take` gave: kept for the next request of its size, or released when enough are kept.

        Raises:
            OwnershipError: The tensor is not lent: given back before, or not from this cache.
        """
        with self._lock:
            _, whole = self._lent.pop(id(buffer), (None, None))
            if whole is not None:
                self._lent_bytes -= whole.numel()
        if whole is None:
            raise OwnershipError(
                f"a buffer of {format_bytes(buffer.numel())} is given back that this cache has not lent: given back"
                " before, or another tensor than `take` returned; give back that tensor, once"
            )
        if self._poison:
            whole.fill_(POISON)
        with self._lock:
            queue = self._kept.setdefault(whole.numel(), deque())
            keep = len(queue) < self._limit
            if keep:
                queue.append(whole)
                self._held_bytes += whole.numel()
            else:
                self._num_releases += 1
        if not keep:
            self._let_go([whole])

    def take_back_all(self) -> None:
        """Release what is lent as well: an exception has left those that hold it, and nobody will use it."""
        with self._lock:
            buffers = [whole for _, whole in self._lent.values()]
            self._lent.clear()
            self._lent_bytes = 0
            self._num_releases += len(buffers)
        self._let_go(buffers)
        self.clear()

    def clear(self) -> None:
        """Release every kept buffer. What is lent stays lent, and may be given back later."""
        with self._lock:
            buffers = [buffer for queue in self._kept.values() for buffer in queue]
            self._kept.clear()
            self._held_bytes = 0
            self._num_releases += len(buffers)
        self._let_go(buffers)

    def _allocated(self, class_bytes: int) -> torch.Tensor:
        try:
            buffer = self._allocate(class_bytes)
        except BudgetError:
            if not self._held_bytes:
                raise
            self.clear()
            buffer = self._allocate(class_bytes)
        if buffer.dtype != torch.uint8 or buffer.shape != (class_bytes,):
            raise ConfigError(
                f"{format_bytes(class_bytes)} were to be allocated, but {buffer.dtype} of shape {tuple(buffer.shape)}"
                f" came; return uint8 of shape ({class_bytes},)"
            )
        return buffer

    def _let_go(self, buffers: list[torch.Tensor]) -> None:
        if self._release is not None:
            for buffer in buffers:
                self._release(buffer)
