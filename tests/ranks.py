"""Runs a function of a test in several processes that are one group, as small as the tests need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.distributed.launch import run_on_ranks

SILENCE_S = 90.0


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any, silence_s: float = SILENCE_S) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank; each computes in one thread."""
    return run_on_ranks(_run, size, function, arguments, silence_s=silence_s)


def _run(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
    return function(rank, *arguments)
