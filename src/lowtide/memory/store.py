"""ChunkStore: which groups are on the device. Opens, closes, prefetches and drops them inside a budget.

Which groups leave to make room, and which come next, follows from the order in which a step uses them (`AccessOrder`).
The order is learnt from the cycle before. A cycle is what one training step (or one evaluation call) uses, forward and
backward. The first cycle is unknown and nothing is prefetched in it; from the second on, the order of the one before is
expected. A cycle that differs costs copies that are not used or come late, never a wrong value. Of the groups on the
device, the one whose next use is farthest leaves first (Belady's rule).

Note [All ranks fetch alike]
To fetch a chunk that is spread over ranks is a collective call: all ranks must make the same ones in the same order. So nothing
that decides about them may depend on how fast a rank is, or on what only one rank has. Whether an update on the host is done is
not asked: groups that were updated there are not fetched while the group before them opens, but when it closes, and then the
update is waited for: on a GPU its computation is queued by then. What is old is dropped on all ranks where one of them updates it.
"""

from __future__ import annotations

import contextlib
import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from lowtide.errors import BudgetError, RanksError
from lowtide.memory.chunk import Chunk, ChunkState, HostWork, StoredGroup
from lowtide.memory.mover import Copied, Mover, Ticket
from lowtide.units import format_bytes

UPLOADS_AT_ONCE = 2
"""Resident groups brought up to date each time a group opens: twice as fast as they are needed, and no long queue before
the next streamed group."""


class Books(Protocol):
    """Counts device bytes: a tier, or the tracked memory of an emulated device."""

    def charge(self, num_bytes: int, owner: str) -> None:
        """Count bytes as taken; raises if the budget does not have them."""

    def credit(self, num_bytes: int, owner: str) -> None:
        """Count bytes of an owner as given back."""

    def clear(self, owners: Collection[str]) -> None:
        """Count nothing for these owners any more; right also after an exception left a charge or a credit half made."""


class StoreListener(Protocol):
    """Says what may be fetched ahead, puts the host's bytes in order before a copy, and is told of copies for the statistics."""

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """Whether the group's bytes on the host stay as they are until its next use, unless the store hears of a change."""

    def before_fetch(self, chunk: Chunk) -> None:
        """The host's bytes are about to be copied to the device: they must be the true ones."""

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        """A copy was issued: `weights` or `upload` to the device, `write back` to the host."""

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """The chunk has bytes on the device from here."""

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        """The chunk has no bytes on the device from here."""

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        """The computation reached this point and continues when the copies are done."""


class StoreObserver(Protocol):
    """Measures what else is on the device while chunks come and go."""

    def chunks_change(self) -> None:
        """Chunks are about to come to the device or to leave it; `chunks_changed` follows."""

    def chunks_changed(self) -> None:
        """Chunks have come or left."""


