from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lowtide.planning.halves import batch_size, half_of


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(6, 3), 6),
        ({"a": torch.zeros(4, 2), "b": torch.zeros(4)}, 4),
        ({"a": torch.zeros(4, 2), "positions": torch.zeros(1, 2)}, 4),
        ([torch.zeros(2), {"x": torch.zeros(2, 2)}], 2),
        ({"a": torch.zeros(1, 2), "b": torch.zeros(1)}, 1),
        ({"a": torch.zeros(4), "b": torch.zeros(6)}, None),
        ({"scale": torch.tensor(1.0), "name": "x"}, None),
    ],
)
def test_batch_size_is_what_the_tensors_share(batch: object, size: int | None) -> None:
    assert batch_size(batch) == size


def test_half_of_a_nested_batch() -> None:
    batch = {
        "ids": torch.arange(8).view(4, 2),
        "positions": torch.arange(2).view(1, 2),
        "scale": torch.tensor(2.0),
        "rest": [Pair(torch.arange(4), torch.ones(4)), "name", (torch.arange(4),)],
    }
    half = half_of(batch)
    assert half["ids"].tolist() == [[0, 1], [2, 3]]
    assert half["positions"].shape == (1, 2)
    assert half["scale"] == 2.0
    assert isinstance(half["rest"][0], Pair)
    assert half["rest"][0].inputs.tolist() == [0, 1]
    assert half["rest"][1:] == ["name", (half["rest"][2][0],)]


def test_a_half_does_not_bring_the_whole_along() -> None:
    half = half_of(torch.zeros(8, 16))
    assert half.untyped_storage().nbytes() == 4 * 16 * 4
