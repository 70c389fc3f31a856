"""Residency: opens and closes groups, and keeps what their parameters show in step with where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.memory.chunk import Chunk, StoredGroup
from lowtide.memory.chunk_state import ChunkState
from lowtide.memory.mover import Copied, Ticket
from lowtide.memory.store import ChunkStore
from lowtide.runtime.recording import Recorder
from lowtide.runtime.unit import Unit


class Residency:
    """The units of a session over their store. Also the store's listener.

    `store` is set right after both are made: each of the two needs the other.
    """

    store: ChunkStore

    def __init__(self, units: Iterable[Unit], recorder: Recorder) -> None:
        self.units = {unit.name: unit for unit in units}
        self._recorder = recorder

    def open(self, unit: Unit) -> None:
        """Bring the group to the device, and let its parameters look there."""
        self.store.open(unit.name)
        try:
            unit.look_at_device()
        except BaseException:
            self.store.close(unit.name)
            raise

    def open_all(self, units: Sequence[Unit]) -> None:
        """All of them or, where one fails, none."""
        opened: list[Unit] = []
        try:
            for unit in units:
                self.open(unit)
                opened.append(unit)
        except BaseException:
            for unit in opened:
                self.close(unit)
            raise

    def close(self, unit: Unit) -> None:
        """One use less; after the last one a look at a parameter is noticed."""
        self.store.close(unit.name)
        if unit.group.num_open:
            return
        self.forget_old_copy(unit)
        self.guard(unit)

    def forget_old_copy(self, unit: Unit) -> None:
        """Where the host is changing the weights, a copy on the device is the old one."""
        is_changing = any(chunk.host_work is not None for chunk in unit.group.chunks)
        if is_changing and not unit.is_resident and not unit.group.num_open:
            self.store.drop(unit.name)

    def keep_writes(self, unit: Unit) -> None:
        """The forward wrote to its own weights, on the device: bring that to where the truth is."""
        for chunk in unit.written_chunks():
            if chunk.state is ChunkState.RESIDENT:
                chunk.is_touched = True
            elif chunk.state is ChunkState.IN_USE and chunk.host_work is None:
                self.store.write_back(chunk)

    def settle(self, unit: Unit) -> None:
        """Wait for the unit's true values, and forget copies that a write would leave behind."""
        for chunk in unit.group.chunks:
            if chunk.state is not ChunkState.RESIDENT:
                chunk.settle_host()
        if unit.is_resident:
            self.store.refresh(unit.name)
            for chunk in unit.group.chunks:
                chunk.is_touched = True
        else:
            self.store.drop(unit.name)
            unit.look_at_host()
        self.guard(unit)

    def guard(self, unit: Unit) -> None:
        """Veil the unit's parameters if something is pending for them, or a write must be noticed; else leave them plain."""
        if unit.group.num_open:
            return
        is_pending = unit.guards_gradients or any(
            chunk.host_work is not None
            or (unit.is_resident and chunk.host is not None and not chunk.is_touched)
            or chunk.state in (ChunkState.IDLE, ChunkState.FETCHING)
            or (chunk.written is not None and not chunk.written.ended.is_done())
            for chunk in unit.group.chunks
        )
        if is_pending or (unit.looks_at_device and not unit.is_resident):
            unit.veil()
        else:
            unit.unveil()

    def rest(self) -> None:
        """No graph was made: parameters look at the host again."""
        for unit in self.units.values():
            if not unit.group.num_open and not unit.visits:
                unit.look_at_host()
                self.guard(unit)

    # -- told by the store ---------------------------------------------------------------------------------------------

    def before_fetch(self, chunk: Chunk) -> None:
        """The user may have given a parameter other memory."""
        self.units[chunk.spec.group].adopt_foreign_data()

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        """For the statistics."""
        self._recorder.on_copy(chunk, copied, reason)

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """A copy on the device goes out of date when somebody writes to the parameter: watch it."""
        self._recorder.on_present(chunk, at)
        unit = self.units[chunk.spec.group]
        if not unit.group.num_open:
            unit.veil()

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        """For the statistics."""
        self._recorder.on_absent(chunk, at)

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        """For the statistics."""
        self._recorder.on_wait(group, reached, copied)