class ChunkStore:
    """The groups of one model.

    Args:
        groups: All of them, resident and streamed, each chunk in state HOST or RESIDENT.
        mover: Issues the copies.
        books: Where device bytes of streamed chunks are counted.
        window_bytes: How many device bytes streamed chunks may take together.
        prefetch_depth: How many groups ahead are fetched.
        listener: Is told what happens.
    """

    def __init__(
        self,
        groups: Iterable[StoredGroup],
        mover: Mover,
        books: Sequence[Books],
        *,
        window_bytes: int,
        prefetch_depth: int,
        listener: StoreListener,
    ) -> None:
        self.groups = {group.name: group for group in groups}
        self.window_bytes = window_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.order = AccessOrder()
        self._leaving = LeavingQueue(self.groups, self._idle_bytes)
        self._mover = mover
        self._books = tuple(books)
        self._depth = prefetch_depth
        self._listener = listener
        self._is_spread = any(chunk.exchange is not None for group in self.groups.values() for chunk in group.chunks)
        """Whether other ranks have parts of groups; see Note [All ranks fetch alike]."""
        self._changing: dict[str, int] = {}
        """Resident groups that the host is changing, or has changed, with their places in a forward."""
        self._observer: StoreObserver | None = None

    def be_observed_by(self, observer: StoreObserver) -> None:
        """The observer is told before and after chunks come and go."""
        self._observer = observer

    def open(self, name: str) -> None:
        """Bring the group to the device and hold it there until `close`; the computation waits for the copies.

        Where the host is updating a chunk, its update is waited for first: this is where a forward waits for its own update.
        """
        group = self.groups[name]
        if group.num_open:
            group.num_open += 1  # another window has brought it, and prefetched
            return
        if group.is_resident:
            self.refresh(name)
        else:
            self.order.access(name)
            missing = _missing(group)
            if missing:
                self._require(group, missing)
            self._wait_for_copies(group)
        group.num_open += 1
        try:
            self.prefetch()
        except BaseException:
            # The caller gets an exception and will not close the group.
            self.close(name)
            raise

    def close(self, name: str, at: Ticket | None = None) -> None:
        """One window less uses the group; after the last one it may leave.

        Args:
            name: The group's.
            at: Where the computation last used the group; None for now.
        """
        group = self.groups[name]
        assert group.num_open > 0, f"group {name!r} was closed more often than opened"
        group.num_open -= 1
        if group.num_open or group.is_resident:
            return
        now = self._mover.now() if at is None else at
        for chunk in group.chunks:
            chunk.last_use = now
            if chunk.state is ChunkState.DIRTY:
                self.write_back(chunk)  # its update broke off
            if chunk.state is not ChunkState.RESIDENT:
                chunk.become(ChunkState.IDLE)
            if chunk.is_old:
                self._release(chunk)
        self._leaving.enter(name, self.order)
        if self._is_spread:
            self.prefetch(waits=True)

    def device_changes(self, chunk: Chunk) -> None:
        """The computation is about to change the open chunk's device bytes; `write_back` comes after it."""
        chunk.become(ChunkState.DIRTY)

    def write_back(self, chunk: Chunk, at: Ticket | None = None) -> None:
        """The computation changed the open chunk's device bytes: copy them to the host.

        Args:
            chunk: An open one.
            at: Where the computation last changed it; None for now.
        """
        assert chunk.host is not None
        if chunk.state is not ChunkState.DIRTY:
            chunk.become(ChunkState.DIRTY)
        now = self._mover.now() if at is None else at
        source = chunk.device if chunk.exchange is None else chunk.device_part
        chunk.written = self._mover.to_host(chunk.host, source, [now])
        # Only now: a chunk whose copy was not issued stays dirty, and `rebuild` issues it.
        chunk.become(ChunkState.WRITING_BACK)
        self._listener.on_copy(chunk, chunk.written, "write back")

    def host_changes(self, chunk: Chunk, work: HostWork, place: int) -> None:
        """The host is changing the chunk's bytes. Its bytes on the device are old; nothing queued from now on reads them.

        Resident groups are brought up to date in the order of their places, in which the next forward needs them.
        """
        chunk.host_work = work
        if chunk.state is ChunkState.RESIDENT:
            chunk.last_use = self._mover.now()
            self._changing[chunk.spec.group] = place

    def parts_change(self, chunk: Chunk, *, on_host: bool) -> None:
        """Each rank has updated its part of the chunk, or its worker will: the whole on the device is old on all ranks.

        Args:
            chunk: Spread over ranks.
            on_host: Whether the parts are there; else what the computation was told so far updates them.
        """
        if on_host:
            chunk.is_behind = True
        else:
            now = self._mover.now()
            chunk.written = Copied(now, now)
        if self.groups[chunk.spec.group].num_open:
            chunk.is_old = chunk.is_on_device
        elif chunk.state in (ChunkState.IDLE, ChunkState.FETCHING):
            self._release(chunk)

    def prefetch(self, *, waits: bool = False) -> None:
        """Fetch the next groups, as far as the depth, the budget and pending updates on the host allow.

        Args:
            waits: Also those whose parts the host is updating, for which this waits. See Note [All ranks fetch alike].
        """
        if self._changing:
            self._upload_ahead()
        for name in self.order.upcoming(self._depth):
            if name == _LEAVE:
                return
            group = self.groups[name]
            missing = _missing(group)
            if not missing or not self._listener.may_fetch_ahead(group):
                continue
            if (
                _is_changing(missing)
                if not group.is_spread
                else not waits and any(chunk.is_behind for chunk in missing)
            ):
                continue
            if not self._make_room(group, missing, is_needed_now=False):
                return
            # Not put in the leaving queue: a later prefetch only evicts groups that are used after this one.
            self._fetch(missing)

    def refresh(self, name: str) -> None:
        """Bring resident weights that the host has updated to the device; the computation waits for them."""
        group = self.groups[name]
        for chunk in group.chunks:
            self._upload(chunk)
        self._changing.pop(name, None)
        arriving = [chunk.arriving for chunk in group.chunks if chunk.arriving is not None]
        if arriving:
            reached = self._mover.now()
            for copied in arriving:
                self._mover.compute_after(copied.ended)
            for chunk in group.chunks:
                chunk.arriving = None
            self._listener.on_wait(group, reached, arriving)

    def refresh_host(self, chunk: Chunk) -> None:
        """Copy a resident chunk's weights to the host before an update there, if the user may have changed them."""
        if chunk.state is ChunkState.RESIDENT and chunk.is_touched and chunk.host is not None:
            chunk.written = self._mover.to_host(chunk.host, chunk.device, [self._mover.now()])
            # Only now: from here on the host's bytes are the true ones.
            chunk.is_touched = False
            self._listener.on_copy(chunk, chunk.written, "write back")

    def drop(self, name: str) -> None:
        """Take the group's copies off the device: the host's bytes have changed, or are about to."""
        group = self.groups[name]
        assert group.num_open == 0, f"group {name!r} is in use"
        for chunk in group.chunks:
            if chunk.state in (ChunkState.IDLE, ChunkState.FETCHING):
                self._release(chunk)

    def stop_prefetching(self) -> None:
        """The session ends: what is opened from now on comes alone."""
        self._depth = 0

    def drop_all(self) -> None:
        """Take every idle copy off the device."""
        for group in self.groups.values():
            if group.num_open == 0:
                self.drop(group.name)

    def leave_device(self) -> None:
        """The next groups open on another device: take every copy off this one. Prefetches do not look past this point."""
        self.drop_all()
        self.order.access(_LEAVE)

    @contextlib.contextmanager
    def with_room_for(self, num_bytes: int) -> Iterator[None]:
        """The window has so many bytes more inside; what is beyond the usual ones leaves at the end."""
        self.window_bytes += num_bytes
        try:
            yield
        finally:
            self.window_bytes -= num_bytes
            self.drop_all()

    def rebuild(self) -> None:
        """Start afresh from the truth, whatever an exception left half made: no group is open, no streamed one on the device.

        The truth of a streamed chunk is on the host, unless it is dirty; that of a resident one that the host updates is
        there too, unless user code may have touched it. No work on the host may be under way, nor may a parameter point to a
        streamed chunk's memory on the device without a guard. May be repeated.
        """
        for group in self.groups.values():
            group.num_open = 0
            for chunk in group.chunks:
                if chunk.state is ChunkState.DIRTY:
                    assert chunk.host is not None
                    self._mover.to_host(chunk.host, chunk.device_part, [self._mover.now()])
                elif chunk.state is ChunkState.RESIDENT and chunk.host is not None and not chunk.is_touched:
                    self._mover.to_device(chunk.device, chunk.host, [self._mover.now()])
        self._mover.drain()
        streamed = [
            chunk for group in self.groups.values() for chunk in group.chunks if chunk.state is not ChunkState.RESIDENT
        ]
        for chunk in streamed:
            self._listener.on_absent(chunk, self._mover.now())
            # Not by `become`: the table of legal changes has no rows for exceptions.
            chunk.state = ChunkState.HOST
            if chunk.device.untyped_storage().nbytes() and _is_brought(chunk):
                self._mover.shrink(chunk.device, [])
        for group in self.groups.values():
            for chunk in group.chunks:
                chunk.fetched = chunk.written = chunk.arriving = chunk.last_use = chunk.host_work = None
                chunk.is_old = chunk.is_behind = False
        for books in self._books:
            books.clear([chunk.spec.name for chunk in streamed])
        self.used_bytes = 0
        self._changing.clear()
        self.order.forget_cycle()
        self._leaving = LeavingQueue(self.groups, self._idle_bytes)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _upload_ahead(self) -> None:
        """Copy resident weights whose updates on the host are done to the device, in the order in which they are needed."""
        num_groups = 0
        for name in sorted(self._changing, key=self._changing.__getitem__):
            group = self.groups[name]
            done = [chunk for chunk in group.chunks if chunk.host_work is not None and chunk.host_work.is_done()]
            if group.num_open or not done:
                continue
            if num_groups == UPLOADS_AT_ONCE:
                return
            num_groups += 1
            for chunk in done:
                self._upload(chunk)
            if all(chunk.host_work is None for chunk in group.chunks):
                del self._changing[name]

    def _upload(self, chunk: Chunk) -> None:
        if chunk.state is not ChunkState.RESIDENT or chunk.host_work is None or chunk.host is None:
            return
        chunk.wait_for_host_update()
        after = [chunk.last_use] if chunk.last_use is not None else [self._mover.now()]
        # Recorded as a fetch: the host's next update must not change the bytes during the copy.
        chunk.fetched = chunk.arriving = self._mover.to_device(chunk.device, chunk.host, after)
        self._listener.on_copy(chunk, chunk.arriving, "upload")

    def _require(self, group: StoredGroup, missing: list[Chunk]) -> None:
        if not self._make_room(group, missing, is_needed_now=True):
            needed = sum(chunk.spec.nbytes for chunk in missing)
            held = ", ".join(other.name or "(rest)" for other in self.groups.values() if other.num_open) or "none"
            raise BudgetError(
                f"group {group.name or '(rest)'} needs {format_bytes(needed)} of the device's room for streamed "
                f"groups, which has {format_bytes(self.window_bytes)} and {format_bytes(self.used_bytes)} in use "
                f"(open groups: {held}); raise window_memory (of a WarmUp or a StaticPartition device_memory), or keep "
                "an open group resident",
                tier="device",
                needed_bytes=needed,
                free_bytes=self.window_bytes - self.used_bytes,
                budget_bytes=self.window_bytes,
                owner=group.name,
            )
        self._fetch(missing)

    def _make_room(self, group: StoredGroup, missing: list[Chunk], *, is_needed_now: bool) -> bool:
        """Drop the groups whose next use is last; for a prefetch only those that are used later than the group itself."""
        short = self.used_bytes - self.window_bytes
        for chunk in missing:
            short += chunk.spec.nbytes
        if short <= 0:
            return True
        later_than = None if is_needed_now else self.order.next_use(group.name)
        leaving = self._leaving.choose(short, self.order, staying=group.name, later_than=later_than)
        if leaving is None:
            return False
        for name in leaving:
            self.drop(name)
        return True

    def _idle_bytes(self, name: str) -> int:
        """Bytes that would become free if the group left; 0 while a window uses it."""
        group = self.groups[name]
        num_bytes = 0
        for chunk in group.chunks if not group.num_open else ():
            if chunk.state is ChunkState.IDLE or chunk.state is ChunkState.FETCHING:
                num_bytes += chunk.spec.nbytes
        return num_bytes

    def _fetch(self, chunks: list[Chunk]) -> None:
        if self._observer is not None:
            self._observer.chunks_change()
        for chunk in chunks:
            if chunk.host_work is not None:
                chunk.wait_for_host_update()
            assert chunk.host is not None
            self._listener.before_fetch(chunk)
            self._take_memory(chunk)
            chunk.become(ChunkState.FETCHING)
            after = [chunk.written.ended] if chunk.written is not None else []
            if chunk.exchange is None:
                chunk.fetched = self._mover.to_device(chunk.device, chunk.host, after)
            else:
                part = self._mover.to_device(chunk.device_part, chunk.host, after)
                chunk.fetched = chunk.exchange.gather(chunk.device, part)
            chunk.num_fetches += 1
            chunk.is_behind = False
            self._listener.on_present(chunk, chunk.fetched.started)
            self._listener.on_copy(chunk, chunk.fetched, "weights")
        if self._observer is not None:
            self._observer.chunks_changed()

    def _take_memory(self, chunk: Chunk) -> None:
        """Take device memory for the chunk, all or nothing: if one of the books or the device refuses, nothing is counted."""
        num_bytes = chunk.spec.nbytes
        charged: list[Books] = []
        try:
            for books in self._books:
                books.charge(num_bytes, chunk.spec.name)
                charged.append(books)
            self._mover.grow(chunk.device)
        except BaseException:
            for books in charged:
                books.credit(num_bytes, chunk.spec.name)
            raise
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _wait_for_copies(self, group: StoredGroup) -> None:
        fetched = [
            chunk.fetched
            for chunk in group.chunks
            # A copy that is over by now, as in a model that waits for its own launches, is not waited for.
            if chunk.state is ChunkState.FETCHING and chunk.fetched is not None and not chunk.fetched.ended.is_done()
        ]
        if fetched:
            reached = self._mover.now()
            for copied in fetched:
                self._mover.compute_after(copied.ended)
            self._listener.on_wait(group, reached, fetched)
        for chunk in group.chunks:
            if chunk.state is not ChunkState.RESIDENT:
                chunk.become(ChunkState.IN_USE)

    def _release(self, chunk: Chunk) -> None:
        if self._observer is not None:
            self._observer.chunks_change()
        after = chunk.pending_device_reads
        self._listener.on_absent(chunk, after[0])
        # Before the memory goes: nobody may read it as the weights any more.
        chunk.become(ChunkState.HOST)
        chunk.is_old = False
        self._mover.shrink(chunk.device, after)
        self.used_bytes -= chunk.spec.nbytes
        for books in self._books:
            books.credit(chunk.spec.nbytes, chunk.spec.name)
        if self._observer is not None:
            self._observer.chunks_changed()


