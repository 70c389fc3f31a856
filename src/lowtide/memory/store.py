"""ChunkStore: which groups are on the device. Opens, closes, prefetches and drops them inside a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from lowtide.errors import BudgetError
from lowtide.memory.chunk import Chunk, ChunkState, HostWork, StoredGroup
from lowtide.memory.eviction import AccessOrder, LeavingQueue
from lowtide.memory.mover import Copied, Mover, Ticket
from lowtide.units import format_bytes

UPLOADS_AT_ONCE = 2
"""Resident groups brought up to date each time a group opens: twice as fast as they are needed, and no long queue before
the next streamed group."""


class Books(Protocol):
    """Counts device bytes: a tier, or the tracked memory of an emulated device."""

    def charge(self, num_bytes: int, owner: str) -> None:
        """Bytes are taken; raises when they are not there."""

    def credit(self, num_bytes: int, owner: str) -> None:
        """Bytes of an owner are given back."""

    def clear(self, owners: Collection[str]) -> None:
        """These have nothing any more; right also where an exception left a charge or a credit half made."""


class StoreListener(Protocol):
    """Is told what happens, for statistics and pictures."""

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """Whether the group's bytes on the host stay as they are until its next use, unless the store is told."""

    def before_fetch(self, chunk: Chunk) -> None:
        """The host's bytes are about to be copied to the device: they must be the true ones."""

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        """A copy was issued: `weights` or `upload` to the device, `write back` to the host."""

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """The chunk has bytes on the device from here."""

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        """The chunk has none from here."""

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        """The computation reached this point and continues when the copies are done."""


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
        self._changing: dict[str, int] = {}
        """Resident groups that the host is changing, or has changed, and their places in a forward."""

    def open(self, name: str) -> None:
        """Bring the group to the device, make the computation wait for it, and hold it there until `close`."""
        group = self.groups[name]
        if group.num_open == 0 and not group.is_resident:
            self.order.access(name)
            self._require(group)
            self._wait_for_copies(group)
        elif group.num_open == 0:
            self.refresh(name)
        group.num_open += 1
        try:
            self.prefetch()
        except BaseException:
            # The caller has nothing open, and will not close it.
            self.close(name)
            raise

    def close(self, name: str, at: Ticket | None = None) -> None:
        """One window less holds the group; without any it may leave.

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
        self._leaving.enter(name, self.order)

    def device_changes(self, chunk: Chunk) -> None:
        """The computation is about to change the open chunk's device bytes; `write_back` comes after it."""
        chunk.become(ChunkState.DIRTY)

    def write_back(self, chunk: Chunk) -> None:
        """The computation changed the open chunk's device bytes: copy them to the host."""
        assert chunk.host is not None
        if chunk.state is not ChunkState.DIRTY:
            chunk.become(ChunkState.DIRTY)
        chunk.written = self._mover.to_host(chunk.host, chunk.device, [self._mover.now()])
        # Not before: a chunk whose copy nobody has issued stays dirty, and `rebuild` issues it.
        chunk.become(ChunkState.WRITING_BACK)
        self._listener.on_copy(chunk, chunk.written, "write back")

    def host_changes(self, chunk: Chunk, work: HostWork, place: int) -> None:
        """The host is changing the chunk's bytes. What the device has of it is old, and nothing told from now on reads it.

        Resident groups are brought up to date in the order of their places, that in which the next forward needs them.
        """
        chunk.host_work = work
        if chunk.state is ChunkState.RESIDENT:
            chunk.last_use = self._mover.now()
            self._changing[chunk.spec.group] = place

    def prefetch(self) -> None:
        """Fetch the next groups, as far as the depth, the budget and pending updates on the host allow."""
        self._upload_ahead()
        for name in self.order.upcoming(self._depth):
            group = self.groups[name]
            missing = _missing(group)
            if not missing or any(chunk.host_work is not None and not chunk.host_work.is_done() for chunk in missing):
                continue
            if not self._listener.may_fetch_ahead(group):
                continue
            if not self._make_room(group, missing, is_needed_now=False):
                return
            self._fetch(missing)
            if not group.num_open:
                self._leaving.enter(name, self.order)

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

    def take_over(self, chunk: Chunk) -> None:
        """Bring a resident chunk's weights to the host, where the user may have changed them, before an update there."""
        if chunk.state is ChunkState.RESIDENT and chunk.is_touched and chunk.host is not None:
            chunk.written = self._mover.to_host(chunk.host, chunk.device, [self._mover.now()])
            # Not before: from here on the host's bytes are the true ones.
            chunk.is_touched = False
            self._listener.on_copy(chunk, chunk.written, "write back")

    def drop(self, name: str) -> None:
        """Take the group's copies off the device: the host's bytes have changed, or are about to."""
        group = self.groups[name]
        assert group.num_open == 0, f"group {name!r} is in use"
        for chunk in group.chunks:
            if chunk.state in (ChunkState.IDLE, ChunkState.FETCHING):
                self._release(chunk)

    def drop_all(self) -> None:
        """Take every idle copy off the device."""
        for group in self.groups.values():
            if group.num_open == 0:
                self.drop(group.name)

    def rebuild(self) -> None:
        """Start afresh from the truth, whatever an exception left half made: no group is open, no streamed one on the device.

        The truth of a streamed chunk is on the host, unless it is dirty; that of a resident one that the host updates is
        there too, unless user code may have touched it. No work on the host may be under way, nor may a parameter look at a
        streamed chunk's memory on the device without a guard. May be repeated.
        """
        for group in self.groups.values():
            group.num_open = 0
            for chunk in group.chunks:
                if chunk.state is ChunkState.DIRTY:
                    assert chunk.host is not None
                    self._mover.to_host(chunk.host, chunk.device, [self._mover.now()])
                elif chunk.state is ChunkState.RESIDENT and chunk.host is not None and not chunk.is_touched:
                    self._mover.to_device(chunk.device, chunk.host, [self._mover.now()])
        self._mover.drain()
        streamed = [
            chunk for group in self.groups.values() for chunk in group.chunks if chunk.state is not ChunkState.RESIDENT
        ]
        for chunk in streamed:
            self._listener.on_absent(chunk, self._mover.now())
            # Past the table, which knows no exceptions.
            chunk.state = ChunkState.HOST
            if chunk.device.untyped_storage().nbytes():
                self._mover.shrink(chunk.device, [])
        for group in self.groups.values():
            for chunk in group.chunks:
                chunk.fetched = chunk.written = chunk.arriving = chunk.last_use = chunk.host_work = None
        for books in self._books:
            books.clear([chunk.spec.name for chunk in streamed])
        self.used_bytes = 0
        self._changing.clear()
        self.order.forget_cycle()
        self._leaving = LeavingQueue(self.groups, self._idle_bytes)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _upload_ahead(self) -> None:
        """Bring resident weights whose updates on the host are done, those first that are needed first."""
        if not self._changing:
            return
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
        chunk.settle_work()
        after = [chunk.last_use] if chunk.last_use is not None else [self._mover.now()]
        # Noted as a fetch: the host's next update must not change the bytes under it.
        chunk.fetched = chunk.arriving = self._mover.to_device(chunk.device, chunk.host, after)
        self._listener.on_copy(chunk, chunk.arriving, "upload")

    def _require(self, group: StoredGroup) -> None:
        missing = _missing(group)
        if not missing:
            return
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
        """Drop what is used last; for a prefetch only what is used later than the group itself."""
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
        """What the group's leaving would free; 0 while a window holds it."""
        group = self.groups[name]
        if group.num_open:
            return 0
        return sum(chunk.spec.nbytes for chunk in group.chunks if chunk.state in (ChunkState.IDLE, ChunkState.FETCHING))

    def _fetch(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.settle_work()
            assert chunk.host is not None
            self._listener.before_fetch(chunk)
            self._take_memory(chunk)
            chunk.become(ChunkState.FETCHING)
            after = [chunk.written.ended] if chunk.written is not None else []
            chunk.fetched = self._mover.to_device(chunk.device, chunk.host, after)
            chunk.num_fetches += 1
            self._listener.on_present(chunk, chunk.fetched.started)
            self._listener.on_copy(chunk, chunk.fetched, "weights")

    def _take_memory(self, chunk: Chunk) -> None:
        """All or nothing: where one of the books or the device itself refuses, nothing is counted."""
        num_bytes = chunk.spec.nbytes
        with contextlib.ExitStack() as undo:
            for books in self._books:
                books.charge(num_bytes, chunk.spec.name)
                undo.callback(books.credit, num_bytes, chunk.spec.name)
            self._mover.grow(chunk.device)
            undo.pop_all()
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _wait_for_copies(self, group: StoredGroup) -> None:
        fetched = [chunk.fetched for chunk in group.chunks if chunk.state is ChunkState.FETCHING and chunk.fetched]
        if fetched:
            reached = self._mover.now()
            for copied in fetched:
                self._mover.compute_after(copied.ended)
            self._listener.on_wait(group, reached, fetched)
        for chunk in group.chunks:
            if chunk.state is not ChunkState.RESIDENT:
                chunk.become(ChunkState.IN_USE)

    def _release(self, chunk: Chunk) -> None:
        after = chunk.pending_device_reads
        self._listener.on_absent(chunk, after[0])
        # Before the memory goes: nobody may take it for the weights any more.
        chunk.become(ChunkState.HOST)
        self._mover.shrink(chunk.device, after)
        self.used_bytes -= chunk.spec.nbytes
        for books in self._books:
            books.credit(chunk.spec.nbytes, chunk.spec.name)


def _missing(group: StoredGroup) -> list[Chunk]:
    return [chunk for chunk in group.chunks if chunk.state is ChunkState.HOST]
