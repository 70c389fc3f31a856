"""A chunked loss in a prediction: the way that it takes on a card, and what that one holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations.losses.settings import choose_chunk_tokens
from lowtide.errors import UnsupportedHeadError
from lowtide.tracing.ghost.chunked_loss import NOTE
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, StepTrace

transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY, WIDTH = 4096, 32000, 64


def predict(chunked: bool, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> StepTrace:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    ids = torch.zeros(2, TOKENS // 2, dtype=torch.int64)
    return lowtide.trace(
        model, {"input_ids": ids, "labels": ids}, settings=StepSettings(chunked_loss=chunked, **settings)
    )


def widest(trace: StepTrace) -> int:
    """Bytes of the largest tensor with a logit of each word, apart from weights and their gradients."""
    kinds = (Category.ACTIVATIONS, Category.TEMPORARIES)
    return max(a.requested_bytes for a in trace.allocations if a.category in kinds and a.shape[-1:] == (VOCABULARY,))


def test_one_chunk_of_logits_is_all_there_is() -> None:
    """The kernel for CUDA works in place: no copy in fp32 beside the logits."""
    whole, chunked = predict(False), predict(True)
    assert widest(whole) == TOKENS * VOCABULARY * 4
    chunk_tokens = choose_chunk_tokens(TOKENS, VOCABULARY, 2)
    assert chunk_tokens < TOKENS
    assert widest(chunked) == chunk_tokens * VOCABULARY * 2
    wide = [a for a in chunked.allocations if a.born is not None and a.requested_bytes >= widest(chunked)]
    assert len(wide) == 1
    assert NOTE in chunked.notes
    assert NOTE not in whole.notes


def test_under_autocast_the_gradient_is_summed_in_place() -> None:
    """Into the fp32 gradient of the weight itself: the host's way would widen each chunk's factors first."""
    chunked = predict(True, torch.float32, autocast="bfloat16")
    assert widest(chunked) == choose_chunk_tokens(TOKENS, VOCABULARY, 2) * VOCABULARY * 2


def test_together_with_a_policy() -> None:
    both, chunked = predict(True, activations="recompute"), predict(True)
    assert both.peak_bytes <= chunked.peak_bytes
    assert widest(both) == widest(chunked)


def test_a_model_without_such_a_head() -> None:
    with pytest.raises(UnsupportedHeadError, match="the head of Linear cannot be chunked"):
        lowtide.trace(nn.Linear(2, 2), torch.ones(1, 2), settings=StepSettings(chunked_loss=True))
