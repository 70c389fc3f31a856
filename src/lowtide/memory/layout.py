"""The layout of a model in memory, as plain data: parameters in groups, groups in chunks.

A group is what one module call needs at once. A chunk is a slice of a group's flat buffer, made of whole parameters: the
unit of placement, movement and update. Parameters that several groups' modules use (tied weights) form a group of
their own, which each of those modules opens beside its own: they are stored once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.units import KiB, MiB

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
    """Bytes of its elements, without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The parameters that are needed together."""

    name: str
    """The path of the module that opens it; of a tied group the path of its parameter; "" for the rest of the model."""
    modules: tuple[str, ...]
    """Paths of the modules whose call needs the group, "" for the whole model."""
    parameters: tuple[ParameterSpec, ...]
    """In the order of `named_parameters`."""
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
    """Group and number, such as `layers.3/0`."""
    group: str
    spans: tuple[Span, ...]
    nbytes: int
    """With padding, a multiple of 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All groups of a model and their chunks, in the order in which the model first uses them."""

    groups: tuple[GroupSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    """Those of one group stand together."""
    chunk_bytes: int
    """The chunk size that was searched for: no chunk is larger, unless one parameter alone is."""
    fingerprint: str
    """Changes when a name, shape, dtype, tie or grouping changes: a plan says for which layout it was made."""

    def chunks_of(self, group: str) -> tuple[ChunkSpec, ...]:
        """The chunks of one group, in order."""
        return tuple(chunk for chunk in self.chunks if chunk.group == group)


def lay_out(groups: Sequence[GroupSpec], *, chunk_bytes: int | None = None) -> Layout:
    """The chunks of groups, as `find_groups` gives them.

    Within a group the parameters are packed in order, each into the last chunk or, where that is full, into a new
    one. Trained parameters and frozen ones do not share a chunk: a frozen chunk has no gradient and is never updated.

    Args:
        groups: In the order of their first use.
        chunk_bytes: The most that a chunk of several parameters may hold, rounded up to 512. None: the size with the
            least waste, see `search_chunk_bytes`.

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
        chunks=tuple(chunk for group in groups for chunk in _chunks(group, chunk_bytes)),
        chunk_bytes=chunk_bytes,
        fingerprint=fingerprint(groups),
    )


def fingerprint(groups: Iterable[GroupSpec]) -> str:
    """Sixteen hexadecimal digits that change when a name, shape, dtype, tie, freeze or grouping changes."""
    facts = [[group.name, group.modules, [_facts(parameter) for parameter in group.parameters]] for group in groups]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _facts(parameter: ParameterSpec) -> list[object]:
    return [parameter.name, parameter.shape, str(parameter.dtype), parameter.requires_grad]


def _chunks(group: GroupSpec, chunk_bytes: int) -> list[ChunkSpec]:
    found = []
    for number, packed in enumerate(next_fit(group.parameters, chunk_bytes)):
        spans, offset = [], 0
        for parameter in packed:
            spans.append(Span(parameter=parameter, offset_bytes=offset))
            offset += aligned(parameter.nbytes)
        found.append(ChunkSpec(name=f"{group.name}/{number}", group=group.name, spans=tuple(spans), nbytes=offset))
    return found


def aligned(num_bytes: int) -> int:
    """The next multiple of 512.

    Example:
        >>> aligned(1), aligned(512), aligned(513)
        (512, 512, 1024)
    """
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def next_fit(parameters: Sequence[ParameterSpec], chunk_bytes: int) -> list[list[ParameterSpec]]:
    """Parameters in chunks of at most `chunk_bytes`, in order; one that is larger has a chunk to itself.

    Next fit, not first fit: parameters that are used one after the other stay together. The trained and the frozen ones
    are packed apart, each in their order, so that adapters between frozen weights do not break the chunks of both.
    """
    chunks: list[list[ParameterSpec]] = []
    last: dict[bool, list[ParameterSpec]] = {}
    filled: dict[bool, int] = {}
    for parameter in parameters:
        trained, size = parameter.requires_grad, aligned(parameter.nbytes)
        if trained not in last or filled[trained] + size > chunk_bytes:
            last[trained], filled[trained] = [], 0
            chunks.append(last[trained])
        last[trained].append(parameter)
        filled[trained] += size
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
