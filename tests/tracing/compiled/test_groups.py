"""Compile budgets in a prediction: bytes that can be counted by hand, and what code that was really compiled saves."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from lowtide.activations import CompileBudget, apply
from lowtide.errors import TraceError
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from tests.tracing.gelu_blocks import INNER, ROWS, WIDE, WIDER, WIDTH, Block, batch

NUM_BLOCKS = 4


class Normed(nn.Module):
    """What a compiler has much to fuse and to choose in; a number beside the tensor that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, *, power: float) -> tuple[Tensor, float]:
        inner = self.up(self.norm(x) * self.scale)
        return x + self.down(inner.sin().exp().tanh() * inner), power / 2


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        power = 8.0
        for block in self.blocks:
            if isinstance(block, Normed):
                x, power = block(x, power=power)
            else:
                x = block(x)
        return x.square().sum() * power


def predicted(model: nn.Module, share: float, **fields: object) -> StepTrace:
    settings = StepSettings(activations=f"compile-budget/{share}", **fields)  # type: ignore[arg-type]  # fields of it
    return lowtide.trace(model, batch(), settings=settings)


def kept_bytes(trace: StepTrace) -> int:
    """Activations of the blocks when the forward has ended; the loss keeps the last output."""
    last = max(index for index, event in enumerate(trace.events) if event.phase in (Phase.FORWARD, Phase.LOSS))
    alive = [item for item in trace.alive_at(last) if item.category is Category.ACTIVATIONS]
    return sum(item.requested_bytes for item in alive if item.module.startswith("blocks"))


# Each block's output is the input of the next, or of the loss.
KEPT = {1.0: INNER + 2 * WIDE, 0.5: INNER + WIDE, 0.0: INNER}


@pytest.mark.parametrize("share", KEPT)
def test_what_is_kept_until_the_backward(share: float) -> None:
    """Both of the wide tensors, then the first of them alone, from which the other is made again, then none."""
    assert kept_bytes(predicted(Stack(), share)) == NUM_BLOCKS * KEPT[share]


def really_saved_bytes(model: nn.Module, share: float) -> int:
    """What code that torch has compiled for the host saves for its backward, weights and batch left out."""
    x = batch()
    lasting = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), x)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with apply(model, CompileBudget(share=share)), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    total = sum(num_bytes for pointer, num_bytes in saved.items() if pointer not in lasting)
    loss.backward()
    return total


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("kind", [Block, Normed])
def test_compiled_blocks_save_what_was_predicted(kind: type[nn.Module], share: float) -> None:
    model = Stack(kind, 2)
    found = really_saved_bytes(model, share)
    assert kept_bytes(predicted(Stack(kind, 2), share)) == found > 0


def test_what_a_block_saves_is_let_go_in_its_own_backward() -> None:
    """Where the backward of the first block ends, nothing of any block is left but gradients."""
    trace = predicted(Stack(), 0.5)
    last = max(index for index, event in enumerate(trace.events) if event.phase is Phase.BACKWARD)
    left = {item.category for item in trace.alive_at(last) if item.module.startswith("blocks")}
    assert left == {Category.WEIGHTS, Category.GRADIENTS}
    gradients = [item for item in trace.alive_at(last) if item.category is Category.GRADIENTS]
    assert sum(item.requested_bytes for item in gradients) == NUM_BLOCKS * 2 * 4 * WIDTH * WIDER


def test_the_peak_as_arithmetic() -> None:
    """In the backward of the last block, which has remade what gelu returns for the gradient of its second weight.

    There are all weights, all inputs of blocks, the batch, the wide tensors that were saved, the gradient that has come in,
    and three wide ones: saved, remade or the gradient of it, beside one more that is being computed.
    """
    trace = predicted(Stack(), 0.5)
    weights = NUM_BLOCKS * 2 * 4 * WIDTH * WIDER
    workspaces = sum(item.bytes for item in trace.alive_at(trace.peak_event) if item.category is Category.WORKSPACE)
    inputs = NUM_BLOCKS * INNER  # the batch, and between blocks; the last output has been read by then
    fixed = weights + inputs + INNER + NUM_BLOCKS * WIDE
    assert trace.peak_phase is Phase.BACKWARD
    assert fixed + WIDE <= trace.peak_bytes - workspaces <= fixed + 2 * WIDE + 4 * WIDTH * WIDER + 2 * INNER


