"""Chunks: how a model lies in them, as plain data, and one live chunk with the table of its legal states.

`Layout` says which parameters are in which group and chunk. A group is what one module call needs at once. A chunk is a
slice of a group's flat buffer, made of whole parameters: the unit of placement, movement and update. Parameters that
several groups' modules use (tied weights) form a group of their own, which each of those modules opens beside its own:
they are stored once.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lowtide.errors import ChunkStateError, ConfigError
from lowtide.memory.mover import Copied, Ticket
from lowtide.units import KiB, MiB


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
    """N on the device hold the truth; where the host updates the chunk, it has N as well."""


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
        """Whether the work has finished."""

    def wait(self) -> None:
        """Wait for the work; raises the error of work that failed."""


class PartExchange(Protocol):
    """Brings the parts of a chunk together that several ranks keep; made for one chunk."""

    @property
    def begin(self) -> int:
        """Where this rank's part begins in the chunk."""

    @property
    def end(self) -> int:
        """Behind its last byte."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where this rank's pieces of parameters lie in its part."""

    def add_up(self, flag: torch.Tensor) -> None:
        """The sum of a number over the ranks that share the chunk, in place; a collective call."""

    def wait_for_device(self) -> None:
        """Wait for the computation that the loop has queued on the device so far."""

    def require_alike(self, device: torch.Tensor) -> None:
        """Refuse values that are not the same on all ranks that share the chunk; a collective call."""

    def gather(self, device: torch.Tensor, mine: Copied) -> Copied:
        """Bring the other ranks' parts to the chunk's bytes on the device, behind the copy of this rank's; a collective call."""


class Chunk:
    """One chunk. The store moves it from state to state; nobody assigns its fields from outside.

    Attributes:
        host: Its bytes on the host; None for a resident chunk that the device updates. Of a chunk that is spread over ranks
            this rank's part, which may be on the device.
        device: A flat byte tensor whose storage has memory only while the chunk is on the device. The storage stays the
            same for the whole session, because autograd's saved views point to it.
        fetched: The last copy to the device.
        written: The last copy back to the host.
        last_use: Where the computation last read or wrote the device's bytes; for a resident chunk, before its update on the host.
        host_work: Pending change of the host's bytes; a fetch waits for it.
        arriving: A resident chunk's new bytes on their way, for which the computation has not been told to wait.
        is_touched: Whether user code may have written the device's bytes since the host last knew them. For resident chunks
            that the host updates: these bytes are copied to the host first.
        num_fetches: Copies of its weights to the device so far.
        staging: On the host, for gradients that are used up in backward: taken for one update, given back by it.
        exchange: Brings the other ranks' parts, where the chunk is spread over ranks; else None.
        spans: Where its parameters, or this rank's pieces of them, lie in `host`.
        is_old: Spread over ranks, its parts have changed since they were brought together: what is on the device goes when no
            window uses it any more.
        is_behind: Spread over ranks, its parts were updated on the hosts, and were not brought together since.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        host: torch.Tensor | None,
        device: torch.Tensor,
        exchange: PartExchange | None = None,
    ) -> None:
        self.spec = spec
        self.exchange = exchange
        self.spans = spec.spans if exchange is None else exchange.spans
        self.is_old = self.is_behind = False
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
        # The table is asked here: a call for each change is a tenth of what a window costs.
        self.state = state if state in LEGAL[self.state] else move(self.spec.name, self.state, state)

    @property
    def device_part(self) -> torch.Tensor:
        """The bytes on the device that `host` is the truth of: all of them, or this rank's part."""
        return self.device if self.exchange is None else self.device[self.exchange.begin : self.exchange.end]

    @property
    def moved_bytes(self) -> int:
        """Bytes of `host`, which go to the device and back."""
        return self.spec.nbytes if self.exchange is None else self.exchange.end - self.exchange.begin

    @property
    def is_on_device(self) -> bool:
        """Whether the chunk has bytes on the device."""
        return self.state in ON_DEVICE

    @property
    def pending_device_reads(self) -> list[Ticket]:
        """Points that must have happened before the device's memory may be used for something else."""
        tickets = [self.last_use] if self.last_use is not None else []
        tickets += [copied.ended for copied in (self.fetched, self.written) if copied is not None]
        return tickets

    def mark_touched(self) -> None:
        """User code may have written the device's bytes: they are copied before an update on the host."""
        self.is_touched = True

    def move_host(self, flat: torch.Tensor) -> None:
        """The arena has moved the host's bytes here."""
        self.host = flat

    def use_device(self, device: torch.Tensor) -> None:
        """Come to another device from now on, in this buffer; nothing is on the one before."""
        assert self.state is ChunkState.HOST, (
            f"chunk {self.spec.name} is {self.state.value} on the device that it leaves"
        )
        self.device = device

    def forget_device(self) -> None:
        """Give up the device's buffer. If a graph still points to its memory, it is freed with the graph."""
        self.device = torch.empty(0, dtype=torch.uint8)

    def count_on_from(self, num_fetches: int) -> None:
        """Continue the count of fetches of another plan of the same session."""
        self.num_fetches = num_fetches

    def stage_in(self, buffer: torch.Tensor) -> None:
        """Use this buffer for the gradients of one update on the host."""
        self.staging = buffer

    def take_staging(self) -> torch.Tensor | None:
        """The buffer of `stage_in`, which the caller gives back; None if there is none."""
        staging, self.staging = self.staging, None
        return staging

    def wait_for_host_update(self) -> None:
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
        self.wait_for_host_update()
        if self.written is not None:
            self.written.ended.wait()


