"""Policies in a prediction: bytes that can be counted by hand, and the same step run for real on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.tracing.activation_setup import activations_applied
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from tests.tracing.gelu_blocks import INNER, WIDE, WIDER, WIDTH, Block, batch

NUM_BLOCKS = 9


class Stack(nn.Module):
    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def predicted(word: str | None) -> StepTrace:
    return lowtide.trace(Stack(), batch(), settings=StepSettings(activations=word))


def kept_bytes(trace: StepTrace) -> int:
    """Activations of the blocks when the forward has ended, without the batch and the loss."""
    last = max(index for index, event in enumerate(trace.events) if event.phase in (Phase.FORWARD, Phase.LOSS))
    alive = [item for item in trace.alive_at(last) if item.category is Category.ACTIVATIONS]
    return sum(item.requested_bytes for item in alive if item.module != "(batch)" and item.requested_bytes > 4)


# Of each block autograd saves its input, the input of gelu and its output; the first input is the batch, and the last
# output is saved by no one.
KEPT = {
    None: (NUM_BLOCKS - 1) * INNER + NUM_BLOCKS * 2 * WIDE,
    "keep": (NUM_BLOCKS - 1) * INNER + NUM_BLOCKS * 2 * WIDE,
    # Outputs of both matmuls; the last one too, which autograd alone would have let go.
    "selective": NUM_BLOCKS * (INNER + WIDE),
    "recompute": (NUM_BLOCKS - 1) * INNER,
    # Inputs of blocks 0 (the batch), 3 and 6.
    "recompute/3": 2 * INNER,
    # Blocks 0, 4 and 8.
    "recompute/4": 2 * INNER,
}


@pytest.mark.parametrize("word", KEPT)
def test_what_is_kept_until_the_backward(word: str | None) -> None:
    assert kept_bytes(predicted(word)) == KEPT[word]


@pytest.mark.parametrize("word", [word for word in KEPT if word])
def test_the_same_is_kept_in_a_real_step(word: str) -> None:
    model = Stack()
    observed = lowtide.observe(model, batch(), settings=StepSettings(activations=word), steps=2)
    assert kept_bytes(observed) == KEPT[word]
    # And the model has no policy any more.
    plain = lowtide.observe(model, batch(), steps=2)
    assert kept_bytes(plain) == KEPT[None]


@pytest.mark.parametrize("word", ["selective", "recompute", "recompute/3"])
def test_predicted_and_real_steps_peak_alike(word: str) -> None:
    """The same operators run on both: only workspaces and the random generator's state differ."""
    observed = lowtide.observe(Stack(), batch(), settings=StepSettings(activations=word), steps=2)
    guess = predicted(word)
    workspaces = sum(item.bytes for item in guess.alive_at(guess.peak_event) if item.category is Category.WORKSPACE)
    assert guess.peak_bytes - workspaces == pytest.approx(observed.peak_bytes, rel=0.01)


def test_segments_run_each_block_once_more() -> None:
    """Forward, then again for the inputs inside of a segment (not its last block), then for the backward itself."""
    counts = {
        word: sum(op.name == "aten.gelu" for op in predicted(word).ops) for word in ("keep", "recompute", "recompute/3")
    }
    assert counts == {"keep": NUM_BLOCKS, "recompute": 2 * NUM_BLOCKS, "recompute/3": 2 * NUM_BLOCKS + 6}


def test_a_policy_needs_blocks() -> None:
    with pytest.raises(ConfigError, match="Linear has no repeated blocks"):
        lowtide.trace(nn.Linear(2, 2), torch.ones(1, 2), settings=StepSettings(activations="recompute"))


def test_a_policy_is_taken_off_when_the_step_fails() -> None:
    model = Stack(2)
    with pytest.raises(ZeroDivisionError), activations_applied(model, StepSettings(activations="recompute")):
        raise ZeroDivisionError
    with activations_applied(model, StepSettings(activations="recompute")):
        pass  # it would be refused if the first one were still on


class TestOffload:
    """Inputs of 128 MiB, of which no byte exists here."""

    ROWS = 2**17
    INNER, WIDE = 4 * 2**17 * WIDTH, 4 * 2**17 * WIDER

    def predicted(self, word: str) -> StepTrace:
        with torch.device("meta"):
            model, x = Stack(), torch.randn(self.ROWS, WIDTH)
        return lowtide.trace(model, x, settings=StepSettings(activations=word))

    def test_two_inputs_wait_for_their_copies_and_the_others_are_gone(self) -> None:
        assert kept_bytes(self.predicted("recompute")) == (NUM_BLOCKS - 1) * self.INNER
        assert kept_bytes(self.predicted("offload")) == 2 * self.INNER

    def test_without_recomputation_two_tensors_wait(self) -> None:
        assert kept_bytes(self.predicted("offload/all")) == 2 * self.WIDE

    def test_in_the_backward_one_input_is_ahead_of_the_running_block(self) -> None:
        """Beside both lies the gradient between blocks, and nothing that grows with the number of blocks."""
        trace = self.predicted("offload")
        for block in (2, 4, 5):
            inside = [
                index
                for index, event in enumerate(trace.events)
                if event.phase is Phase.BACKWARD and trace.ops[event.op].module.startswith(f"blocks.{block}")
            ]
            highest = max(inside, key=lambda index: trace.events[index].allocated_bytes)
            alike = [item for item in trace.alive_at(highest) if item.requested_bytes == self.INNER]
            assert [item.phase for item in alike if item.module != "(batch)"] == [Phase.BACKWARD] * 3

    def test_no_copy_on_the_host_is_counted(self) -> None:
        """What goes and comes back is allocated once more on the card, and nothing else is."""
        plain, away = self.predicted("recompute"), self.predicted("offload")

        def births(trace: StepTrace) -> int:
            return sum(item.requested_bytes for item in trace.allocations if item.born is not None)

        # All inputs, the batch among them, but the last two, which are still there.
        assert births(away) - births(plain) == (NUM_BLOCKS - 2) * self.INNER

    def test_weights_do_not_travel(self) -> None:
        trace = self.predicted("offload/all")
        copied = [op for op in trace.ops if op.name == "aten.copy_" and op.phase is Phase.FORWARD]
        assert len(copied) == 3 * NUM_BLOCKS  # the input, and what goes in and out of gelu


class Buffered(nn.Module):
    """A block with a constant buffer, and statistics that move."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.norm(self.layer(x))) * self.mask
        return out


@pytest.mark.parametrize("word", ["selective", "recompute", "recompute/2", "offload", "offload/all"])
def test_blocks_with_buffers(word: str) -> None:
    model = nn.Sequential(*(Buffered() for _ in range(4)))

    def peak(word: str) -> int:
        trace = lowtide.trace(
            model, batch(), loss=lambda model, batch: model(batch).sum(), settings=StepSettings(activations=word)
        )
        return trace.peak_bytes

    if word == "offload/all":
        assert peak(word) == peak("keep")  # each tensor is below its 1 MiB
    else:
        assert peak(word) < peak("keep")
