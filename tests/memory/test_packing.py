"""Packing: nothing lost, in order, never over the size, trained and frozen apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.memory.layout_types import GroupSpec
from lowtide.memory.packing import aligned, next_fit
from tests.memory.small_layouts import group, random_groups


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
