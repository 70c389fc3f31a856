"""What to change so that a call leaves the math backend: advice that the rules themselves confirm."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend

from lowtide.tracing.attention.rules import HOST, AttentionCall, Backend, call_of, choose, describe, refusals, ways_out

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
) -> AttentionCall:
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
def test_ways_out_of_math(facts: AttentionCall, capability: tuple[int, int], ways: tuple[str, ...]) -> None:
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


MASKS = (None, (1, 12), (8, 12), (2, 1, 8, 12), (2, 4, 8, 12), (3, 12), (4, 8, 12))
SHAPES = (
    ((2, 4, 8, 16), (2, 4, 12, 16)),
    ((2, 4, 8, 16), (2, 2, 12, 16)),
    ((2, 4, 8, 16), (1, 4, 12, 16)),
    ((4, 8, 16), (4, 12, 16)),
    ((2, 4, 0, 16), (2, 4, 12, 16)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_host_takes_what_torch_takes_there(dtype: torch.dtype) -> None:
    """Each choice beside that of torch itself."""
    num_flash = 0
    for (query_shape, key_shape), mask_shape, dropout, gqa, value_size, is_strided in itertools.product(
        SHAPES, MASKS, (0.0, 0.1), (False, True), (16, 8), (False, True)
    ):
        query, key = torch.empty(query_shape, dtype=dtype), torch.empty(key_shape, dtype=dtype)
        value = torch.empty(*key_shape[:-1], value_size, dtype=dtype)
        if is_strided:
            key = key.transpose(-1, -2).contiguous().transpose(-1, -2)
        mask = None if mask_shape is None else torch.empty(mask_shape, dtype=dtype)
        facts = call_of(query, key, value, mask, dropout, enable_gqa=gqa)
        chosen = choose(facts, HOST, (2, 13), frozenset(Backend))
        truth = torch._fused_sdp_choice(query, key, value, mask, dropout, False, enable_gqa=gqa)
        assert (chosen is Backend.FLASH) == (truth == SDPBackend.FLASH_ATTENTION.value), facts
        num_flash += chosen is Backend.FLASH
    assert num_flash > 5


def test_the_host_says_why_it_falls_back() -> None:
    facts = call(dropout=0.1)
    assert choose(facts, HOST, (2, 13), frozenset(Backend)) is Backend.MATH
    assert refusals(facts, HOST, Backend.MATH) == "flash does not take it: it takes no dropout"
    assert ways_out(facts, HOST, (2, 13)) == ("with dropout_p=0 it runs on flash",)
