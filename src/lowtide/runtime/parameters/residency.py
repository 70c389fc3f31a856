"""Residency: opens and closes groups, and points their parameters to where their bytes are.

The passes decide when; the store moves bytes; the residency calls the store and points the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from lowtide.memory.chunk import Chunk, ChunkState, StoredGroup
from lowtide.memory.mover import Mover, Ticket
from lowtide.memory.store import Books, ChunkStore
from lowtide.runtime.parameters.group import ManagedGroup, Settler, chunks_in
from lowtide.runtime.parameters.pending import SaveGuard, beside
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder, is_resident


class Residency(Protocol):
    """What the passes and the updates need. A session's moves memory, a prediction's has none."""

    groups: dict[str, ManagedGroup]

    @property
    def store(self) -> ChunkStore:
        """Which groups are on the device."""

    def open(self, group: ManagedGroup) -> None:
        """Bring the group to the device."""

    def open_all(self, groups: Sequence[ManagedGroup]) -> None:
        """Open all of them or, if one fails, none."""

    def close(self, group: ManagedGroup, at: Ticket | None = None) -> None:
        """One window less uses the group; `at` is the point where the computation last used it."""

    def forget_old_copy(self, group: ManagedGroup) -> None:
        """Drop the group's copy on the device, if the host is changing the weights: it is old."""

    def keep_writes(self, group: ManagedGroup) -> None:
        """Copy to the host what the forward wrote to its own weights on the device."""

    def keep_write(self, group: ManagedGroup, chunk: Chunk) -> None:
        """The user's code wrote to weights of the chunk on the device."""

    def write_back(self, group: ManagedGroup, chunk: Chunk, at: Ticket | None = None) -> None:
        """The computation changed an open chunk of streamed weights; `at` is the point where it last did."""

    def settle_held(self) -> None:
        """Wait for updates and copies that change memory which somebody holds."""

    def guard(self, group: ManagedGroup) -> None:
        """Make parameters pending if something is under way for them."""

    def point_idle_to_host(self) -> None:
        """A forward made no graph: point the parameters of groups that nobody uses to the host again."""

    def rebuild(self) -> None:
        """Start afresh after an exception."""


