"""Chunk: one live chunk, with its bytes on the host and on the device; StoredGroup: the chunks of one group."""

from __future__ import annotations

from typing import Protocol

import torch

from lowtide.memory.chunk_state import ON_DEVICE, ChunkState, move
from lowtide.memory.layout_types import ChunkSpec, GroupSpec, ParameterSpec
from lowtide.memory.mover import Copied, Ticket


class HostWork(Protocol):
    """Something on the host that will change a chunk's bytes there: an update in a worker thread."""

    def is_done(self) -> bool:
        """Whether it has finished."""

    def wait(self) -> None:
        """Wait for it; raises what it raised."""


class Chunk:
    """One chunk. The store changes it, nobody else.

    Attributes:
        host: Its bytes on the host; None for a resident chunk.
        device: A flat byte tensor whose storage has memory only while the chunk is on the device. The storage stays the
            same for the whole session, because autograd's saved views point to it.
        fetched: The last copy to the device.
        written: The last copy back to the host.
        last_use: Where the computation last read or wrote the device's bytes; of a resident chunk, before its update on the host.
        host_work: Pending change of the host's bytes; a fetch waits for it.
    """

    def __init__(self, spec: ChunkSpec, host: torch.Tensor | None, device: torch.Tensor) -> None:
        self.spec = spec
        self.host = host
        self.device = device
        self.state = ChunkState.HOST
        self.fetched: Copied | None = None
        self.written: Copied | None = None
        self.last_use: Ticket | None = None
        self.host_work: HostWork | None = None
        self.arriving: Copied | None = None
        """Of a resident chunk: its new bytes on their way, for which the computation has not been told to wait."""
        self.is_touched = True
        """Whether user code may have written the device's bytes since the host last knew them. For resident chunks that
        the host updates: it takes them over first."""
        self.num_fetches = 0
        self.staging: torch.Tensor | None = None
        """On the host, for gradients that are used up in backward: taken for one update, given back by it."""

    def become(self, state: ChunkState) -> None:
        """Change the state, if the table allows it."""
        self.state = move(self.spec.name, self.state, state)

    @property
    def is_on_device(self) -> bool:
        """Whether it has bytes on the device."""
        return self.state in ON_DEVICE

    @property
    def pending_device_reads(self) -> list[Ticket]:
        """What must have happened before the device's memory may be used for something else."""
        tickets = [self.last_use] if self.last_use is not None else []
        tickets += [copied.ended for copied in (self.fetched, self.written) if copied is not None]
        return tickets

    def settle_work(self) -> None:
        """Wait for the pending change of the host's bytes. A failed one is reported once; an interrupted wait forgets none."""
        if self.host_work is None:
            return
        try:
            self.host_work.wait()
        except Exception:
            self.host_work = None
            raise
        self.host_work = None

    def settle_host(self) -> None:
        """Wait until the host's bytes are the true ones and nothing changes them."""
        self.settle_work()
        if self.written is not None:
            self.written.ended.wait()


class StoredGroup:
    """A group's chunks and how many windows hold it open."""

    def __init__(self, spec: GroupSpec, chunks: list[Chunk]) -> None:
        self.spec = spec
        self.chunks = chunks
        self.num_open = 0

    @property
    def name(self) -> str:
        """The group's name."""
        return self.spec.name

    @property
    def is_resident(self) -> bool:
        """Whether all its weights stay on the device."""
        return all(chunk.state is ChunkState.RESIDENT for chunk in self.chunks)


def view_of(flat: torch.Tensor, offset_bytes: int, parameter: ParameterSpec) -> torch.Tensor:
    """The parameter's elements in a chunk's flat bytes, with the parameter's own strides.

    The flat tensor must have its memory: torch would give it some otherwise.
    """
    typed = torch.empty(0, dtype=parameter.dtype, device=flat.device)
    offset = flat.storage_offset() + offset_bytes
    assert offset % parameter.dtype.itemsize == 0, f"{parameter.name} would start at byte {offset}"
    return typed.set_(flat.untyped_storage(), offset // parameter.dtype.itemsize, parameter.shape, parameter.stride)
