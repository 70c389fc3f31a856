"""Pools of memory: the arena and the allocation cache.

`Arena`: one buffer, handed out as views, and pushed together again when the holes between them are too small.

`ArenaMap` knows who lies where and is plain arithmetic; `Arena` has the bytes. The free bytes of an arena are never lost
to fragmentation: at worst a request costs one pass over the live bytes.

`AllocationCache`: released buffers wait for the next request of their size, a few of each.

Pinning costs half a second per GiB and a device allocation may wait for the whole device, while training asks for the
same few sizes over and over.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lowtide.errors import BudgetError, ConfigError, GraphAliveError, OwnershipError
from lowtide.memory.chunk import ALIGNMENT_BYTES, POISON, aligned
from lowtide.units import MiB, format_bytes

STAGING_BYTES = 16 * MiB
"""The most that a defragmentation takes beside the arena itself, for blocks that move by less than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One block on its way to a lower offset. Its old and its new place may overlap."""

    key: str
    from_offset: int
    to_offset: int
    num_bytes: int
    """What was asked for, without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaCounts:
    """What an arena has done so far."""

    num_defragmentations: int
    """Those that moved something."""
    moved_bytes: int
    num_failed: int
    """Requests that were refused: too large, or in need of a move that was not allowed."""
    num_postponed: int
    """Ticks at which a defragmentation was due but not allowed; it stays due."""


