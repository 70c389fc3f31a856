"""How chunks are cut over ranks: nothing is lost, nothing is kept twice."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.memory.chunk import GroupSpec, ParameterSpec, lay_out
from lowtide.memory.parts import Part, equal_parts, owned_parts, owners

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    parameters = []
    for number in range(draw(st.integers(1, 6))):
        shape, dtype = draw(shapes), draw(dtypes)
        parameters.append(
            ParameterSpec(
                name=f"p{number}",
                shape=shape,
                stride=torch.empty(shape).stride(),
                dtype=dtype,
                requires_grad=draw(st.booleans()),
                nbytes=math.prod(shape) * dtype.itemsize,
            )
        )
    return GroupSpec(name="g", modules=("g",), parameters=tuple(parameters))


def check(parts: tuple[Part, ...], group: GroupSpec) -> None:
    held: dict[str, list[tuple[int, int]]] = {}
    for part in parts:
        for piece in part.pieces:
            held.setdefault(piece.whole.name, []).append((piece.begin, piece.end))
            size = piece.whole.dtype.itemsize
            assert piece.span.parameter.nbytes == (piece.end - piece.begin) * size
            assert math.prod(piece.span.parameter.shape) == piece.end - piece.begin
            assert 0 <= piece.span.offset_bytes <= part.nbytes - piece.span.parameter.nbytes
            assert piece.span.offset_bytes % size == 0
            if piece.is_whole:
                assert piece.span.parameter.shape == piece.whole.shape
    for parameter in group.parameters:
        if parameter.name not in held:
            continue
        found = sorted(held[parameter.name])
        assert found[0][0] == 0
        assert found[-1][1] == math.prod(parameter.shape)
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(found))


@given(group=groups(), shards=st.integers(2, 5), chunk_bytes=st.sampled_from([512, 4096, 1 << 20]))
def test_parts_cover_each_parameter_once(group: GroupSpec, shards: int, chunk_bytes: int) -> None:
    layout = lay_out([group], chunk_bytes=chunk_bytes, shards=shards)
    owner = owners(layout.chunks, shards)
    assert {span.parameter.name for chunk in layout.chunks for span in chunk.spans} == {
        p.name for p in group.parameters
    }
    for chunk in layout.chunks:
        assert len({span.parameter.dtype for span in chunk.spans}) == 1
        parts = equal_parts(chunk, shards)
        assert {part.nbytes for part in parts} == {chunk.nbytes // shards}
        assert all(part.begin % 512 == 0 for part in parts)
        check(parts, group)
        owned = owned_parts(chunk, owner[chunk.name], shards)
        assert [part.nbytes for part in owned if part.rank == owner[chunk.name]] == [chunk.nbytes]
        assert sum(part.nbytes for part in owned) == chunk.nbytes
        assert all(piece.is_whole for part in owned for piece in part.pieces)
        check(owned, group)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), shards=st.integers(2, 6))
def test_no_owner_has_more_than_a_chunk_beyond_its_share(sizes: list[int], shards: int) -> None:
    parameters = [
        ParameterSpec(name=str(n), shape=(size,), stride=(1,), dtype=torch.uint8, requires_grad=True, nbytes=size)
        for n, size in enumerate(sizes)
    ]
    chunks = lay_out([GroupSpec(name="g", modules=("g",), parameters=tuple(parameters))], chunk_bytes=512).chunks
    held = [0] * shards
    for name, rank in owners(chunks, shards).items():
        held[rank] += next(chunk.nbytes for chunk in chunks if chunk.name == name)
    assert max(held) - min(held) <= max(chunk.nbytes for chunk in chunks)
