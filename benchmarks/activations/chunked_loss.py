"""One row: the head's loss, unchunked as Hugging Face computes it and chunked: peak and time of forward and backward.

python -m benchmarks.activations.chunked_loss '{"tokens": 16384, "features": 4096, "vocab": 128256}'

The peak is what the allocator held beyond hidden states, weight and their gradients. Warm-up
steps, in which kernels are compiled and workspaces taken, are not timed. Each way of computing is timed in turns with
the others, so that a change of clocks meets all of them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.suite import answer
from lowtide.activations.losses import chunks
from lowtide.activations.losses.chunked_loss import linear_cross_entropy
from lowtide.activations.losses.chunks import find_kernel

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def unchunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As `ForCausalLMLoss` of transformers: the model's logits, all of them in fp32, cross entropy."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float(), target)


def by_operators(hidden: Tensor, weight: Tensor, target: Tensor, **settings: Any) -> Tensor:
    """Chunked, without the fused kernel."""
    before = chunks.find_kernel
    chunks.find_kernel = lambda hidden, dtype: None
    try:
        return linear_cross_entropy(hidden, weight, target, **settings)
    finally:
        chunks.find_kernel = before


def ways(row: dict[str, Any], device: torch.device) -> dict[str, Loss]:
    """Name to loss."""
    chunks = row.get("chunk_tokens", [None])
    found: dict[str, Loss] = {"unchunked": unchunked}
    for chunk_tokens in chunks:
        label = "" if chunk_tokens is None else f" {chunk_tokens}"
        found["chunked" + label] = functools.partial(linear_cross_entropy, chunk_tokens=chunk_tokens)
    found["chunked, fp32 sums"] = functools.partial(linear_cross_entropy, accumulation="float32")
    if find_kernel(torch.empty(0, device=device), torch.bfloat16) is not None:
        found["chunked, operators"] = by_operators
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = functools.partial(linear_cross_entropy, implementation="torch")
    return found


def run(row: dict[str, Any]) -> dict[str, Any]:
    """Measure every way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
    dtype = getattr(torch, row.get("dtype", "bfloat16"))
    tokens, features, vocab = row["tokens"], row["features"], row["vocab"]
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, features, generator=generator, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, features, generator=generator, device=device) / features**0.5).to(dtype)
    weight.requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=generator, device=device)

    def step(loss: Loss) -> float:
        hidden.grad = weight.grad = None
        value = loss(hidden, weight, target)
        value.backward()
        return float(value.item())

    results: dict[str, dict[str, Any]] = {}
    losses = ways(row, device)
    reference: tuple[Tensor, Tensor] | None = None
    for name, loss in losses.items():
        record: dict[str, Any] = {"step_s": []}
        for _ in range(row.get("warm_up", 2)):
            record["loss"] = step(loss)
        hidden.grad = weight.grad = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        step(loss)
        if device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
        assert hidden.grad is not None
        assert weight.grad is not None
        if reference is None:
            reference = (hidden.grad, weight.grad)
        for key, found, plain in zip(("hidden", "weight"), (hidden.grad, weight.grad), reference, strict=True):
            norm = torch.linalg.vector_norm(plain, dtype=torch.float32)
            record[f"difference_{key}"] = float(torch.linalg.vector_norm(found - plain, dtype=torch.float32) / norm)
        results[name] = record
    del reference
    for _ in range(row.get("steps", 8)):
        for name, loss in losses.items():
            begun = time.perf_counter()
            step(loss)
            results[name]["step_s"].append(time.perf_counter() - begun)
    plain = results["unchunked"]
    for record in results.values():
        record["median_s"] = statistics.median(record["step_s"])
        record["time_ratio"] = record["median_s"] / statistics.median(plain["step_s"])
        if "peak_bytes" in record:
            record["peak_share"] = record["peak_bytes"] / plain["peak_bytes"]
    return {
        **row,
        "dtype": str(dtype).removeprefix("torch."),
        "unit": "bytes and seconds, forward and backward of the head's loss",
        "median_s": results["chunked"]["median_s"],
        "results": results,
    }


if __name__ == "__main__":
    answer(run)
