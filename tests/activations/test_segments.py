"""Segments: few inputs are kept, each group runs at most three times, and nothing is assumed about the code between."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lowtide.activations import Policies, Recompute, apply
from lowtide.errors import SavedTensorChangedError
from tests.activations.measured import INPUT_BYTES, ROWS, WIDTH, Block, LiveBytes, Stack, assert_equal, gradients, stack

NUM_BLOCKS = 16


def kept_and_peak(policies: Policies | None) -> tuple[int, int, list[Tensor]]:
    """Bytes that live after the forward, the most that lived at once, and the gradients."""
    model, x = stack(NUM_BLOCKS), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    applied = None if policies is None else apply(model, policies)
    gradients(model, x)  # values of buffers are compared in the first run
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(5)
    with LiveBytes() as live:
        loss = model(x)
        kept_bytes = live.live_bytes
        loss.backward()
    if applied is not None:
        applied.remove()
    return (
        kept_bytes,
        live.peak_bytes,
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
    )


def test_kept_bytes_fall_to_the_square_root() -> None:
    plain_kept, plain_peak, expected = kept_and_peak(None)
    one_kept, one_peak, once = kept_and_peak(Recompute())
    root_kept, root_peak, twice = kept_and_peak(Recompute(segment=math.isqrt(NUM_BLOCKS)))
    assert_equal(expected, once)
    assert_equal(expected, twice)
    # The stack itself keeps the last output, for its square, and the loss; the checkpoint the state of the generator.
    slack_bytes = 2 * INPUT_BYTES
    assert NUM_BLOCKS * INPUT_BYTES <= one_kept <= NUM_BLOCKS * INPUT_BYTES + slack_bytes + NUM_BLOCKS * 6000
    assert root_kept <= 4 * INPUT_BYTES + slack_bytes + 2 * NUM_BLOCKS * 6000
    assert one_kept < plain_kept / 3
    # Sixteen inputs become four and those of one segment.
    assert root_peak < one_peak - (NUM_BLOCKS - 4 - 4 - 1) * INPUT_BYTES
    assert one_peak < plain_peak / 2


@pytest.mark.parametrize("segment", [1, 2, 3, 4, 5, 16, 40])
def test_each_group_runs_at_most_twice_more(segment: int) -> None:
    model, x = stack(NUM_BLOCKS), torch.randn(ROWS, WIDTH)
    expected = gradients(model, x)
    for block in model.blocks:
        block.num_runs = 0
    with apply(model, Recompute(segment=segment)) as applied:
        assert_equal(expected, gradients(model, x))
        stats = applied.stats()
    assert max(block.num_runs for block in model.blocks) == (2 if segment == 1 else 3)
    num_last = -(-NUM_BLOCKS // segment)
    assert stats.num_recomputed == NUM_BLOCKS
    assert stats.num_remade == NUM_BLOCKS - num_last
    assert sum(block.num_runs for block in model.blocks) == 3 * NUM_BLOCKS - num_last


class Crooked(nn.Module):
    """Between its blocks things happen that no segment could know of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(6))
        self.pairs = nn.ModuleList(Two() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        kept = x
        x = self.blocks[1](x).tanh()
        x = self.blocks[2](x)
        x += 1
        x = self.blocks[3](x)
        x = self.blocks[4](x.view(2, -1, 8)).transpose(0, 1)
        x = self.blocks[5](x).transpose(0, 1).reshape(-1, 8) + kept
        y: dict[str, Tensor] = {"a": x, "b": x * 2}
        for pair in self.pairs:
            y = pair(y, scale=torch.tensor(0.5))
        return (y["a"] * y["b"]).mean()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: dict[str, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
        return {"a": self.layer(given["b"]).relu(), "b": given["a"] * scale + given["b"]}


def test_inputs_that_are_no_outputs_are_saved() -> None:
    torch.manual_seed(0)
    model, x = Crooked(), torch.randn(4, 8)
    expected = gradients(model, x)
    with apply(model, Recompute(segment=3)) as applied:
        assert_equal(expected, gradients(model, x))
        assert applied.stats().num_remade > 0


def test_a_graph_can_be_run_backward_twice() -> None:
    model, x = stack(6), torch.randn(ROWS, WIDTH)
    torch.manual_seed(5)
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with apply(model, Recompute(segment=3)):
        torch.manual_seed(5)
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal(expected, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def test_an_input_that_was_written_to_is_refused() -> None:
    class Writing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.blocks[0](x)
            x.mul_(2)
            return self.blocks[1](y).mean() + x.sum()

    model = Writing(2)
    with apply(model, Recompute(segment=2)):
        loss = model(torch.randn(ROWS, WIDTH))
        with pytest.raises(SavedTensorChangedError, match=r"torch.float32 \(256, 64\).*written to in place"):
            loss.backward()
