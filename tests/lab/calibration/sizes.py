"""Sizes at which a calibration takes seconds on any processor, in types that each of them has."""

from __future__ import annotations

from lowtide.lab.calibration.kernels import Sizes
from lowtide.models.llama import LlamaConfig

_MODEL = LlamaConfig(
    vocab_size=64, context_length=32, num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=2
)
TINY = Sizes(
    dtypes=("float32",),
    squares=(64, 128),
    num_tokens=64,
    hidden_size=64,
    inner_size=96,
    lengths=(16, 64),
    head_size=16,
    memory_bytes=1 << 20,
    copy_bytes=1 << 20,
    num_updated=1 << 14,
    large=_MODEL,
    large_batch=(2, 32),
    small=_MODEL,
    small_batch=(1, 8),
    model_dtype="float32",
    num_steps=3,
    least_s=0.002,
    num_repeats=3,
)
