"""Groups and layouts made of sizes alone, by hand and at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from lowtide.memory.chunk import GroupSpec, Layout, ParameterSpec, lay_out


def parameter(name: str, nbytes: int, *, trained: bool = True) -> ParameterSpec:
    return ParameterSpec(
        name=name, shape=(nbytes,), stride=(1,), dtype=torch.uint8, requires_grad=trained, nbytes=nbytes
    )


def group(
    name: str, sizes: Sequence[int], *, modules: tuple[str, ...] | None = None, frozen: Sequence[int] = ()
) -> GroupSpec:
    """A group of parameters of these sizes; `frozen` holds the places of those that are not trained."""
    return GroupSpec(
        name=name,
        modules=(name,) if modules is None else modules,
        parameters=tuple(
            parameter(f"{name}.{place}", size, trained=place not in frozen) for place, size in enumerate(sizes)
        ),
    )


def layout(*groups: GroupSpec, chunk_bytes: int | None = None) -> Layout:
    return lay_out(groups, chunk_bytes=chunk_bytes)


@st.composite
def random_groups(draw: st.DrawFn, *, largest: int = 6000, most: int = 8) -> tuple[GroupSpec, ...]:
    """Groups of a made-up model: some parameters frozen, perhaps two modules tied, perhaps a rest."""
    sizes = st.lists(st.integers(1, largest), min_size=1, max_size=6)
    groups = []
    for index in range(draw(st.integers(1, most))):
        found = draw(sizes)
        frozen = draw(st.sets(st.integers(0, len(found) - 1)))
        groups.append(group(f"layers.{index}", found, frozen=tuple(frozen)))
    if draw(st.booleans()):
        modules = draw(st.sampled_from([("embedding", "head"), ("embedding", "layers.0"), ("", "head")]))
        groups.insert(0, group("embedding.weight", draw(sizes), modules=modules))
    if draw(st.booleans()):
        groups.append(group("", draw(sizes)))
    return tuple(groups)


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    return lay_out(draw(random_groups()), chunk_bytes=draw(st.sampled_from([512, 2048, 8192, None])))