class ManagedResidency:
    """The groups of a session over their store, whose listener this is.

    Args:
        groups: Bound to the model's parameters.
        mover: Issues the copies.
        books: Where device bytes of streamed chunks are counted.
        saves: Asked before the host's bytes of streamed weights change.
        settler: Called when somebody reads a pending parameter.
        window_bytes: How many device bytes streamed chunks may take together.
        prefetch_depth: How many groups ahead are fetched.
        observer: Told when chunks come and go.
    """

    def __init__(
        self,
        groups: Iterable[ManagedGroup],
        mover: Mover,
        books: Books,
        recorder: Recorder,
        saves: SaveGuard,
        *,
        settler: Settler,
        window_bytes: int,
        prefetch_depth: int,
        observer: StepObserver | None,
    ) -> None:
        self.groups = {group.name: group for group in groups}
        self._saves = saves
        # The store reports copies, and chunks that leave, for the statistics alone.
        self.on_copy, self.on_absent, self.on_wait = recorder.on_copy, recorder.on_absent, recorder.on_wait
        self._on_present = recorder.on_present
        self.store = ChunkStore(
            [group.stored for group in self.groups.values()],
            mover,
            [books],
            window_bytes=window_bytes,
            prefetch_depth=prefetch_depth,
            listener=self,
        )
        for group in self.groups.values():
            group.be_settled_by(settler)
            if group.is_spread:
                group.make_pending()
        if observer is not None:
            chunks = chunks_in(self.groups.values())
            observer.watch(self.store, sum(chunk.spec.nbytes for chunk in chunks if is_resident(chunk)))

    def open(self, group: ManagedGroup) -> None:
        """Bring the group to the device, and point its parameters there."""
        self.store.open(group.name)
        try:
            group.point_to_device()
            if group.shown_memory and not group.is_resident and group.stored.num_open == 1:
                group.fill_in_foreign_data()
        except BaseException:
            self.store.close(group.name)
            raise

    def open_all(self, groups: Sequence[ManagedGroup]) -> None:
        """Open all of them or, if one fails, none."""
        opened: list[ManagedGroup] = []
        try:
            for group in groups:
                self.open(group)
                opened.append(group)
        except BaseException:
            for group in opened:
                self.close(group)
            raise

    def close(self, group: ManagedGroup, at: Ticket | None = None) -> None:
        """One window less uses the group; after the last one, reads of parameters are noticed. See `ChunkStore.close` for `at`."""
        self.store.close(group.name, at)
        if group.stored.num_open:
            return
        self.forget_old_copy(group)
        self.guard(group)

    def forget_old_copy(self, group: ManagedGroup) -> None:
        """Drop the group's copy on the device, if the host is changing the weights, or somebody may: it is, or may be, old."""
        if group.is_resident or group.is_spread or group.stored.num_open:
            return  # what is spread is dropped by `ChunkStore.parts_change`, on all ranks
        if group.stored.is_changing or group.is_held():
            self.store.drop(group.name)

    def keep_writes(self, group: ManagedGroup) -> None:
        """Copy what the forward wrote to its own weights on the device to where the true values are."""
        for chunk in group.written_chunks():
            self.keep_write(group, chunk)

    def keep_write(self, group: ManagedGroup, chunk: Chunk) -> None:
        """The user's code wrote to weights of the chunk on the device."""
        if chunk.exchange is not None:
            chunk.exchange.require_alike(chunk.device)
        if chunk.state is ChunkState.RESIDENT:
            chunk.mark_touched()
        elif chunk.state in (ChunkState.IN_USE, ChunkState.WRITING_BACK) and chunk.host_work is None:
            self.write_back(group, chunk)

    def write_back(self, group: ManagedGroup, chunk: Chunk, at: Ticket | None = None) -> None:
        """The computation changed an open chunk of streamed weights: copy it to where the true values are."""
        if self._saves.reading is not None:
            self._saves.reading.wait_for([managed.parameter for managed in group.members if managed.chunk is chunk])
        if group.is_held(chunk):
            group.await_change()
        if group.shown_memory:
            self._write_back_beside(group, chunk)
        else:
            self.store.write_back(chunk, at)

    def _write_back_beside(self, group: ManagedGroup, chunk: Chunk) -> None:
        """Write back to foreign memory of the user's. The homes of such parameters keep their values, though chunks are copied as
        a whole.
        """
        foreign = [managed for managed in group.members if managed.chunk is chunk and managed.foreign is not None]
        kept = [beside(managed.home).copy_(managed.home) for managed in foreign]
        self.store.write_back(chunk)
        assert chunk.written is not None
        chunk.written.ended.wait()
        with torch.no_grad():
            for managed, values in zip(foreign, kept, strict=True):
                assert managed.foreign is not None
                managed.foreign.copy_(managed.home)
                managed.home.copy_(values)

    def settle_held(self) -> None:
        """Wait for updates and copies that change held memory; see Note [Memory that the user holds] in `parameters.group`."""
        for group in self.groups.values():
            if group.is_change_awaited and not group.stored.num_open:
                self.settle(group)
                group.forget_change()

    def settle(self, group: ManagedGroup) -> None:
        """Wait for the group's true values, and drop copies that would not see a write."""
        for chunk in group.stored.chunks:
            if chunk.state is not ChunkState.RESIDENT:
                chunk.settle_host()
        if group.is_resident:
            self.store.refresh(group.name)
            for chunk in group.stored.chunks:
                chunk.mark_touched()
        elif not group.is_spread:
            self.store.drop(group.name)
            group.point_to_host()
        self.guard(group)

    def guard(self, group: ManagedGroup) -> None:
        """Make the parameters pending if something is under way for them, or if a write must be noticed; else make them plain."""
        if group.stored.num_open:
            return
        # The cheap questions first: whether a copy is done is asked on the device.
        is_pending = (group.points_to_device and not group.is_resident) or group.guards_gradients
        if is_pending or _has_pending_work(group) or (self._saves.reading is not None and self._is_read(group)):
            group.make_pending()
        else:
            group.make_plain()

    def _is_read(self, group: ManagedGroup) -> bool:
        """Whether a save under way has yet to read the weights. It read resident ones at once, whose use nobody notices."""
        reading = self._saves.reading
        return reading is not None and not group.is_resident and reading.has_unread(group.parameters)

    def rebuild(self) -> None:
        """Start afresh after an exception: no group is open, parameters point to their homes, and chunks are there. No work may be
        under way on the host.
        """
        for group in self.groups.values():
            # Until all is in order, reading a parameter must not reach memory that is about to go.
            group.make_pending()
        for group in self.groups.values():
            group.rebuild()
        self.store.rebuild()
        for group in self.groups.values():
            self.guard(group)

    def point_idle_to_host(self) -> None:
        """A forward made no graph: point the parameters of groups that nobody uses to the host again."""
        for group in self.groups.values():
            if not group.stored.num_open and not group.visits:
                group.point_to_host()
                self.guard(group)

    # -- told by the store ---------------------------------------------------------------------------------------------

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """A group is not fetched ahead while somebody may write to the host's bytes unnoticed."""
        return not self.groups[group.name].is_held()

    def before_fetch(self, chunk: Chunk) -> None:
        """Before the host's bytes are copied: the user may have given a parameter other memory."""
        self.groups[chunk.spec.group].adopt_foreign_data()

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """A copy on the device goes out of date when somebody writes to the parameter: watch it."""
        self._on_present(chunk, at)
        group = self.groups[chunk.spec.group]
        if not group.stored.num_open:
            group.make_pending()


def _has_pending_work(group: ManagedGroup) -> bool:
    for chunk in group.stored.chunks:
        if chunk.host_work is not None or chunk.state in (ChunkState.IDLE, ChunkState.FETCHING):
            return True
        if group.is_resident and chunk.host is not None and not chunk.is_touched:
            return True
        if chunk.written is not None and not chunk.written.ended.is_done():
            return True
    return False
