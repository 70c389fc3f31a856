"""Lowtide: train PyTorch models inside the memory you have."""

from __future__ import annotations

from lowtide import errors
from lowtide.tracing.compare import compare
from lowtide.tracing.explain import explain
from lowtide.tracing.leaks import find_leaks
from lowtide.tracing.monitor import MemoryMonitor
from lowtide.tracing.observe import observe
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.trace import trace

__all__ = [
    "MemoryMonitor",
    "StepSettings",
    "StepTrace",
    "compare",
    "errors",
    "explain",
    "find_leaks",
    "observe",
    "trace",
]