def _missing(group: StoredGroup) -> list[Chunk]:
    return [chunk for chunk in group.chunks if chunk.state is ChunkState.HOST]


def _is_brought(chunk: Chunk) -> bool:
    """Wait until nobody fills its memory any more; False if other ranks might, which are lost: then the memory stays."""
    if chunk.exchange is None or chunk.fetched is None:
        return True
    try:
        chunk.fetched.ended.wait()
    except RanksError:
        return False
    return True


def _is_changing(chunks: list[Chunk]) -> bool:
    """Whether the host is changing one of them."""
    for chunk in chunks:  # noqa: SIM110
        if chunk.host_work is not None and not chunk.host_work.is_done():
            return True
    return False


MAX_CYCLE = 100_000
"""Uses after which a cycle ends by itself: a model whose parts are called by themselves never says that one ended."""

_LEAVE = "(another device)"
"""Stands in the order of uses where the store leaves a device."""
_NEVER = 1 << 62
"""The next use of a group that the known cycle does not use: later than any other."""


class AccessOrder:
    """The order of one kind of cycle.

    Example:
        >>> order = AccessOrder()
        >>> for name in ("a", "b", "b", "a"): order.access(name)
        >>> order.end_cycle()
        >>> order.access("a"); order.upcoming(2), order.next_use("b"), order.next_use("a")
        (['b', 'a'], 1, 3)
    """

    def __init__(self) -> None:
        self._known: list[str] = []
        self._places: dict[str, list[int]] = {}
        self._next_uses: dict[str, int] = {}
        """A cache of `next_use`, by group: an entry is right until the group's own use, and all are cleared when the order
        surprises.
        """
        self._upcoming: dict[tuple[int, int], list[str]] = {}
        """A cache of `upcoming`, by position and count, for the known cycle."""
        self._recorded: list[str] = []
        self._position = 0
        self.num_uses = 0
        """Counts expected uses."""
        self.epoch = 0
        """Counts surprises. Between two of them only its own use changes a group's `next_use`."""

    @property
    def known(self) -> tuple[str, ...]:
        """The last complete cycle."""
        return tuple(self._known)

    def access(self, group: str) -> None:
        """A group is used now."""
        self._recorded.append(group)
        if len(self._recorded) >= MAX_CYCLE:
            self.end_cycle()
        known, position = self._known, self._position
        if not known:
            return
        place = position if known[position] == group else self._next_place(group)
        if place is not None:
            if place != position:
                self._be_surprised()
            self.num_uses += 1
            self._position = (place + 1) % len(known)
            self._next_uses.pop(group, None)

    def end_cycle(self) -> None:
        """The step is over: the recorded order is expected again."""
        if self._recorded == self._known and not self._position:
            self._recorded = []  # as expected, to the end
            return
        if self._recorded:
            places: dict[str, list[int]] = {}
            for place, group in enumerate(self._recorded):
                places.setdefault(group, []).append(place)
            self._upcoming.clear()
            self._known, self._places, self._recorded = self._recorded, places, []
        self._position = 0
        self._be_surprised()

    def forget_cycle(self) -> None:
        """The cycle broke off: it says nothing about the next."""
        self._recorded = []
        self._position = 0
        self._be_surprised()

    def upcoming(self, count: int) -> list[str]:
        """The next `count` different groups, the nearest first; across the end of the cycle into the next."""
        key = (self._position, count)
        found = self._upcoming.get(key)
        if found is None:
            known, place = self._known, self._position
            found = []
            for _ in range(min(count, len(self._places))):
                while known[place] in found:
                    place = (place + 1) % len(known)
                found.append(known[place])
            self._upcoming[key] = found
        return found

    def next_use(self, group: str) -> int:
        """The number of the use at which the group is next expected; `_NEVER` where none is."""
        found = self._next_uses.get(group)
        if found is None:
            place = self._next_place(group)
            found = _NEVER if place is None else self.num_uses + (place - self._position) % len(self._known)
            self._next_uses[group] = found
        return found

    def _be_surprised(self) -> None:
        self._next_uses.clear()
        self.epoch += 1

    def _next_place(self, group: str) -> int | None:
        places = self._places.get(group)
        if not places:
            return None
        index = bisect_left(places, self._position)
        return places[index] if index < len(places) else places[0]


