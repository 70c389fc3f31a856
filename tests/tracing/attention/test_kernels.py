"""Which backend runs an attention call, as seen on an H200 (torch 2.11), and what the call allocates on ghosts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowtide.tracing.attention.rules import AttentionCall, Backend, choose, why_not
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

ALL = frozenset(Backend)
HOPPER, ADA, TURING = (9, 0), (8, 9), (7, 5)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def call(
    dtype: torch.dtype,
    query: tuple[int, int, int, int],
    *,
    key_heads: int | None = None,
    key_length: int | None = None,
    value_size: int | None = None,
    mask: tuple[int, ...] | None = None,
    mask_needs_grad: bool = False,
    mask_stride: int = 1,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> AttentionCall:
    batch, heads, length, size = query
    key = (batch, key_heads or heads, key_length or length, size)
    return AttentionCall(
        dtype=dtype,
        query=query,
        key=key,
        value=(*key[:3], value_size or size),
        last_strides=(1, 1, 1) if mask is None else (1, 1, 1, mask_stride),
        mask=mask,
        mask_needs_grad=mask_needs_grad,
        dropout=dropout,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        needs_grad=True,
    )


MEASURED = {
    "llama-bf16": (call(BF16, (4, 16, 1024, 64), key_heads=4, is_causal=True, enable_gqa=True), "cudnn"),
    "llama-fp32": (call(F32, (4, 16, 1024, 64), key_heads=4, is_causal=True, enable_gqa=True), "math"),
    "qwen3-bf16": (call(BF16, (2, 16, 1024, 128), key_heads=8, is_causal=True, enable_gqa=True), "cudnn"),
    "qwen3-fp32": (call(F32, (2, 16, 1024, 128), key_heads=8, is_causal=True, enable_gqa=True), "math"),
    "gpt2-fp32": (call(F32, (8, 12, 512, 64), dropout=0.1, is_causal=True), "efficient"),
    "gpt2-bf16": (call(BF16, (8, 12, 512, 64), dropout=0.1, is_causal=True), "cudnn"),
    "bert-fp32": (call(F32, (16, 12, 256, 64), mask=(16, 1, 256, 256), dropout=0.1), "efficient"),
    "bert-bf16": (call(BF16, (16, 12, 256, 64), mask=(16, 1, 256, 256), dropout=0.1), "cudnn"),
    "t5-bf16, cross attention": (call(BF16, (8, 8, 512, 64), mask=(1, 8, 512, 512), dropout=0.1), "cudnn"),
    "t5, bias that trains": (
        call(BF16, (8, 8, 512, 64), mask=(1, 8, 512, 512), mask_needs_grad=True, dropout=0.1),
        "efficient",
    ),
    "t5, bias as the lookup leaves it": (
        call(BF16, (8, 8, 512, 64), mask=(1, 8, 512, 512), mask_needs_grad=True, mask_stride=8, dropout=0.1),
        "math",
    ),
    "vit-bf16": (call(BF16, (64, 12, 197, 64)), "cudnn"),
    "vit-fp32": (call(F32, (64, 12, 197, 64)), "efficient"),
    "swin-bf16": (call(BF16, (128, 12, 49, 32), mask=(128, 12, 49, 49), mask_needs_grad=True), "efficient"),
    "swin-fp32": (call(F32, (128, 12, 49, 32), mask=(128, 12, 49, 49), mask_needs_grad=True), "efficient"),
    "segformer-fp32": (call(F32, (4, 1, 16384, 32), key_length=256), "efficient"),
    "falcon-bf16": (call(BF16, (4, 16, 512, 64), key_heads=1, is_causal=True), "math"),
    "mistral-bf16": (call(BF16, (2, 16, 2048, 64), mask=(2, 1, 2048, 2048)), "cudnn"),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_backend_the_card_used(name: str) -> None:
    facts, backend = MEASURED[name]
    assert choose(facts, HOPPER, (2, 11), ALL) == backend


SQUARE = (4, 16, 512, 64)


@pytest.mark.parametrize(
    ("facts", "capability", "version", "backend"),
    [
        # From torch's sdp_utils.cpp: cuDNN first on Hopper and Blackwell servers from 2.10 on, last but math elsewhere.
        (call(BF16, SQUARE), HOPPER, (2, 9), "flash"),
        (call(BF16, SQUARE), (10, 0), (2, 11), "cudnn"),
        (call(BF16, SQUARE), (12, 0), (2, 11), "flash"),
        (call(BF16, SQUARE), ADA, (2, 11), "flash"),
        (call(BF16, SQUARE, mask=(4, 1, 512, 512)), ADA, (2, 11), "efficient"),
        (call(BF16, SQUARE, key_heads=4, enable_gqa=True, mask=(4, 1, 512, 512)), ADA, (2, 11), "cudnn"),
        (call(F32, SQUARE), ADA, (2, 11), "efficient"),
        # Before Ampere there is no flash attention, and no bf16 in the efficient one.
        (call(F16, SQUARE), TURING, (2, 11), "efficient"),
        (call(BF16, SQUARE), TURING, (2, 11), "math"),
        # Head sizes: cuDNN up to 128, flash up to 256, the efficient one any multiple of 8 (4 in fp32).
        (call(BF16, (4, 16, 512, 256)), HOPPER, (2, 11), "flash"),
        (call(BF16, (4, 16, 512, 320)), HOPPER, (2, 11), "efficient"),
        (call(BF16, (4, 16, 512, 66)), HOPPER, (2, 11), "flash"),
        (call(F32, (4, 16, 512, 68)), HOPPER, (2, 11), "efficient"),
        (call(F32, (4, 16, 512, 66)), HOPPER, (2, 11), "math"),
        (call(BF16, (4, 16, 512, 256), dropout=0.1), (8, 6), (2, 11), "efficient"),
        (call(BF16, (4, 16, 512, 256), dropout=0.1), (8, 0), (2, 11), "flash"),
        (call(BF16, SQUARE, value_size=32), ADA, (2, 11), "efficient"),
        (call(torch.float64, SQUARE), HOPPER, (2, 11), "math"),
        (call(BF16, (4, 16, 512, 64), key_length=1), HOPPER, (2, 11), "flash"),
    ],
)
def test_the_rules(facts: AttentionCall, capability: tuple[int, int], version: tuple[int, int], backend: str) -> None:
    assert choose(facts, capability, version, ALL) == backend


def test_only_enabled_backends_are_chosen() -> None:
    facts = call(BF16, SQUARE)
    order = [Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    enabled = set(order)
    for backend in order:
        assert choose(facts, HOPPER, (2, 11), frozenset(enabled)) is backend
        enabled.remove(backend)


@pytest.mark.parametrize(
    ("backend", "facts", "reason"),
    [
        (Backend.FLASH, call(BF16, SQUARE, mask=(4, 1, 512, 512)), "no mask"),
        (Backend.CUDNN, call(BF16, (4, 16, 512, 256)), "256 is above 128"),
        (Backend.EFFICIENT, call(F32, SQUARE, key_heads=4, enable_gqa=True), "grouped"),
        (Backend.FLASH, call(F32, SQUARE), "half precision only, not float32"),
        (Backend.CUDNN, call(BF16, SQUARE, key_heads=4), "enable_gqa is off"),
        (Backend.MATH, call(torch.float64, SQUARE), None),
    ],
)
def test_the_reason_is_told(backend: Backend, facts: AttentionCall, reason: str | None) -> None:
    told = why_not(backend, facts, HOPPER)
    assert told is None if reason is None else told is not None and reason in told


BATCH, HEADS, LENGTH, SIZE = 2, 4, 128, 64


def attend(lab: Lab, dtype: torch.dtype, **options: object) -> tuple[list[tuple[str, int]], list[str]]:
    """Forward of one call: its allocations and the backends that ran."""
    query, key, value = (lab.ghost(BATCH, HEADS, LENGTH, SIZE, dtype=dtype, needs_grad=True) for _ in range(3))
    lab.mark()
    out = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    assert out.shape == query.shape
    assert out.dtype is dtype
    return lab.outputs, [str(backend) for backend in lab.machine.attention.choices.chosen]


class TestOnGhosts:
    def test_fused_attention_keeps_a_number_a_row_and_no_square(self, ghosts: GhostProcess) -> None:
        births, chosen = ghosts(lambda lab: attend(lab, torch.bfloat16, is_causal=True))
        rows = BATCH * HEADS * LENGTH
        assert chosen == ["cudnn"]
        assert sorted(nbytes for _, nbytes in births) == [8, 8, 4 * rows, 2 * rows * SIZE]

    def test_efficient_attention_pads_its_row_sums_to_32(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> list[int]:
            query = lab.ghost(1, 2, 33, 8, needs_grad=True)
            lab.mark()
            out = F.scaled_dot_product_attention(query, query, query)
            return [nbytes for _, nbytes in lab.births] if out is not None else []

        assert ghosts(step) == [4 * 2 * 33 * 8, 4 * 2 * 64]

    def test_the_composite_path_makes_the_square(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[list[int], list[str]]:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                births, chosen = attend(lab, torch.float32)
            return [nbytes for _, nbytes in births], chosen

        sizes, chosen = ghosts(step)
        square = 4 * BATCH * HEADS * LENGTH * LENGTH
        assert chosen == ["math"]
        assert sizes.count(square) == 2  # scores and weights

    def test_as_many_allocations_as_composite_attention_on_the_cpu(self, ghosts: GhostProcess) -> None:
        """The same operators as torch's own decomposition, fp32, without a mask."""
        from torch.profiler import ProfilerActivity, profile

        query = torch.randn(BATCH, HEADS, LENGTH, SIZE, requires_grad=True)
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            profile(activities=[ProfilerActivity.CPU]) as seen,
        ):
            F.scaled_dot_product_attention(query, query, query)
        wanted = ("aten::mul", "aten::bmm", "aten::_safe_softmax")
        real = sorted(event.name.removeprefix("aten::") for event in seen.events() if event.name in wanted)

        def step(lab: Lab) -> list[str]:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                attend(lab, torch.float32)
            return lab.calls

        ghostly = sorted(name.removeprefix("aten.") for name in ghosts(step) if name.replace(".", "::") in wanted)
        assert ghostly == real

    def test_the_gradient_of_a_bias_is_as_large_as_the_bias_seen_by_all(self, ghosts: GhostProcess) -> None:
        def step(lab: Lab) -> tuple[tuple[int, ...], list[str]]:
            query = lab.ghost(2, 4, 16, 8, dtype=torch.bfloat16, needs_grad=True)
            bias = lab.ghost(1, 4, 16, 16, dtype=torch.bfloat16, needs_grad=True)
            out = F.scaled_dot_product_attention(query, query, query, attn_mask=bias).sum()
            lab.recorder.begin_phase(lab.phase.BACKWARD)
            out.backward()
            return tuple(bias.grad.shape), [str(b) for b in lab.machine.attention.choices.chosen]

        assert ghosts(step) == ((1, 4, 16, 16), ["efficient"])

    def test_flash_on_another_card(self, ghosts: GhostProcess) -> None:
        births, chosen = ghosts(lambda lab: attend(lab, torch.bfloat16), hardware="rtx-4090")
        rows = BATCH * HEADS * LENGTH
        assert chosen == ["flash"]
        assert [nbytes for _, nbytes in births][:2] == [2 * rows * SIZE, 4 * rows]
