"""Chunked loss on a GPU: the Triton kernel and torch's operators against plain torch, and the memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.activations.losses import chunks
from lowtide.activations.losses.chunked_loss import linear_cross_entropy
from lowtide.activations.losses.chunks import find_kernel
from lowtide.units import MiB
from tests.activations.losses.test_chunked_loss import (
    FORMS,
    assert_close,
    error_against_fp64,
    inputs,
    plain_loss,
    results,
    scattered_loss,
)
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu


def on_gpu(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    moved = {
        key: value.detach().to("cuda", dtype if value.is_floating_point() else None) for key, value in tensors.items()
    }
    return {key: value.requires_grad_(tensors[key].requires_grad) for key, value in moved.items()}


def gpu_results(function: Any, tensors: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    with torch.device("cuda"):
        return results(function, tensors, **settings)


@pytest.fixture(params=["kernel", "operators"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same by the kernel and by torch's operators."""
    if request.param == "operators":
        monkeypatch.setattr(chunks, "find_kernel", lambda hidden, dtype: None)
    else:
        pytest.importorskip("triton")
        assert find_kernel(torch.empty(0, device="cuda"), torch.bfloat16) is not None
    return str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_same_as_plain(form: str, reduction: str) -> None:
    tensors = on_gpu(inputs(300, 64, 20011, bias=True))
    expected = gpu_results(plain_loss, tensors, reduction=reduction, **FORMS[form])
    found = gpu_results(linear_cross_entropy, tensors, reduction=reduction, chunk_tokens=128, **FORMS[form])
    assert_close(found, expected, relative=1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("accumulation", "factor"), [("float32", 1.01), ("weight", 1.1)])
@pytest.mark.parametrize("form", ["plain", "softcap"])
def test_bf16_is_as_exact_as_plain(form: str, accumulation: str, factor: float) -> None:
    narrow = on_gpu(inputs(2048, 256, 5000), torch.bfloat16)
    exact_inputs = on_gpu(narrow, torch.float64)
    exact = gpu_results(plain_loss, exact_inputs, **FORMS[form])
    plain = error_against_fp64(gpu_results(plain_loss, narrow, **FORMS[form]), exact)
    chunked = error_against_fp64(
        gpu_results(linear_cross_entropy, narrow, chunk_tokens=256, accumulation=accumulation, **FORMS[form]), exact
    )
    for key, error in plain.items():
        if key == "loss":
            assert chunked[key] < 1e-4, "errors of the tokens cancel in a mean: which way is less off is chance"
            continue
        allowed = factor if key == "gradient of weight" else 1.02
        assert chunked[key] <= allowed * error + 1e-6, (key, chunked[key], error)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tensors_that_are_not_contiguous(reduction: str) -> None:
    tensors = on_gpu(inputs(300, 64, 20011, bias=True))
    expected = gpu_results(plain_loss, tensors, reduction=reduction)
    found = gpu_results(scattered_loss, tensors, reduction=reduction, chunk_tokens=128)
    assert_close(found, expected, relative=1e-5)


@pytest.mark.usefixtures("path")
def test_fp16_and_autocast() -> None:
    tensors = on_gpu(inputs(2048, 64, 1000))
    expected = gpu_results(plain_loss, tensors)
    found = gpu_results(linear_cross_entropy, on_gpu(tensors, torch.float16), chunk_tokens=256)
    assert max(error_against_fp64(found, {key: value.double() for key, value in expected.items()}).values()) < 3e-3
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_close(gpu_results(linear_cross_entropy, tensors), gpu_results(plain_loss, tensors), relative=1e-2)


@pytest.mark.usefixtures("path")
def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tensors = on_gpu(inputs(300, 64, 20011, bias=True), torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gpu_results(linear_cross_entropy, tensors, chunk_tokens=64) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def test_nothing_waits_for_the_gpu() -> None:
    tensors = on_gpu(inputs(300, 64, 20011, bias=True), torch.bfloat16)
    linear_cross_entropy(**tensors).backward()
    with no_waiting():
        linear_cross_entropy(**tensors, chunk_tokens=64, z_loss=1e-4, label_smoothing=0.1).backward()


def peak_bytes(function: Any, tensors: dict[str, Tensor]) -> int:
    """The allocator's peak beyond inputs and their gradients."""
    for _ in range(2):
        for value in tensors.values():
            value.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(**tensors).backward()
    return torch.cuda.max_memory_allocated() - before - tensors["hidden"].nbytes - tensors["weight"].nbytes


def test_peak_is_a_twentieth() -> None:
    tensors = on_gpu(inputs(8192, 512, 64000), torch.bfloat16)
    plain, chunked = peak_bytes(plain_loss, tensors), peak_bytes(linear_cross_entropy, tensors)
    assert plain > 8192 * 64000 * 10
    assert chunked <= 0.05 * plain + 8 * MiB, (chunked / MiB, plain / MiB)
