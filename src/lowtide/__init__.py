"""Lowtide: train PyTorch models inside the memory you have."""

from __future__ import annotations

from lowtide import errors
from lowtide.tracing.leaks import find_leaks
from lowtide.tracing.monitor import MemoryMonitor
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.trace import trace

__all__ = ["MemoryMonitor", "StepSettings", "StepTrace", "errors", "find_leaks", "trace"]