class StoredGroup:
    """A group's chunks and how many windows hold it open."""

    def __init__(self, spec: GroupSpec, chunks: list[Chunk]) -> None:
        self.spec = spec
        self.name = spec.name
        self.chunks = chunks
        self.num_open = 0
        self.is_spread = bool(chunks) and chunks[0].exchange is not None
        """Whether each rank keeps a part of it."""

    @property
    def is_resident(self) -> bool:
        """Whether all its weights stay on the device."""
        # A loop: this is asked several times at every use of a group, and `all` costs a generator each time.
        for chunk in self.chunks:  # noqa: SIM110
            if chunk.state is not ChunkState.RESIDENT:
                return False
        return True

    @property
    def is_changing(self) -> bool:
        """Whether the host changes some of its bytes, or has, and nobody has waited for it."""
        for chunk in self.chunks:  # noqa: SIM110
            if chunk.host_work is not None:
                return True
        return False


def view_of(flat: torch.Tensor, offset_bytes: int, parameter: ParameterSpec) -> torch.Tensor:
    """The parameter's elements in a chunk's flat bytes, with the parameter's own strides.

    The flat tensor must have its memory: torch would give it some otherwise.
    """
    typed = torch.empty(0, dtype=parameter.dtype, device=flat.device)
    offset = flat.storage_offset() + offset_bytes
    assert offset % parameter.dtype.itemsize == 0, f"{parameter.name} would start at byte {offset}"
    return typed.set_(flat.untyped_storage(), offset // parameter.dtype.itemsize, parameter.shape, parameter.stride)


ALIGNMENT_BYTES = 512
"""Where a parameter may start in its chunk: what the caching allocator gives to a tensor of its own."""
POISON = 0xFF
"""Fills memory that holds nothing, for tests and emulated devices: NaN in every floating type, -1 in every signed integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What one parameter looks like, without its values."""

    name: str
    """The first name under which `named_parameters` gives it; tied names are left out."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Kept, so that a channels-last weight stays one and its kernels stay the same."""
    dtype: torch.dtype
    requires_grad: bool
    nbytes: int
    """Bytes of the parameter's elements, without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The parameters that are needed together."""

    name: str
    """The path of the module that opens it; of a tied group the path of its parameter; "" for the rest of the model."""
    modules: tuple[str, ...]
    """Paths of the modules whose call needs the group, "" for the whole model."""
    parameters: tuple[ParameterSpec, ...]
    """The parameters, in the order of `named_parameters`."""
    is_block: bool = False
    """Whether its module is a repeated block of the model."""

    @property
    def nbytes(self) -> int:
        """Bytes of the group's parameters, without padding."""
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a parameter lies in its chunk."""

    parameter: ParameterSpec
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """A slice of a group: whole parameters, one after the other, each aligned to 512 bytes."""

    name: str
    """The group's name and the chunk's number, such as `layers.3/0`."""
    group: str
    spans: tuple[Span, ...]
    nbytes: int
    """The chunk's size with padding, a multiple of 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All groups of a model and their chunks, in the order in which the model first uses them."""

    groups: tuple[GroupSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    """Chunks of one group follow each other."""
    chunk_bytes: int
    """The chunk size that was searched for: no chunk is larger, unless one parameter alone is."""
    fingerprint: str
    """Changes when a name, shape, dtype, tie or grouping changes: a plan says for which layout it was made."""
    shards: int = 1
    """Each chunk can be cut into so many equal parts, of a multiple of 512 bytes, and has parameters of one type alone if there
    are several."""

    def chunks_of(self, group: str) -> tuple[ChunkSpec, ...]:
        """The chunks of one group, in order."""
        return tuple(chunk for chunk in self.chunks if chunk.group == group)


def lay_out(groups: Sequence[GroupSpec], *, chunk_bytes: int | None = None, shards: int = 1) -> Layout:
    """The chunks of groups, as `find_groups` gives them.

    Within a group the parameters are packed in order, each into the last chunk or, where that is full, into a new
    one. Trained parameters and frozen ones do not share a chunk: a frozen chunk has no gradient and is never updated.

    Args:
        groups: In the order of their first use.
        chunk_bytes: The most that a chunk of several parameters may hold, rounded up to 512. None: the size with the
            least waste, see `search_chunk_bytes`.
        shards: How many ranks share each chunk: its size is padded to so many equal parts, and parameters of different types
            do not share one.

    Example:
        >>> from torch import nn
        >>> from lowtide.memory.groups import find_groups
        >>> layout = lay_out(find_groups(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))))
        >>> [(chunk.name, chunk.nbytes) for chunk in layout.chunks]
        [('0/0', 2048), ('1/0', 2560)]
    """
    if chunk_bytes is None:
        chunk_bytes = search_chunk_bytes(groups)
    elif chunk_bytes <= 0:
        raise ConfigError(f"chunk_bytes is {chunk_bytes}; give at least {ALIGNMENT_BYTES}", key="chunk_bytes")
    chunk_bytes = aligned(chunk_bytes)
    return Layout(
        groups=tuple(groups),
        chunks=tuple(chunk for group in groups for chunk in _chunks(group, chunk_bytes, shards)),
        chunk_bytes=chunk_bytes,
        fingerprint=fingerprint(groups),
        shards=shards,
    )


def fingerprint(groups: Iterable[GroupSpec]) -> str:
    """Sixteen hexadecimal digits that change when a name, shape, dtype, tie, freeze or grouping changes."""
    facts = [[group.name, group.modules, [_facts(parameter) for parameter in group.parameters]] for group in groups]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _facts(parameter: ParameterSpec) -> list[object]:
    return [parameter.name, parameter.shape, str(parameter.dtype), parameter.requires_grad]


def _chunks(group: GroupSpec, chunk_bytes: int, shards: int) -> list[ChunkSpec]:
    found = []
    for number, packed in enumerate(next_fit(group.parameters, chunk_bytes, by_type=shards > 1)):
        spans, offset = [], 0
        for parameter in packed:
            spans.append(Span(parameter=parameter, offset_bytes=offset))
            offset += aligned(parameter.nbytes)
        unit = ALIGNMENT_BYTES * shards
        nbytes = -(-offset // unit) * unit
        found.append(ChunkSpec(name=f"{group.name}/{number}", group=group.name, spans=tuple(spans), nbytes=nbytes))
    return found


def aligned(num_bytes: int) -> int:
    """The next multiple of 512.

    Example:
        >>> aligned(1), aligned(512), aligned(513)
        (512, 512, 1024)
    """
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def next_fit(
    parameters: Sequence[ParameterSpec], chunk_bytes: int, *, by_type: bool = False
) -> list[list[ParameterSpec]]:
    """Parameters in chunks of at most `chunk_bytes`, in order; one that is larger has a chunk to itself.

    Next fit, not first fit: parameters that are used one after the other stay together. The trained and the frozen ones
    are packed apart, each in their order, so that adapters between frozen weights do not break the chunks of both; so are, if
    `by_type`, parameters of different types.
    """
    chunks: list[list[ParameterSpec]] = []
    last: dict[object, list[ParameterSpec]] = {}
    filled: dict[object, int] = {}
    for parameter in parameters:
        kind, size = (parameter.requires_grad, by_type and parameter.dtype), aligned(parameter.nbytes)
        if kind not in last or filled[kind] + size > chunk_bytes:
            last[kind], filled[kind] = [], 0
            chunks.append(last[kind])
        last[kind].append(parameter)
        filled[kind] += size
    return chunks


SMALLEST_CHUNK_BYTES = 4 * MiB
"""Below it a copy does not reach the speed of its link."""
LARGEST_CHUNK_BYTES = 64 * MiB
"""Above it there is little left to overlap: a chunk moves and is updated as a whole."""
CHUNK_OVERHEAD_BYTES = 512 * KiB
"""What a chunk costs besides its bytes: a link of 50 GB/s would move as much in the ten microseconds that starting a
copy takes."""
MOST_CANDIDATES = 512


def search_chunk_bytes(groups: Sequence[GroupSpec]) -> int:
    """The chunk size with the least waste among `chunk_candidates`, the larger of equal ones.

    No other size in their range wastes less, unless there were more than `MOST_CANDIDATES` to try: between two
    candidates the chunks hold the same parameters, in larger buffers.
    """
    kinds = _kinds(groups)
    return min(chunk_candidates(groups), key=lambda size: (_waste(kinds, size), -size))


def waste_bytes(groups: Sequence[GroupSpec], chunk_bytes: int) -> int:
    """What a chunk size costs: the padding, and a fixed overhead for each chunk.

    The padding is counted as if each chunk lay in a buffer of `chunk_bytes`, because buffers of one size can take each
    other's place. A parameter larger than that has a buffer of its own size.
    """
    return _waste(_kinds(groups), chunk_bytes)


def chunk_candidates(groups: Sequence[GroupSpec]) -> tuple[int, ...]:
    """The sizes worth trying, in order: those which a run of parameters of some group fills to the last byte.

    From 4 MiB (or the largest parameter, if that is larger) to 64 MiB (or the largest group, if that is smaller).
    Parameters beyond 64 MiB, such as the embedding of a large vocabulary, do not count: each has a chunk of its own,
    and would otherwise set the size for all. At most `MOST_CANDIDATES`, spread evenly.
    """
    kinds = _kinds(groups)
    if not kinds:
        return (SMALLEST_CHUNK_BYTES,)
    sizes = [aligned(parameter.nbytes) for kind in kinds for parameter in kind]
    largest = max((size for size in sizes if size <= LARGEST_CHUNK_BYTES), default=0)
    high = min(LARGEST_CHUNK_BYTES, max(sum(aligned(parameter.nbytes) for parameter in kind) for kind in kinds))
    low = min(high, max(SMALLEST_CHUNK_BYTES, largest))
    runs = {size for kind in kinds for size in _run_sizes(kind) if low <= size <= high}
    found = sorted({low, *runs})
    if len(found) <= MOST_CANDIDATES:
        return tuple(found)
    step = (len(found) - 1) / (MOST_CANDIDATES - 1)
    return tuple(found[round(index * step)] for index in range(MOST_CANDIDATES))


_Kind = tuple[ParameterSpec, ...]


def _kinds(groups: Sequence[GroupSpec]) -> Counter[_Kind]:
    """Groups that pack alike, as the parameters of the first of them: a deep model has few kinds."""
    first: dict[tuple[tuple[int, bool], ...], _Kind] = {}
    kinds: Counter[_Kind] = Counter()
    for group in groups:
        signature = tuple((parameter.nbytes, parameter.requires_grad) for parameter in group.parameters)
        kinds[first.setdefault(signature, group.parameters)] += 1
    return kinds


def _waste(kinds: Counter[_Kind], chunk_bytes: int) -> int:
    total = 0
    for parameters, count in kinds.items():
        for chunk in next_fit(parameters, chunk_bytes):
            filled = sum(aligned(parameter.nbytes) for parameter in chunk)
            payload = sum(parameter.nbytes for parameter in chunk)
            total += count * (max(chunk_bytes, filled) - payload + CHUNK_OVERHEAD_BYTES)
    return total


def _run_sizes(parameters: _Kind) -> set[int]:
    """Sizes of all runs of neighbours, the trained and the frozen ones apart."""
    found = set()
    for trained in (True, False):
        sizes = [aligned(parameter.nbytes) for parameter in parameters if parameter.requires_grad is trained]
        for start in range(len(sizes)):
            # Longer runs are of no use: chunks end at the largest size.
            found |= set(
                itertools.takewhile(lambda size: size <= LARGEST_CHUNK_BYTES, itertools.accumulate(sizes[start:]))
            )
    return found