class ArenaMap:
    """Which key lies where in a range of bytes. Blocks start at multiples of 512 and never overlap.

    Example:
        >>> arena_map = ArenaMap(4096)
        >>> [arena_map.allocate(key, 1000) for key in "abcd"]
        [0, 1024, 2048, 3072]
        >>> arena_map.free("a"); arena_map.free("c"); arena_map.allocate("e", 2000) is None
        True
        >>> [(move.key, move.to_offset) for move in arena_map.compact()], arena_map.allocate("e", 2000)
        ([('b', 0), ('d', 1024)], 2048)
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        """Rounded down to whole multiples of 512."""
        self._sizes: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self._order: list[tuple[int, str]] = []  # (offset, key), ascending
        self._used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What is in no block, in however many holes."""
        return self.capacity_bytes - self._used_bytes

    @property
    def largest_hole_bytes(self) -> int:
        """The largest request that fits without moving anything."""
        return max((size for _, size in self._holes()), default=0)

    def keys(self) -> tuple[str, ...]:
        """All keys, by offset."""
        return tuple(key for _, key in self._order)

    def place_of(self, key: str) -> tuple[int, int]:
        """Offset and bytes asked for of a key."""
        if key not in self._offsets:
            raise OwnershipError(f"{key!r} has no block here; it was never allocated, or is free already")
        return self._offsets[key], self._sizes[key]

    def allocate(self, key: str, num_bytes: int) -> int | None:
        """Offset of a new block in the smallest hole that holds it, the lowest of equals; None where no hole does."""
        if num_bytes < 0:
            raise ConfigError(f"{key!r} asks for {num_bytes} bytes; give 0 or more")
        if key in self._offsets:
            raise OwnershipError(f"{key!r} has a block already; free it first, or choose another key")
        size = _padded(num_bytes)
        fitting = [(hole, offset) for offset, hole in self._holes() if hole >= size]
        if not fitting:
            return None
        _, offset = min(fitting)
        self._sizes[key], self._offsets[key] = num_bytes, offset
        bisect.insort(self._order, (offset, key))
        self._used_bytes += size
        return offset

    def free(self, key: str) -> None:
        """Make a hole of a block."""
        offset, num_bytes = self.place_of(key)
        del self._sizes[key], self._offsets[key]
        del self._order[bisect.bisect_left(self._order, (offset, key))]
        self._used_bytes -= _padded(num_bytes)

    def compact(self) -> tuple[Move, ...]:
        """Push all blocks together at the start and say what moved, in an order in which no move overwrites a block
        that has not moved yet: by offset, each one downwards.
        """
        moves, order, end = [], [], 0
        for offset, key in self._order:
            if offset != end:
                moves.append(Move(key=key, from_offset=offset, to_offset=end, num_bytes=self._sizes[key]))
                self._offsets[key] = end
            order.append((end, key))
            end += _padded(self._sizes[key])
        self._order = order
        return tuple(moves)

    def _holes(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of each hole, by offset."""
        end = 0
        for offset, key in self._order:
            if offset > end:
                yield end, offset - end
            end = offset + _padded(self._sizes[key])
        if end < self.capacity_bytes:
            yield end, self.capacity_bytes - end


class Arena:
    """One buffer shared out as views, defragmented when a request needs it and every so many steps.

    The buffer stays the caller's: the arena neither allocates nor releases it. Copies run on the current stream. For
    one thread at a time.

    Args:
        buffer: One dimension of uint8, on any device, pinned or not.
        on_move: Called with the key and the new view of each block that has moved; the old view is then another
            block's memory. Called for all of them, after all copies, also when one call fails.
        may_move: Whether views may be moved now: no autograd graph has saved one, no other thread or stream uses one.
        defragment_every: Calls of `tick` between two defragmentations; 0: only when a request needs one.
        name: For messages.
        poison: Fill bytes that become free with 0xFF, so that whoever still reads them finds NaN. For tests.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        on_move: Callable[[str, torch.Tensor], None],
        *,
        may_move: Callable[[], bool],
        defragment_every: int = 0,
        name: str = "arena",
        poison: bool = False,
    ) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ConfigError(
                f"the buffer of {name!r} is {buffer.dtype} of shape {tuple(buffer.shape)}; give contiguous uint8 of one"
                " dimension"
            )
        if defragment_every < 0:
            raise ConfigError(f"defragment_every is {defragment_every}; give 0 or more", key="defragment_every")
        self.name = name
        self._buffer = buffer
        self._on_move = on_move
        self._may_move = may_move
        self._defragment_every = defragment_every
        self._poison = poison
        self._map = ArenaMap(buffer.numel())
        self._num_ticks_since = 0
        self._num_defragmentations = self._moved_bytes = self._num_failed = self._num_postponed = 0

    @property
    def capacity_bytes(self) -> int:
        """What can be handed out in all."""
        return self._map.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What is in no block: a request of this size succeeds, if need be after a defragmentation."""
        return self._map.free_bytes

    @property
    def largest_hole_bytes(self) -> int:
        """The largest request that succeeds without moving anything."""
        return self._map.largest_hole_bytes

    @property
    def counts(self) -> ArenaCounts:
        """What has been done so far."""
        return ArenaCounts(
            num_defragmentations=self._num_defragmentations,
            moved_bytes=self._moved_bytes,
            num_failed=self._num_failed,
            num_postponed=self._num_postponed,
        )

    def allocate(self, key: str, num_bytes: int) -> torch.Tensor:
        """A view of `num_bytes` with whatever is in them. It starts at a multiple of 512 from the buffer's start.

        Raises:
            BudgetError: The arena has fewer bytes free. Nothing has changed.
            GraphAliveError: It has them, in holes that are too small, and nothing may be moved. Nothing has changed.
        """
        if self._map.allocate(key, num_bytes) is None:
            self._make_room(key, num_bytes)
            offset = self._map.allocate(key, num_bytes)
            assert offset is not None, "all free bytes are one hole now"
        return self.view(key)

    def free(self, key: str) -> None:
        """Take a block back; its view must not be used any more."""
        if self._poison:
            self.view(key).fill_(POISON)
        self._map.free(key)

    def view(self, key: str) -> torch.Tensor:
        """The bytes of a key, where they are now."""
        return self._narrowed(*self._map.place_of(key))

    def tick(self) -> None:
        """Say that a step has ended. A defragmentation that is due but not allowed is tried again at the next tick."""
        self._num_ticks_since += 1
        if not self._defragment_every or self._num_ticks_since < self._defragment_every:
            return
        if self._may_move():
            self._push_together()
        else:
            self._num_postponed += 1

    def defragment(self) -> None:
        """Push all blocks together, so that all free bytes are one hole.

        Raises:
            GraphAliveError: Nothing may be moved now. Nothing has changed.
        """
        if not self._may_move():
            raise GraphAliveError(f"cannot defragment {self.name!r}: {self._why_not()}")
        self._push_together()

    def _make_room(self, key: str, num_bytes: int) -> None:
        free_bytes = self.free_bytes
        if _padded(num_bytes) > free_bytes:
            self._num_failed += 1
            raise BudgetError(
                f"{key!r} needs {format_bytes(num_bytes)} of {self.name!r}, which has {format_bytes(free_bytes)} free of"
                f" {format_bytes(self.capacity_bytes)}; make it larger, or free what is no longer needed",
                tier=self.name,
                needed_bytes=num_bytes,
                free_bytes=free_bytes,
                budget_bytes=self.capacity_bytes,
                owner=key,
            )
        if not self._may_move():
            self._num_failed += 1
            raise GraphAliveError(
                f"{key!r} needs {format_bytes(num_bytes)} of {self.name!r}, which has {format_bytes(free_bytes)} free but"
                f" at most {format_bytes(self.largest_hole_bytes)} in one piece: {self._why_not()}"
            )
        self._push_together()

    def _why_not(self) -> str:
        return (
            "a graph is alive that may point into it, so nothing can be moved; drop the loss and the outputs of the last"
            " step before this, or make the buffer larger"
        )

    def _push_together(self) -> None:
        self._num_ticks_since = 0
        moves = self._map.compact()
        if not moves:
            return
        self._perform(moves)
        self._num_defragmentations += 1
        self._moved_bytes += sum(move.num_bytes for move in moves)
        if self._poison:
            self._narrowed(self.capacity_bytes - self.free_bytes, self.free_bytes).fill_(POISON)
        errors: list[Exception] = []
        for move in moves:
            try:
                self._on_move(move.key, self.view(move.key))
            except Exception as error:  # the bytes have moved: every other owner must still be told
                errors.append(error)
        if errors:
            raise errors[0]

    def _perform(self, moves: tuple[Move, ...]) -> None:
        staging: torch.Tensor | None = None
        for move in moves:
            distance = move.from_offset - move.to_offset
            # Two ranges of at most `distance` bytes do not overlap; a short distance would need too many such copies.
            direct = distance >= min(move.num_bytes, STAGING_BYTES)
            piece_bytes = distance if direct else STAGING_BYTES
            if not direct and staging is None:
                size = min(STAGING_BYTES, max(move.num_bytes for move in moves))
                staging = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
            for start in range(0, move.num_bytes, piece_bytes):
                num_bytes = min(piece_bytes, move.num_bytes - start)
                source = self._narrowed(move.from_offset + start, num_bytes)
                if not direct:
                    assert staging is not None
                    source = staging.narrow(0, 0, num_bytes).copy_(source)
                self._narrowed(move.to_offset + start, num_bytes).copy_(source)

    def _narrowed(self, offset: int, num_bytes: int) -> torch.Tensor:
        # `.data` gives each view a version counter of its own: writing one block must not make autograd believe that
        # the weights in another one have changed.
        return self._buffer.narrow(0, offset, num_bytes).data


def _padded(num_bytes: int) -> int:
    """Bytes that a block occupies; an empty one too, so that no two blocks start at the same place."""
    return aligned(max(1, num_bytes))


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
