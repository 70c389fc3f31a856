"""Parts: how a chunk is cut over ranks, as plain data.

Gathered, a chunk is cut into equal parts, one for each rank, wherever that cuts its parameters. One to all, it has one owner,
which keeps all of it: the other ranks' parts are empty. A piece is what a part has of one parameter; its elements are numbered
as they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lowtide.memory.chunk import ChunkSpec, ParameterSpec, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank has of one parameter."""

    span: Span
    """The piece in the rank's part. It has the parameter's own shape if it is all of it, and one dimension otherwise."""
    whole: ParameterSpec
    """The parameter."""
    begin: int
    """The first of its elements that the rank has."""
    end: int
    """Behind the last one."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.begin == 0 and self.end == math.prod(self.whole.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank keeps of a chunk: its bytes from `begin` to `end`."""

    rank: int
    begin: int
    end: int
    pieces: tuple[Piece, ...]
    """What it has of each parameter of which it has something, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the part, with padding."""
        return self.end - self.begin


def equal_parts(chunk: ChunkSpec, shards: int) -> tuple[Part, ...]:
    """The parts of a chunk that each of so many ranks keeps an equal share of; `lay_out` has padded it for that.

    Example:
        >>> import torch
        >>> weight = ParameterSpec(
        ...     name="weight", shape=(6, 64), stride=(64, 1), dtype=torch.float32, requires_grad=True, nbytes=1536
        ... )
        >>> spans = (Span(parameter=weight, offset_bytes=0),)
        >>> first, second = equal_parts(ChunkSpec(name="0/0", group="0", spans=spans, nbytes=2048), 2)
        >>> first.pieces[0].begin, first.pieces[0].end, second.pieces[0].begin, second.pieces[0].end
        (0, 256, 256, 384)
    """
    assert chunk.nbytes % shards == 0, f"chunk {chunk.name} of {chunk.nbytes} bytes has no {shards} equal parts"
    share = chunk.nbytes // shards
    return tuple(_part(chunk, rank, rank * share, (rank + 1) * share) for rank in range(shards))


def owned_parts(chunk: ChunkSpec, owner: int, shards: int) -> tuple[Part, ...]:
    """The parts of a chunk that one rank keeps whole."""
    return tuple(_part(chunk, rank, 0, chunk.nbytes if rank == owner else 0) for rank in range(shards))


def owners(chunks: Iterable[ChunkSpec], shards: int) -> dict[str, int]:
    """By chunk, the rank that owns it: the largest first, each to the rank that has least by then.

    Trained chunks and frozen ones are dealt out apart, because only the trained ones have optimizer state.

    Example:
        >>> chunks = [ChunkSpec(name=name, group="", spans=(), nbytes=size) for name, size in (("a", 1), ("b", 3), ("c", 2))]
        >>> owners(chunks, 2)
        {'b': 0, 'c': 1, 'a': 1}
    """
    found: dict[str, int] = {}
    kinds: dict[bool, list[ChunkSpec]] = {}
    for chunk in chunks:
        kinds.setdefault(any(span.parameter.requires_grad for span in chunk.spans), []).append(chunk)
    for _, alike in sorted(kinds.items(), reverse=True):
        held = [0] * shards
        for chunk in sorted(alike, key=lambda chunk: -chunk.nbytes):
            rank = held.index(min(held))
            found[chunk.name] = rank
            held[rank] += chunk.nbytes
    return found


def _part(chunk: ChunkSpec, rank: int, begin: int, end: int) -> Part:
    pieces: list[Piece] = []
    for span in chunk.spans:
        size = span.parameter.dtype.itemsize
        first = max(begin, span.offset_bytes)
        last = min(end, span.offset_bytes + span.parameter.nbytes)
        if first >= last:
            continue
        elements = (first - span.offset_bytes) // size, (last - span.offset_bytes) // size
        spec = span.parameter
        if last - first < spec.nbytes:
            spec = replace(spec, shape=(elements[1] - elements[0],), stride=(1,), nbytes=last - first)
        place = Span(parameter=spec, offset_bytes=first - begin)
        pieces.append(Piece(span=place, whole=span.parameter, begin=elements[0], end=elements[1]))
    return Part(rank=rank, begin=begin, end=end, pieces=tuple(pieces))