_MOST_ENTRIES = 8
"""Of the heap for each group; then it is made anew, which takes less time than entering so many has taken."""


class LeavingQueue:
    """Chooses the groups that leave, without looking at every group each time.

    A heap of groups by their next use, which does not change before the group is used again, unless the order of uses
    surprises: then the heap is made anew. Entries that are out of date are found when they come up. The heap only saves
    time: if a group is needed now and the heap does not suffice, all groups are asked.

    Args:
        groups: Names of all groups.
        idle_bytes: Bytes that would become free if a group left; 0 if it is absent or in use.
    """

    def __init__(self, groups: Iterable[str], idle_bytes: Callable[[str], int]) -> None:
        self._groups = tuple(groups)
        self._idle_bytes = idle_bytes
        self._heap: list[tuple[int, str]] = []
        self._made_for: tuple[AccessOrder, int] | None = None

    def enter(self, group: str, order: AccessOrder) -> None:
        """The group is on the device, and no window uses it from now on."""
        if len(self._heap) >= _MOST_ENTRIES * len(self._groups):
            # Where little has to leave, what is out of date stays below: it would be a little more with every use.
            self._heap.clear()
            self._made_for = None
        heapq.heappush(self._heap, (-order.next_use(group), group))

    def choose(
        self, needed_bytes: int, order: AccessOrder, *, staying: str, later_than: int | None = None
    ) -> list[str] | None:
        """The groups to drop so that `needed_bytes` become free; None where they do not suffice.

        Args:
            needed_bytes: How many bytes are missing.
            order: When groups are used next.
            staying: The group that needs the room.
            later_than: For a prefetch: only groups whose next use is later than this one may leave.
        """
        if self._made_for is not None and self._made_for[0] is order and self._made_for[1] == order.epoch:
            leaving = self._take(needed_bytes, order, staying, later_than)
            if leaving is not None or later_than is not None:
                return leaving
        self._heap = [(-order.next_use(name), name) for name in self._groups if self._idle_bytes(name)]
        heapq.heapify(self._heap)
        self._made_for = (order, order.epoch)
        return self._take(needed_bytes, order, staying, later_than)

    def _take(self, needed_bytes: int, order: AccessOrder, staying: str, later_than: int | None) -> list[str] | None:
        taken: dict[str, tuple[int, str]] = {}
        heap = self._heap
        while needed_bytes > 0 and heap:
            entry = heap[0]
            next_use, name = -entry[0], entry[1]
            if later_than is not None and next_use <= later_than:
                break
            heapq.heappop(heap)
            if name in taken or name == staying or next_use != order.next_use(name):
                continue
            if idle_bytes := self._idle_bytes(name):
                taken[name] = entry
                needed_bytes -= idle_bytes
        if needed_bytes > 0:
            for entry in taken.values():
                heapq.heappush(heap, entry)
            return None
        return list(taken)
