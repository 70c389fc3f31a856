"""Parameters that are left alone: each kind with its reason."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lowtide.memory.groups import is_dense, unmanaged_parameters


class Marked(Tensor):
    """A tensor subclass."""


class MarkedParameter(nn.Parameter):
    """A subclass of Parameter, as quantisation libraries have them."""


def holding(parameter: Tensor) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", parameter)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (nn.Parameter(torch.zeros(2).as_subclass(Marked)), "it is a Marked, not a plain Parameter"),
        (MarkedParameter(torch.zeros(2)), "it is a MarkedParameter, not a plain Parameter"),
        (nn.UninitializedParameter(), "it has no shape yet"),
        (nn.Parameter(torch.eye(2).to_sparse()), "its layout is sparse_coo, not strided"),
        (nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False), "its dtype is bool"),
        (nn.Parameter(torch.zeros(0, 3)), "it has no elements"),
        (nn.Parameter(torch.zeros(1, 3).expand(2, 3)), "its elements overlap or have gaps"),
        (nn.Parameter(torch.zeros(4, 4)[:, :2]), r"gaps between them \(shape \(4, 2\), stride \(4, 1\)\)"),
    ],
)
def test_kinds_of_parameters(parameter: Tensor, reason: str) -> None:
    ((name, found),) = unmanaged_parameters(holding(parameter))
    assert name == "weight"
    assert re.search(reason, found)


@pytest.mark.parametrize(
    "parameter",
    [
        nn.Parameter(torch.zeros(2, 3)),
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(2, 3).t()),
        nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False),
        nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False),
        nn.Parameter(torch.zeros(2, device="meta")),
    ],
)
def test_plain_parameters_are_managed(parameter: Tensor) -> None:
    assert unmanaged_parameters(holding(parameter)) == ()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_by_their_settings(kind: type[nn.Embedding]) -> None:
    assert unmanaged_parameters(kind(4, 2)) == ()
    assert unmanaged_parameters(kind(4, 2, sparse=True)) == (("weight", "its gradient is sparse (sparse=True)"),)
    ((_, reason),) = unmanaged_parameters(kind(4, 2, max_norm=1.0))
    assert reason == "the forward rewrites it in place (max_norm=1.0)"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_over_the_same_bytes(device: str) -> None:
    flat = torch.zeros(12, device=device)
    model = nn.ParameterDict({"a": flat[:4], "b": flat[4:8], "c": flat[6:], "d": torch.zeros(4, device=device)})
    found = dict(unmanaged_parameters(model))
    assert sorted(found) == ["b", "c"]
    assert "shares its bytes with 'c'" in found["b"]
    assert "shares its bytes with 'b'" in found["c"]


def test_tied_parameters_are_no_overlap() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert unmanaged_parameters(model) == ()


@given(
    st.lists(st.integers(1, 4), max_size=3).flatmap(
        lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 8), min_size=len(shape), max_size=len(shape)))
    )
)
def test_dense_means_each_place_once(case: tuple[list[int], list[int]]) -> None:
    shape, stride = case
    places = [
        sum(index * step for index, step in zip(indices, stride, strict=True))
        for indices in itertools.product(*(range(size) for size in shape))
    ]
    assert is_dense(tuple(shape), tuple(stride)) == (sorted(places) == list(range(len(places))))
