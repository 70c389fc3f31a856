"""Predictions for the host, phase by phase against the bytes that a real step takes there, and placement on a card."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.hardware import find_hardware
from lowtide.models import resolve_model
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.observation.observe import observe
from lowtide.tracing.prediction.job import Contents, Job, pack
from lowtide.tracing.prediction.sandbox import Sandbox
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace

WIDTH, HEADS, LENGTH = 32, 4, 24


class Attention(nn.Module):
    """Projections around one call of torch's attention."""

    def __init__(self, key_heads: int = HEADS, *, has_mask: bool = False, dims: int = 4, **settings: Any) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, 3 * WIDTH)
        self.write = nn.Linear(WIDTH, 5)
        self.key_heads, self.has_mask, self.dims, self.settings = key_heads, has_mask, dims, settings

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, _ = inputs.shape
        query, key, value = self.read(inputs).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        key, value = key[:, : self.key_heads], value[:, : self.key_heads]
        if self.dims == 3:
            query, key, value = (part.flatten(0, 1) for part in (query, key, value))
        mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=inputs.device) if self.has_mask else None
        out = F.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=self.key_heads != HEADS, **self.settings
        )
        return self.write(out.reshape(batch, -1, WIDTH))


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs, inputs)


class Recurrent(nn.Module):
    def __init__(self, width: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.body = nn.LSTM(WIDTH, width, 2, batch_first=True, dropout=0.1, bidirectional=bidirectional)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)[0]


BF16, F32 = torch.bfloat16, torch.float32
STEPS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "attention": (Attention, F32),
    "attention in bf16": (Attention, BF16),
    "mask": (lambda: Attention(has_mask=True), F32),
    "grouped heads": (lambda: Attention(2, is_causal=True), BF16),
    "dropout": (lambda: Attention(dropout_p=0.1), F32),
    "dropout in bf16": (lambda: Attention(dropout_p=0.1, is_causal=True), BF16),
    "dropout, grouped heads": (lambda: Attention(2, dropout_p=0.1), F32),
    "three dimensions": (lambda: Attention(dims=3), F32),
    "nn.Transformer with dropout": (Translation, F32),
    "LSTM": (lambda: Recurrent(48, bidirectional=False), F32),
    "LSTM, both directions": (lambda: Recurrent(256, bidirectional=True), F32),
    "layer norm in bf16": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Softmax(-1)), BF16),
    "RMS norm": (lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8)), F32),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(LENGTH, 8, 3), nn.BatchNorm1d(8), nn.ReLU()), F32),
}


def squared(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


CAST = ("attention", "dropout, grouped heads", "nn.Transformer with dropout", "convolution")
"""Those that run under autocast as well."""


@pytest.mark.parametrize(
    ("name", "autocast"), [*((name, None) for name in STEPS), *((name, "bfloat16") for name in CAST)]
)
def test_a_prediction_for_the_host_is_what_a_step_takes_there(name: str, autocast: str | None) -> None:
    build, dtype = STEPS[name]
    model, inputs = build().to(dtype), torch.randn(4, LENGTH, WIDTH, dtype=dtype)
    predicted = trace(model, inputs, optimizer=torch.optim.AdamW, loss=squared, hardware="cpu", autocast=autocast)
    observed = observe(model, inputs, optimizer=torch.optim.AdamW, loss=squared, autocast=autocast)
    assert predicted.phase_peaks() == observed.phase_peaks()


@pytest.mark.parametrize(("name", "autocast"), [("gpt-tiny", None), ("llama-tiny", "bfloat16")])
def test_a_language_model_on_the_host_is_predicted_to_the_byte(name: str, autocast: str | None) -> None:
    source = resolve_model(name)
    model, batch = source.build(torch.float32).to_empty(device="cpu"), source.make_batch("2x64")
    predicted = trace(model, batch, optimizer=torch.optim.AdamW, hardware="cpu", autocast=autocast)
    observed = observe(model, batch, optimizer=torch.optim.AdamW, autocast=autocast)
    assert predicted.phase_peaks() == observed.phase_peaks()


def test_a_trace_for_the_host_leaves_those_for_cards_as_they_are() -> None:
    """Both run in one process, which puts the host's kernels in place and CUDA's again."""
    model, inputs = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), torch.randn(64, WIDTH)
    peaks = {}
    for number, hardware in enumerate(itertools.islice(itertools.cycle(("h200", "cpu")), 4)):
        step = trace(model, inputs, loss=squared, hardware=hardware, autocast="bfloat16")
        peaks.setdefault(hardware, set()).add(step.peak_bytes)
        names = {op.name for op in step.ops}
        assert ("aten.native_dropout" in names) == (hardware == "h200"), number
    assert {hardware: len(found) for hardware, found in peaks.items()} == {"h200": 1, "cpu": 1}


@pytest.mark.parametrize(("dtype", "is_flat"), [(torch.float32, True), (torch.float16, True), (torch.bfloat16, False)])
def test_a_cards_recurrent_weights_lie_in_one_buffer_except_in_bf16(dtype: torch.dtype, is_flat: bool) -> None:
    model = Recurrent(16, bidirectional=False).to(dtype)
    batch = torch.randn(3, LENGTH, WIDTH, dtype=dtype)
    result = trace(model, (batch,), loss=lambda model, batch: model(*batch).float().sum(), hardware="h200")
    sizes = [weight.numel() * weight.element_size() for weight in model.parameters()]
    weights = [each.requested_bytes for each in result.allocations if each.op.startswith("parameter")]
    assert sorted(weights) == ([sum(sizes)] if is_flat else sorted(sizes))
    # Torch copies weights that do not lie in one for each call.
    copies = [
        each for each in result.allocations if each.op == "aten._cudnn_rnn" and each.requested_bytes == sum(sizes)
    ]
    assert len(copies) == (0 if is_flat else 1)


@pytest.mark.parametrize(
    "activations", ["recompute/3", *(pytest.param(word, marks=pytest.mark.slow) for word in ("recompute", "offload"))]
)
def test_the_first_trace_of_a_process_is_that_of_any_later_one(activations: str) -> None:
    """What a backward runs again is numbered in its own thread, from 0 in a new process."""
    source = resolve_model("gpt-tiny")
    sandbox = Sandbox()

    def run() -> StepTrace:
        model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
        job = Job(
            name="model",
            payload=pack(Contents(model, batch, torch.optim.AdamW, None)),
            settings=StepSettings(activations=activations),
            hardware=find_hardware("h200"),
            torch_version=torch.__version__.split("+")[0],
            allocator=AllocatorSettings(),
        )
        return sandbox.run(job)

    try:
        assert run() == run()
    finally:
        sandbox.close()
