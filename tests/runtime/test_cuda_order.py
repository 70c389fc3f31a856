"""On a GPU, where the loop runs ahead of the device: the host's updates begin while the backward still runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.planning.timeline import Lane, LaneSpan

NUM_BLOCKS, WIDTH, NUM_TOKENS = 8, 4096, 65536
"""A backward of some 60 ms, of which the loop has told the device long before."""


class Stack(nn.Module):
    """Blocks of one matrix each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


def third_step(device: str, width: int, num_tokens: int) -> list[LaneSpan]:
    """What the lanes did in the third step of four: the next forward has waited for its updates."""
    torch.manual_seed(0)
    model = Stack(width).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = lowtide.make_plan(model, weights="streamed", update="host", schedule="in_backward")
    with lowtide.manage(model, optimizer, plan, device=device, precision="bf16 exact") as session:
        for _ in range(4):
            model(torch.randn(num_tokens, width, dtype=torch.bfloat16, device=device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [span for span in session.timeline().spans if span.step == 3]


@pytest.mark.gpu
def test_updates_begin_with_the_first_gradient_that_arrives() -> None:
    spans = third_step("cuda", WIDTH, NUM_TOKENS)
    updates = sorted((span for span in spans if span.lane is Lane.HOST_UPDATE), key=lambda span: span.start_s)
    assert len(updates) == NUM_BLOCKS
    backward = [span for span in spans if span.lane is Lane.COMPUTE and span.phase == "backward"]
    # The last block's gradient comes first. Not sooner than that: other processes may be on the same machine.
    assert updates[0].name.startswith(f"blocks.{NUM_BLOCKS - 1}/")
    assert updates[0].start_s < max(span.end_s for span in backward)
