"""Layout: chunks of groups, packing that loses nothing, and the chunk size with the least waste."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.memory import chunk as layout
from lowtide.memory.chunk import (
    ALIGNMENT_BYTES,
    CHUNK_OVERHEAD_BYTES,
    MOST_CANDIDATES,
    GroupSpec,
    Layout,
    aligned,
    chunk_candidates,
    fingerprint,
    lay_out,
    next_fit,
    search_chunk_bytes,
    waste_bytes,
)
from lowtide.memory.groups import find_groups
from lowtide.units import KiB, MiB
from tests.memory.small_layouts import group, random_groups, random_layouts
from tests.zoo import ZOO


@given(random_layouts())
def test_chunks_hold_every_parameter_once_without_overlap(layout: Layout) -> None:
    for spec in layout.groups:
        spans = [span for chunk in layout.chunks_of(spec.name) for span in chunk.spans]
        assert sorted(span.parameter.name for span in spans) == sorted(p.name for p in spec.parameters)
    for chunk in layout.chunks:
        end = 0
        for span in chunk.spans:
            assert span.offset_bytes >= end
            assert span.offset_bytes % ALIGNMENT_BYTES == 0
            end = span.offset_bytes + span.parameter.nbytes
        assert end <= chunk.nbytes < end + ALIGNMENT_BYTES
        assert chunk.nbytes <= layout.chunk_bytes or len(chunk.spans) == 1
        assert len({span.parameter.requires_grad for span in chunk.spans}) == 1


@given(random_layouts())
def test_chunks_stand_in_the_order_of_their_groups(layout: Layout) -> None:
    assert [chunk for spec in layout.groups for chunk in layout.chunks_of(spec.name)] == list(layout.chunks)
    assert len({chunk.name for chunk in layout.chunks}) == len(layout.chunks)


def test_chunks_are_numbered_by_group() -> None:
    made = lay_out([group("a", [512, 512, 512]), group("", [100])], chunk_bytes=1000)
    assert made.chunk_bytes == 1024
    assert [(chunk.name, chunk.nbytes) for chunk in made.chunks] == [("a/0", 1024), ("a/1", 512), ("/0", 512)]


def test_a_size_that_is_none() -> None:
    with pytest.raises(ConfigError, match="chunk_bytes is 0; give at least 512"):
        lay_out([], chunk_bytes=0)


def test_the_padding_of_a_real_model_is_small() -> None:
    groups = find_groups(ZOO["gpt"].build(False, torch.bfloat16))
    made = lay_out(groups)
    parameters = sum(len(spec.parameters) for spec in groups)
    total = sum(spec.nbytes for spec in groups)
    assert total <= sum(chunk.nbytes for chunk in made.chunks) < total + ALIGNMENT_BYTES * parameters


BASE = group("a", [1000, 500])


@pytest.mark.parametrize(
    "changed",
    [
        group("b", [1000, 500]),
        group("a", [1000, 501]),
        group("a", [1000, 500], modules=("a", "head")),
        group("a", [1000, 500], frozen=(1,)),
        group("a", [1000]),
        replace(BASE, parameters=BASE.parameters[::-1]),
        replace(BASE, parameters=(replace(BASE.parameters[0], dtype=torch.int8), BASE.parameters[1])),
        replace(BASE, parameters=(replace(BASE.parameters[0], shape=(10, 100)), BASE.parameters[1])),
        replace(BASE, parameters=(replace(BASE.parameters[0], name="a.x"), BASE.parameters[1])),
    ],
    ids=["name", "size", "tie", "frozen", "fewer", "order", "dtype", "shape", "parameter"],
)
def test_the_fingerprint_changes_with_the_model(changed: GroupSpec) -> None:
    assert fingerprint([changed]) != fingerprint([BASE])


def test_the_fingerprint_is_that_of_the_model_alone() -> None:
    assert lay_out([BASE]).fingerprint == lay_out([BASE], chunk_bytes=512).fingerprint == fingerprint([BASE])
    assert fingerprint([BASE]) == "d1736cdfd6b71513", "saved plans hold it"
    assert fingerprint([BASE, group("c", [1])]) != fingerprint([BASE])


def test_equal_models_have_equal_layouts() -> None:
    first, second = (lay_out(find_groups(ZOO["t5"].build(False, torch.float32))) for _ in range(2))
    assert dataclasses.asdict(first) == dataclasses.asdict(second)


def names(packed: GroupSpec, chunk_bytes: int) -> list[str]:
    return ["".join(p.name[-1] for p in chunk) for chunk in next_fit(packed.parameters, chunk_bytes)]


def test_a_chunk_is_filled_before_the_next_is_begun() -> None:
    assert names(group("g", [512, 512, 512, 512, 512]), 1024) == ["01", "23", "4"]


def test_sizes_count_with_their_padding() -> None:
    assert names(group("g", [1, 1, 1]), 1024) == ["01", "2"]


def test_a_parameter_beyond_the_size_is_alone() -> None:
    assert names(group("g", [512, 4096, 512, 512]), 1024) == ["0", "1", "23"]


def test_frozen_weights_between_adapters_fill_chunks_of_their_own() -> None:
    assert names(group("g", [512, 512, 512, 512], frozen=(0, 2)), 1024) == ["02", "13"]


@given(random_groups(), st.integers(1, 20))
def test_nothing_lost_nothing_too_full(groups: tuple[GroupSpec, ...], units: int) -> None:
    chunk_bytes = 512 * units
    for packed in groups:
        chunks = next_fit(packed.parameters, chunk_bytes)
        for trained in (True, False):
            kept = [p for chunk in chunks for p in chunk if p.requires_grad is trained]
            assert kept == [p for p in packed.parameters if p.requires_grad is trained]
        for chunk in chunks:
            assert len({p.requires_grad for p in chunk}) == 1
            assert len(chunk) == 1 or sum(aligned(p.nbytes) for p in chunk) <= chunk_bytes


def test_waste_is_padding_and_overhead() -> None:
    groups = [group("a", [1000, 500]), group("b", [100])]
    # a: 1024 + 512 in a buffer of 2048; b: 512 in another one.
    assert waste_bytes(groups, 2048) == (2048 - 1500) + (2048 - 100) + 2 * CHUNK_OVERHEAD_BYTES


def test_a_parameter_beyond_the_size_wastes_its_alignment_only() -> None:
    assert waste_bytes([group("a", [5000])], 1024) == 120 + CHUNK_OVERHEAD_BYTES


@settings(max_examples=30)
@given(random_groups(largest=30 * KiB, most=4))
def test_no_size_in_the_range_wastes_less(groups: tuple[GroupSpec, ...]) -> None:
    # The same search with limits a thousand times smaller, so that every multiple of 512 can be tried.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SMALLEST_CHUNK_BYTES", 4 * KiB)
        patch.setattr(layout, "LARGEST_CHUNK_BYTES", 64 * KiB)
        patch.setattr(layout, "CHUNK_OVERHEAD_BYTES", 1 * KiB)
        candidates = chunk_candidates(groups)
        every = range(candidates[0], candidates[-1] + 1, 512)
        best = min(waste_bytes(groups, size) for size in every)
        found = search_chunk_bytes(groups)
        assert waste_bytes(groups, found) == best
        assert found == max(size for size in candidates if waste_bytes(groups, size) == best)


def test_the_minimum_over_its_candidates_at_real_sizes() -> None:
    layer = [32 * MiB, 8 * MiB, 8 * MiB, 32 * MiB, 112 * MiB, 112 * MiB, 112 * MiB, 8 * KiB, 8 * KiB]
    groups = [group("embedding", [1002 * MiB]), *(group(f"layers.{index}", layer) for index in range(4))]
    sizes = chunk_candidates(groups)
    assert list(sizes) == [32 * MiB, 40 * MiB, 48 * MiB]
    found = search_chunk_bytes(groups)
    assert found == min(sizes, key=lambda size: waste_bytes(groups, size))
    # The four of the attention in two equal chunks; each of the three large ones by itself.
    assert found == 40 * MiB


def test_the_overhead_keeps_small_groups_whole() -> None:
    small = [group(f"layers.{index}", [5 * MiB] * 4) for index in range(10)]
    assert search_chunk_bytes(small) == 20 * MiB


def test_a_huge_parameter_does_not_set_the_size() -> None:
    assert search_chunk_bytes([group("a", [1024 * MiB]), group("b", [10 * MiB] * 3)]) == 30 * MiB


def test_a_tiny_model_has_chunks_of_its_groups() -> None:
    assert search_chunk_bytes([group("a", [1000, 1000]), group("b", [700])]) == 2048


def test_many_parameters_do_not_make_many_candidates() -> None:
    many = [group("experts", [MiB + 512 * index for index in range(300)])]
    sizes = chunk_candidates(many)
    assert len(sizes) == MOST_CANDIDATES
    assert list(sizes) == sorted(set(sizes))


def test_without_parameters_there_is_still_a_size() -> None:
    assert search_chunk_bytes([]) == 4 * MiB
