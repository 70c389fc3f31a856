"""The search for the chunk size that wastes least."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from lowtide.memory.layout_types import GroupSpec, ParameterSpec
from lowtide.memory.packing import aligned, next_fit
from lowtide.units import KiB, MiB

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
