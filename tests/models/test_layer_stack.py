from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.models.layer_stack import LayeredModel, LayerStack


class Scale(nn.Module):
    calls = 0

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        self.calls += 1
        return x * self.factor + offset


class Stacked(LayeredModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = LayerStack([Scale(2.0), Scale(3.0)])


def test_runs_in_order_with_context() -> None:
    stack = Stacked().layers
    assert stack(torch.tensor(1.0), torch.tensor(10.0)).item() == (1 * 2 + 10) * 3 + 10
    assert [name for name, _ in stack.named_parameters()] == ["0.factor", "1.factor"]


def test_each_layer_runs_twice_when_recomputed() -> None:
    model = Stacked()
    x, offset = torch.tensor(1.0, requires_grad=True), torch.tensor(10.0)
    model.gradient_checkpointing_enable()
    model.layers(x, offset).backward()
    assert [layer.calls for layer in model.layers] == [2, 2]
    assert x.grad is not None
    assert x.grad.item() == 6.0
    model.gradient_checkpointing_disable()
    model.layers(x, offset).backward()
    assert [layer.calls for layer in model.layers] == [3, 3]
