"""The chunk size: the least waste, against every size there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lowtide.memory import chunk_search
from lowtide.memory.chunk_search import (
    CHUNK_OVERHEAD_BYTES,
    MOST_CANDIDATES,
    chunk_candidates,
    search_chunk_bytes,
    waste_bytes,
)
from lowtide.memory.layout_types import GroupSpec
from lowtide.units import KiB, MiB
from tests.memory.small_layouts import group, random_groups


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
        patch.setattr(chunk_search, "SMALLEST_CHUNK_BYTES", 4 * KiB)
        patch.setattr(chunk_search, "LARGEST_CHUNK_BYTES", 64 * KiB)
        patch.setattr(chunk_search, "CHUNK_OVERHEAD_BYTES", 1 * KiB)
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
