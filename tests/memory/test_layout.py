"""Layout: chunks cover the groups exactly, and the fingerprint tells models apart."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from lowtide.errors import ConfigError
from lowtide.memory.groups import find_groups
from lowtide.memory.layout import fingerprint, lay_out
from lowtide.memory.layout_types import ALIGNMENT_BYTES, GroupSpec, Layout
from tests.memory.small_layouts import group, random_layouts
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
        group("a", [1000, 500], windows=("a", "head")),
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
