"""Torch's own records of memory: the profiler and the allocator's history."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class MemoryProfile:
    """A context that records every operator and every allocation of all threads that work for this one.

    `roots` holds the profiler's event trees afterwards. The profiler sits below Python: it holds no tensor and makes
    none, so autograd sums gradients in place as it would unwatched, which it does not under a dispatch mode.
    """

    def __init__(self) -> None:
        self.roots: list[Any] = []
        self._profile = torch.autograd.profiler.profile(use_kineto=True, record_shapes=True, profile_memory=True)

    def __enter__(self) -> MemoryProfile:
        self._profile.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._profile.__exit__(kind, error, traceback)
        if kind is None and self._profile.kineto_results is not None:
            self.roots = self._profile.kineto_results.experimental_event_tree()


def is_profiling() -> bool:
    """Whether a torch profiler watches this thread: torch has room for one."""
    return bool(torch._C._autograd._profiler_enabled())


def start_allocator_history(device: torch.device, max_entries: int) -> None:
    """Let the CUDA allocator note each request with its Python stack; what it noted before is dropped."""
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=max_entries, device=device, clear_history=True
    )


def stop_allocator_history(device: torch.device) -> None:
    """End what `start_allocator_history` began."""
    torch.cuda.memory._record_memory_history(None, device=device)


def allocator_history(device: torch.device) -> list[dict[str, Any]]:
    """What the CUDA allocator noted, oldest first.

    Each entry has `action`, `addr`, `size` (as requested) and, for an allocation, `frames`, the innermost first.
    """
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot(device)["device_traces"][device.index]
    return entries


def allocator_segments() -> list[dict[str, Any]]:
    """The CUDA allocator's segments, each with its `blocks` in order of address."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return segments
