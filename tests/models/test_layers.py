"""The shared parts of the reference models: layers that can be recomputed, and the next-token loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide.models.layers import LayeredModel, LayerStack, next_token_loss


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_mean_over_next_tokens_that_count(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 5, 11).to(dtype)
    labels = torch.randint(11, (2, 5))
    labels[0, 2] = -100
    log_p = logits.float().log_softmax(-1)
    picked = [log_p[b, t, labels[b, t + 1]] for b in range(2) for t in range(4) if labels[b, t + 1] != -100]
    assert len(picked) == 7
    loss = next_token_loss(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -torch.stack(picked).mean())


def test_first_label_and_last_logits_do_not_matter() -> None:
    logits, labels = torch.randn(1, 4, 7), torch.randint(7, (1, 4))
    other_logits, other_labels = logits.clone(), labels.clone()
    other_logits[:, -1] += 5.0
    other_labels[:, 0] = (labels[:, 0] + 1) % 7
    torch.testing.assert_close(next_token_loss(logits, labels), next_token_loss(other_logits, other_labels))
