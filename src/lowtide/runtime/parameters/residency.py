"""Residency: opens and closes groups, and keeps what their parameters show in step with where their bytes are."""

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
    """What the passes and the updates ask: a session's answers with memory, a prediction's without."""

    groups: dict[str, ManagedGroup]

    @property
    def store(self) -> ChunkStore:
        """Which groups are on the device."""

    def open(self, group: ManagedGroup) -> None:
        """Bring the group to the device."""

    def open_all(self, groups: Sequence[ManagedGroup]) -> None:
        """All of them or, where one fails, none."""

    def close(self, group: ManagedGroup, at: Ticket | None = None) -> None:
        """One use less; `at` is where the computation last used the group."""

    def forget_old_copy(self, group: ManagedGroup) -> None:
        """Where the host is changing the weights, a copy on the device is the old one."""

    def keep_writes(self, group: ManagedGroup) -> None:
        """The forward may have written to its own weights, on the device."""

    def keep_write(self, group: ManagedGroup, chunk: Chunk) -> None:
        """The user's code wrote to weights of the chunk on the device."""

    def write_back(self, group: ManagedGroup, chunk: Chunk, at: Ticket | None = None) -> None:
        """The computation changed an open chunk of streamed weights; `at` is where it last did."""

    def settle_held(self) -> None:
        """Wait for what is changing memory that somebody holds."""

    def guard(self, group: ManagedGroup) -> None:
        """Make parameters pending where something is under way for them."""

    def rest(self) -> None:
        """No graph was made: parameters look at the host again."""

    def rebuild(self) -> None:
        """Start afresh after an exception."""


class ManagedResidency:
    """The groups of a session over their store, whose listener this is.

    Args:
        groups: Bound to the model's parameters.
        mover: Issues the copies.
        books: Where device bytes of streamed chunks are counted.
        saves: Asked before the host's bytes of streamed weights change.
        settler: Called when somebody looks at a parameter that is pending.
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
        # Copies, and chunks that leave, are for the statistics alone.
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
        if observer is not None:
            chunks = chunks_in(self.groups.values())
            observer.watch(self.store, sum(chunk.spec.nbytes for chunk in chunks if is_resident(chunk)))

    def open(self, group: ManagedGroup) -> None:
        """Bring the group to the device, and let its parameters look there."""
        self.store.open(group.name)
        try:
            group.look_at_device()
            if group.shown_memory and not group.is_resident and group.stored.num_open == 1:
                group.fill_in_foreign_data()
        except BaseException:
            self.store.close(group.name)
            raise

    def open_all(self, groups: Sequence[ManagedGroup]) -> None:
        """All of them or, where one fails, none."""
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
        """One use less; after the last one a look at a parameter is noticed. See `ChunkStore.close` for `at`."""
        self.store.close(group.name, at)
        if group.stored.num_open:
            return
        self.forget_old_copy(group)
        self.guard(group)

    def forget_old_copy(self, group: ManagedGroup) -> None:
        """Where the host is changing the weights, or somebody may, a copy on the device is the old one."""
        if group.is_resident or group.stored.num_open:
            return
        if group.stored.is_changing or group.is_held():
            self.store.drop(group.name)

    def keep_writes(self, group: ManagedGroup) -> None:
        """The forward wrote to its own weights, on the device: bring that to where the truth is."""
        for chunk in group.written_chunks():
            self.keep_write(group, chunk)

    def keep_write(self, group: ManagedGroup, chunk: Chunk) -> None:
        """The user's code wrote to weights of the chunk on the device."""
        if chunk.state is ChunkState.RESIDENT:
            chunk.mark_touched()
        elif chunk.state in (ChunkState.IN_USE, ChunkState.WRITING_BACK) and chunk.host_work is None:
            self.write_back(group, chunk)

    def write_back(self, group: ManagedGroup, chunk: Chunk, at: Ticket | None = None) -> None:
        """The computation changed an open chunk of streamed weights: copy it to where the truth is."""
        if self._saves.reading is not None:
            self._saves.reading.wait_for([managed.parameter for managed in group.members if managed.chunk is chunk])
        if group.is_held(chunk):
            group.await_change()
        if group.shown_memory:
            self._write_back_beside(group, chunk)
        else:
            self.store.write_back(chunk, at)

    def _write_back_beside(self, group: ManagedGroup, chunk: Chunk) -> None:
        """To where parameters show memory of the user's; their homes keep what they have, though chunks are copied whole."""
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
        """Wait for what is changing memory that somebody holds; see Note [Memory that the user holds] in `parameters.group`."""
        for group in self.groups.values():
            if group.is_awaited and not group.stored.num_open:
                self.settle(group)
                group.forget_change()

    def settle(self, group: ManagedGroup) -> None:
        """Wait for the group's true values, and forget copies that a write would leave behind."""
        for chunk in group.stored.chunks:
            if chunk.state is not ChunkState.RESIDENT:
                chunk.settle_host()
        if group.is_resident:
            self.store.refresh(group.name)
            for chunk in group.stored.chunks:
                chunk.mark_touched()
        else:
            self.store.drop(group.name)
            group.look_at_host()
        self.guard(group)

    def guard(self, group: ManagedGroup) -> None:
        """Make the parameters pending if something is under way for them, or a write must be noticed; else plain."""
        if group.stored.num_open:
            return
        # First what costs nothing to ask: a copy is asked about on the device.
        is_pending = (group.looks_at_device and not group.is_resident) or group.guards_gradients
        if is_pending or _has_pending_work(group) or (self._saves.reading is not None and self._is_read(group)):
            group.make_pending()
        else:
            group.make_plain()

    def _is_read(self, group: ManagedGroup) -> bool:
        """Whether a save under way has yet to read the weights. It read resident ones at once, whose use nobody notices."""
        reading = self._saves.reading
        return reading is not None and not group.is_resident and reading.has_unread(group.parameters)

    def rebuild(self) -> None:
        """Start afresh after an exception: no group is open, parameters and chunks are where they rest. No work may be under
        way on the host.
        """
        for group in self.groups.values():
            # A look at a parameter from now on, until all is in order, must not reach memory that goes.
            group.make_pending()
        for group in self.groups.values():
            group.rebuild()
        self.store.rebuild()
        for group in self.groups.values():
            self.guard(group)

    def rest(self) -> None:
        """No graph was made: parameters look at the host again."""
        for group in self.groups.values():
            if not group.stored.num_open and not group.visits:
                group.look_at_host()
                self.guard(group)

    # -- told by the store ---------------------------------------------------------------------------------------------

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """Not while somebody may write to the host's bytes unnoticed."""
        return not self.groups[group.name].is_held()

    def before_fetch(self, chunk: Chunk) -> None:
        """The user may have given a parameter other memory."""
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