def test_values_do_not_matter() -> None:
    """Other weights and another batch: the very same trace."""
    torch.manual_seed(0)
    first = predicted(Stack(Normed), 0.5)
    torch.manual_seed(1)
    second = predicted(Stack(Normed), 0.5)
    for field in dataclasses.fields(first):
        assert getattr(first, field.name) == getattr(second, field.name), field.name


def test_the_trace_says_whose_partition_it_is() -> None:
    [note] = [note for note in predicted(Stack(), 0.5).notes if "compile budget" in note]
    assert f"partitioner of torch {torch.__version__.split('+')[0]} chooses;" in note
    other = lowtide.trace(
        Stack(), batch(), settings=StepSettings(activations="compile-budget/0.5"), torch_version="2.9.0"
    )
    assert any("chooses, not by 2.9.0's" in note for note in other.notes)


def test_operators_belong_to_their_block() -> None:
    trace = predicted(Stack(), 0.5)
    products = [op for op in trace.ops if op.name == "aten.mm"]
    # None is made again, and the batch needs no gradient.
    assert len(products) == NUM_BLOCKS * (2 + 4) - 1
    assert {op.module for op in products} == {f"blocks.{number}" for number in range(NUM_BLOCKS)}
    assert all(op.seconds > 0 for op in products)


def test_weights_without_gradients() -> None:
    model = Stack()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    trace = predicted(model, 0.5)
    gradients = [item for item in trace.allocations if item.category is Category.GRADIENTS]
    assert len(gradients) == NUM_BLOCKS


class Reads(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x * 2


class Passes(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Keeper:
    """Something that a block could put tensors into."""


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GivenBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, Keeper())
        return x.sum()


class GivenBlock(Block):
    def forward(self, x: Tensor, keeper: Keeper) -> Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Stack(Reads), r"Reads at blocks\.0 .* cannot be captured as one graph"),
        (Stack(Passes), "nothing|returns one of its arguments"),
        (Given(), "it is given a Keeper, which it may write to"),
    ],
    ids=["reads values", "returns its input", "is given an object"],
)
def test_what_cannot_be_captured_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        predicted(model, 0.5)
    assert "lowtide.observe" in str(caught.value)
    assert caught.value.module == "blocks.0"


def test_autocast_is_refused() -> None:
    with pytest.raises(TraceError, match=r"Block at blocks\.0 has a compile budget, and under autocast"):
        predicted(Stack(), 0.5, autocast="bfloat16")
    assert kept_bytes(predicted(Stack(), 0.5, precision="bfloat16")) == NUM_BLOCKS * KEPT[0.5] // 2


class TestAttention:
    def test_the_card_s_backend_is_taken(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            use_cache=False,
        )
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(4, 128, dtype=torch.int64)
        settings = StepSettings(activations="compile-budget/1")
        trace = lowtide.trace(model, {"input_ids": ids, "labels": ids}, settings=settings, hardware="h200")
        calls = [op for op in trace.ops if op.name == "aten._scaled_dot_product_cudnn_attention"]
        assert [op.module for op in calls if op.phase is Phase.FORWARD] == [f"model.layers.{n}" for n in range(3)]
        assert "attention runs on the cudnn backend" in trace.notes
        config.use_cache = True
        with pytest.raises(
            TraceError, match=r"DynamicCache, which it may write to; switch caches off \(use_cache=False\)"
        ):
            lowtide.trace(model, {"input_ids": ids, "labels": ids}, settings=settings)


def test_random_numbers_are_made_again() -> None:
    """Dropout's mask is saved as bytes, or made again from its seed."""

    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.1)

    kept = kept_bytes(predicted(Stack(Dropped), 0.5))
    assert NUM_BLOCKS * KEPT[0.0] < kept <= NUM_BLOCKS * (KEPT[0.5] + math.prod((ROWS, WIDTH)) + 8)
