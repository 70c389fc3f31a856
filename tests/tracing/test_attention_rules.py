"""What to change so that a call leaves the math backend: advice that the rules themselves confirm."""

from __future__ import annotations

import pytest
import torch

from lowtide.tracing.attention_rules import Backend, Call, call_of, choose, describe, refusals, ways_out

HOPPER, TURING = (9, 0), (7, 5)
BF16, F32 = torch.bfloat16, torch.float32


def call(
    dtype: torch.dtype = F32,
    heads: int = 16,
    key_heads: int | None = None,
    size: int = 64,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    gqa: bool = False,
    dims: int = 4,
) -> Call:
    query = torch.empty(2, heads, 128, size, dtype=dtype, device="meta")
    key = torch.empty(2, key_heads or heads, 128, size, dtype=dtype, device="meta")
    if dims == 3:
        query, key = query[0], key[0]
    return call_of(query, key, key, mask, dropout, enable_gqa=gqa)


@pytest.mark.parametrize(
    ("facts", "capability", "ways"),
    [
        (
            call(key_heads=4, gqa=True),
            HOPPER,
            (
                "in bfloat16 (autocast, or the model's own type) it runs on cudnn",
                "with key and value repeated to 16 heads it runs on efficient",
            ),
        ),
        (
            call(BF16, key_heads=1),
            HOPPER,
            ("with enable_gqa=True it runs on cudnn", "with key and value repeated to 16 heads it runs on cudnn"),
        ),
        (
            call(size=66),
            HOPPER,
            (
                "in bfloat16 (autocast, or the model's own type) it runs on flash",
                "with the head size 66 padded to 72 it runs on efficient",
            ),
        ),
        (call(BF16), TURING, ("in float16 (autocast, or the model's own type) it runs on efficient",)),
        (
            call(BF16, mask=torch.empty(2, 1, 128, 256, dtype=BF16, device="meta")[..., ::2], dropout=0.1),
            HOPPER,
            (
                "with query, key, value and mask made contiguous in their last dimension it runs on cudnn",
                "without attn_mask (is_causal=True where the mask says no more than that) it runs on cudnn",
            ),
        ),
        (call(BF16, dims=3), HOPPER, ("with a fourth dimension (unsqueeze(0)) it runs on cudnn",)),
        # Two things are wrong with it: neither change helps alone.
        (call(torch.float64, key_heads=4, dims=3), HOPPER, ()),
    ],
)
def test_ways_out_of_math(facts: Call, capability: tuple[int, int], ways: tuple[str, ...]) -> None:
    assert choose(facts, capability, (2, 11), frozenset(Backend)) is Backend.MATH
    assert ways_out(facts, capability, (2, 11)) == ways


def test_where_only_one_backend_is_allowed_the_others_are_the_way_out() -> None:
    facts = call(BF16, mask=torch.empty(2, 1, 128, 128, dtype=BF16, device="meta"))
    assert choose(facts, HOPPER, (2, 11), frozenset({Backend.FLASH, Backend.MATH})) is Backend.MATH
    assert ways_out(facts, HOPPER, (2, 11))[0] == "with all backends allowed it runs on cudnn"


def test_a_call_in_words() -> None:
    mask = torch.empty(2, 1, 128, 128, device="meta", requires_grad=True)
    assert describe(call(key_heads=4, mask=mask, dropout=0.1)) == (
        "query [2, 16, 128, 64] float32, 4 key heads, a mask [2, 1, 128, 128] that needs a gradient, dropout 0.1"
    )
    assert describe(call(BF16)) == "query [2, 16, 128, 64] bfloat16"


def test_each_better_backend_says_why_it_refuses() -> None:
    told = refusals(call(key_heads=4, gqa=True), HOPPER, Backend.MATH)
    assert [part.partition(" ")[0] for part in told.split("; ")] == ["cudnn", "flash", "efficient"]
    assert "half precision only, not float32" in told
    assert refusals(call(BF16), HOPPER, Backend.CUDNN) == ""
