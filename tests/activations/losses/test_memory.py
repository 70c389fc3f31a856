"""What a chunked loss holds: live bytes, seen by a dispatch mode that follows every storage to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.activations.losses.chunked_loss import linear_cross_entropy
from lowtide.activations.losses.settings import LARGEST_CHUNK_TOKENS, choose_chunk_tokens
from lowtide.units import MiB
from tests.activations.losses.test_chunked_loss import plain_loss
from tests.zoo import bf16_safe


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that operators make, now and at most, beyond those that were there before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


def peak_bytes(function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> int:
    """The most that forward and backward hold beyond inputs and the gradients that stay."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    with LiveBytes(hidden, weight, target) as live:
        function(hidden, weight, target, **settings).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert live.now >= hidden.nbytes + weight.nbytes, "the gradients are seen"
    return live.peak - hidden.nbytes - weight.nbytes


def head(num_tokens: int, features: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(num_tokens, features, generator=generator).to(dtype),
        torch.randn(vocab_size, features, generator=generator).to(dtype),
        torch.randint(0, vocab_size, (num_tokens,), generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_is_one_chunk(dtype: torch.dtype) -> None:
    num_tokens, features, vocab_size, chunk_tokens = 1024, 8, 2000, 64
    tensors = head(num_tokens, features, vocab_size, dtype)
    with bf16_safe():
        plain = peak_bytes(plain_loss, *tensors)
        chunked = peak_bytes(linear_cross_entropy, *tensors, chunk_tokens=chunk_tokens)
    chunk_bytes = chunk_tokens * vocab_size * (dtype.itemsize + (4 if dtype != torch.float32 else 0))
    # Beside the scratch: targets, losses and the like for each token, and the gradients that a chunk writes.
    small_bytes = num_tokens * 64 + 4 * features * vocab_size
    assert chunk_bytes <= chunked <= chunk_bytes + small_bytes
    assert plain >= num_tokens * vocab_size * 8, "the reference holds the logits of all tokens, more than once"
    assert chunked <= plain / 20 + small_bytes


@pytest.mark.parametrize(("accumulation", "extra"), [("weight", 0), ("float32", 4)])
def test_accumulation_in_fp32_costs_four_bytes_a_weight(accumulation: str, extra: int) -> None:
    tensors = head(64, 512, 1000, torch.bfloat16)
    with bf16_safe():
        peak = peak_bytes(linear_cross_entropy, *tensors, chunk_tokens=8, accumulation=accumulation)
    weights = 512 * 1000
    assert abs(peak - extra * weights) < 0.4 * weights


def test_chosen_chunks() -> None:
    for num_tokens, vocab_size, bytes_per_logit in ((16384, 128256, 2), (16384, 128256, 6), (8192, 32000, 6)):
        chunk = choose_chunk_tokens(num_tokens, vocab_size, bytes_per_logit)
        assert chunk % 128 == 0
        # Unchunked: the logit, its fp32 copy, and the logarithm of its softmax.
        assert chunk * vocab_size * bytes_per_logit <= 0.05 * num_tokens * vocab_size * 10
    assert choose_chunk_tokens(1 << 20, 128256, 2) == LARGEST_CHUNK_TOKENS
    assert choose_chunk_tokens(512, 1000, 4) == 512, "small ones are not cut"
    assert choose_chunk_tokens(512, 10 * MiB, 4) == 51, "a tenth, however large"
    assert choose_chunk_tokens(5, 10 * MiB, 4) == 1
    assert choose_chunk_tokens(0, 1000, 4) == 1
