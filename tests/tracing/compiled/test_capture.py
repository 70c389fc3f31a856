"""Blocks that are alike have one signature; a block's own number counts only where the block decides by it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lowtide.tracing.compiled.capture import signature_of


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class LooksItselfUp(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) if cache is None else super().forward(cache.update(x, self.number))


class Decides(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x.exp() if self.number == 4 else x)


class HandsOn(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(bend(x, self.number))


def bend(x: Tensor, number: int) -> Tensor:
    return x.exp() if number == 4 else x


@pytest.mark.parametrize(
    ("kind", "are_alike"), [(Layer, True), (LooksItselfUp, True), (Decides, False), (HandsOn, False)]
)
def test_own_numbers(kind: type[Layer], are_alike: bool) -> None:
    first, second = signature_of(kind(3)), signature_of(kind(4))
    assert first is not None
    assert second is not None
    assert (first == second) is are_alike


def test_one_in_evaluation_mode_is_different() -> None:
    first, second = signature_of(Layer(3)), signature_of(Layer(3).eval())
    assert first is not None
    assert second is not None
    assert first != second


def test_hooks_are_not_foreseen() -> None:
    layer = Layer(3)
    layer.linear.register_forward_hook(lambda *_: None)
    assert signature_of(layer) is None
