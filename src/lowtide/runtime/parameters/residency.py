"""Residency: opens and closes groups, and keeps what their parameters show in step with where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lowtide.memory.chunk import Chunk, ChunkState, StoredGroup
from lowtide.memory.mover import Copied, Ticket
from lowtide.memory.store import ChunkStore
from lowtide.runtime.parameters.group import Unit
from lowtide.runtime.parameters.tensors import beside
from lowtide.runtime.statistics.recording import Recorder


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
            if unit.shown_memory and not unit.is_resident and unit.group.num_open == 1:
                unit.fill_in_foreign_data()
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

    def close(self, unit: Unit, at: Ticket | None = None) -> None:
        """One use less; after the last one a look at a parameter is noticed. See `ChunkStore.close` for `at`."""
        self.store.close(unit.name, at)
        if unit.group.num_open:
            return
        self.forget_old_copy(unit)
        self.guard(unit)

    def forget_old_copy(self, unit: Unit) -> None:
        """Where the host is changing the weights, or somebody may, a copy on the device is the old one."""
        if unit.is_resident or unit.group.num_open:
            return
        if any(chunk.host_work is not None for chunk in unit.group.chunks) or unit.is_held():
            self.store.drop(unit.name)

    def keep_writes(self, unit: Unit) -> None:
        """The forward wrote to its own weights, on the device: bring that to where the truth is."""
        for chunk in unit.written_chunks():
            self.keep_write(unit, chunk)

    def keep_write(self, unit: Unit, chunk: Chunk) -> None:
        """The user's code wrote to weights of the chunk on the device."""
        if chunk.state is ChunkState.RESIDENT:
            chunk.mark_touched()
        elif chunk.state in (ChunkState.IN_USE, ChunkState.WRITING_BACK) and chunk.host_work is None:
            self.write_back(unit, chunk)

    def write_back(self, unit: Unit, chunk: Chunk) -> None:
        """The computation changed an open chunk of streamed weights: copy it to where the truth is."""
        unit.is_awaited = unit.is_awaited or unit.is_held(chunk)
        if unit.shown_memory:
            self._write_back_beside(unit, chunk)
        else:
            self.store.write_back(chunk)

    def _write_back_beside(self, unit: Unit, chunk: Chunk) -> None:
        """To where parameters show memory of the user's; their homes keep what they have, though chunks are copied whole."""
        strangers = [bound for bound in unit.bounds if bound.chunk is chunk and bound.foreign is not None]
        kept = [beside(bound.home).copy_(bound.home) for bound in strangers]
        self.store.write_back(chunk)
        assert chunk.written is not None
        chunk.written.ended.wait()
        with torch.no_grad():
            for bound, values in zip(strangers, kept, strict=True):
                assert bound.foreign is not None
                bound.foreign.copy_(bound.home)
                bound.home.copy_(values)

    def settle_held(self) -> None:
        """Wait for what is changing memory that somebody holds; see Note [Memory that the user holds] in `parameters.group`."""
        for unit in self.units.values():
            if unit.is_awaited and not unit.group.num_open:
                self.settle(unit)
                unit.is_awaited = False

    def settle(self, unit: Unit) -> None:
        """Wait for the unit's true values, and forget copies that a write would leave behind."""
        for chunk in unit.group.chunks:
            if chunk.state is not ChunkState.RESIDENT:
                chunk.settle_host()
        if unit.is_resident:
            self.store.refresh(unit.name)
            for chunk in unit.group.chunks:
                chunk.mark_touched()
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

    def rebuild(self) -> None:
        """Start afresh after an exception: no group is open, parameters and chunks are where they rest. No work may be under
        way on the host.
        """
        for unit in self.units.values():
            # A look at a parameter from now on, until all is in order, must not reach memory that goes.
            unit.veil()
        for unit in self.units.values():
            unit.rebuild()
        self.store.rebuild()
        for unit in self.units.values():
            self.guard(unit)

    def rest(self) -> None:
        """No graph was made: parameters look at the host again."""
        for unit in self.units.values():
            if not unit.group.num_open and not unit.visits:
                unit.look_at_host()
                self.guard(unit)

    # -- told by the store ---------------------------------------------------------------------------------------------

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """Not while somebody may write to the host's bytes unnoticed."""
        return not self.units[group.name].is_held()

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
