"""Chunk: one live chunk, with its bytes on the host and on the device, and the table of its legal states.

`StoredGroup` holds the chunks of one group.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import torch

from lowtide.errors import ChunkStateError
from lowtide.memory.layout import ChunkSpec, GroupSpec, ParameterSpec
from lowtide.memory.mover import Copied, Ticket


class ChunkState(enum.StrEnum):
    """Which bytes of a chunk exist where. N is the chunk's size."""

    HOST = "host"
    """N on the host, which holds the truth; nothing on the device."""
    FETCHING = "fetching"
    """N on the host, N on the device being filled; nobody may read the device's yet."""
    IN_USE = "in use"
    """N on the host, the same N on the device, read by an open window: must not leave."""
    IDLE = "idle"
    """N on the host, the same N on the device, read by nobody: leaves by being dropped."""
    DIRTY = "dirty"
    """N on the device hold the truth, N on the host are out of date: must be written back before it leaves."""
    WRITING_BACK = "writing back"
    """N on the device hold the truth and are being copied to N on the host."""
    RESIDENT = "resident"
    """N on the device hold the truth; the host has no weights of it."""


LEGAL: Mapping[ChunkState, frozenset[ChunkState]] = {
    ChunkState.HOST: frozenset({ChunkState.FETCHING, ChunkState.RESIDENT}),
    # Back to HOST: fetched for nothing, because another group was needed first or the host's weights changed.
    ChunkState.FETCHING: frozenset({ChunkState.IN_USE, ChunkState.HOST}),
    ChunkState.IN_USE: frozenset({ChunkState.IDLE, ChunkState.DIRTY}),
    ChunkState.IDLE: frozenset({ChunkState.IN_USE, ChunkState.HOST, ChunkState.RESIDENT}),
    ChunkState.DIRTY: frozenset({ChunkState.WRITING_BACK}),
    # To DIRTY: changed once more in the same window, by a hook of the user's and by an update; a second copy follows the first.
    ChunkState.WRITING_BACK: frozenset({ChunkState.IDLE, ChunkState.IN_USE, ChunkState.DIRTY}),
    ChunkState.RESIDENT: frozenset({ChunkState.HOST}),
}

ON_DEVICE = frozenset(set(ChunkState) - {ChunkState.HOST})
"""States in which the chunk has bytes on the device."""


def move(chunk: str, now: ChunkState, to: ChunkState) -> ChunkState:
    """The new state, if the table allows it.

    Example:
        >>> move("layers.0/0", ChunkState.HOST, ChunkState.FETCHING)
        <ChunkState.FETCHING: 'fetching'>
    """
    if to not in LEGAL[now]:
        legal = ", ".join(sorted(LEGAL[now]))
        raise ChunkStateError(
            f"chunk {chunk} cannot go from {now.value!r} to {to.value!r}: from {now.value!r} it may become {legal}. "
            "This is a fault of Lowtide's; please report it with the plan"
        )
    return to


class HostWork(Protocol):
    """Something on the host that will change a chunk's bytes there: an update in a worker thread."""

    def is_done(self) -> bool:
        """Whether it has finished."""

    def wait(self) -> None:
        """Wait for it; raises what it raised."""


class Chunk:
    """One chunk. The store moves it from state to state; others tell it what they did by its methods, and assign nothing.

    Attributes:
        host: Its bytes on the host; None for a resident chunk.
        device: A flat byte tensor whose storage has memory only while the chunk is on the device. The storage stays the
            same for the whole session, because autograd's saved views point to it.
        fetched: The last copy to the device.
        written: The last copy back to the host.
        last_use: Where the computation last read or wrote the device's bytes; for a resident chunk, before its update on the host.
        host_work: Pending change of the host's bytes; a fetch waits for it.
        arriving: A resident chunk's new bytes on their way, for which the computation has not been told to wait.
        is_touched: Whether user code may have written the device's bytes since the host last knew them. For resident chunks
            that the host updates: it takes them over first.
        num_fetches: Copies of its weights to the device so far.
        staging: On the host, for gradients that are used up in backward: taken for one update, given back by it.
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
        self.is_touched = True
        self.num_fetches = 0
        self.staging: torch.Tensor | None = None

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

    def mark_touched(self) -> None:
        """User code may have written the device's bytes: an update on the host takes them over first."""
        self.is_touched = True

    def move_host(self, flat: torch.Tensor) -> None:
        """The host's bytes lie elsewhere now; whoever moved them has copied them."""
        self.host = flat

    def forget_device(self) -> None:
        """Let go of the device's buffer. Where a graph still points to its memory, that goes with the graph."""
        self.device = torch.empty(0, dtype=torch.uint8)

    def count_on_from(self, num_fetches: int) -> None:
        """Go on counting where another plan of the same session ended."""
        self.num_fetches = num_fetches

    def stage_in(self, buffer: torch.Tensor) -> None:
        """Gradients for one update on the host lie in this buffer."""
        self.staging = buffer

    def take_staging(self) -> torch.Tensor | None:
        """The buffer of `stage_in`, which from now on is the caller's to give back; None without one."""
        staging, self.staging = self.staging, None
        return staging

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
        self.name = spec.name
        self.chunks = chunks
        self.num_open = 0

    @property
    def is_resident(self) -> bool:
        """Whether all its weights stay on the device."""
        # A loop: this is asked several times at every use of a group, and `all` costs a generator each time.
        for chunk in self.chunks:  # noqa: SIM110
            if chunk.state is not ChunkState.RESIDENT:
                return False
        return True


def view_of(flat: torch.Tensor, offset_bytes: int, parameter: ParameterSpec) -> torch.Tensor:
    """The parameter's elements in a chunk's flat bytes, with the parameter's own strides.

    The flat tensor must have its memory: torch would give it some otherwise.
    """
    typed = torch.empty(0, dtype=parameter.dtype, device=flat.device)
    offset = flat.storage_offset() + offset_bytes
    assert offset % parameter.dtype.itemsize == 0, f"{parameter.name} would start at byte {offset}"
    return typed.set_(flat.untyped_storage(), offset // parameter.dtype.itemsize, parameter.shape, parameter.stride)
