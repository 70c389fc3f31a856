from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.errors import ValueReadError
from lowtide.models.source import build_on_meta, finish


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        self.linear = nn.Linear(4, 4)
        self.register_buffer("grid", torch.linspace(0, 1, 5))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def test_linspace_has_values_and_nothing_else_is_real() -> None:
    model = finish(build_on_meta(StochasticDepth, name="model"), None, name="model")
    assert model.rates == pytest.approx([0.0, 0.1, 0.2])
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert set(model.state_dict()) == {"linear.weight", "linear.bias", "grid", "counts"}


def test_dtype_changes_floats_only_and_keeps_ties() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), StochasticDepth())
        model[1].weight = model[0].weight
        return model.eval()

    model = finish(build_on_meta(make, name="model"), torch.bfloat16, name="model")
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.bfloat16
    assert model[2].counts.dtype == torch.int64
    assert model.training


def test_a_model_that_is_real_stays_so() -> None:
    model = finish(build_on_meta(lambda: nn.BatchNorm1d(3, device="cpu"), name="model"), None, name="model")
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}


def test_reading_a_value_is_named() -> None:
    with pytest.raises(ValueReadError, match="mine reads the values of tensors while it is built on the meta device"):
        build_on_meta(lambda: torch.ones(1).item(), name="mine")


def test_other_errors_are_left_alone() -> None:
    def fail() -> nn.Module:
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full") as caught:
        build_on_meta(fail, name="mine")
    assert not isinstance(caught.value, ValueReadError)


def test_device_and_linspace_are_as_before_afterwards() -> None:
    build_on_meta(StochasticDepth, name="model")
    assert torch.empty(1).device.type == "cpu"
    with torch.device("meta"):
        assert torch.linspace(0, 1, 2).device.type == "meta"
