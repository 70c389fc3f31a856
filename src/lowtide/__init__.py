"""Lowtide: train PyTorch models inside the memory you have."""

from __future__ import annotations

from lowtide import errors
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.plan import Plan
from lowtide.runtime.manage import manage
from lowtide.runtime.parameters.weight_file import empty_weights
from lowtide.runtime.session import Session
from lowtide.tracing.explanation.compare import compare
from lowtide.tracing.explanation.explain import explain
from lowtide.tracing.leaks.find import find_leaks
from lowtide.tracing.observation.monitor import MemoryMonitor
from lowtide.tracing.observation.observe import observe
from lowtide.tracing.prediction.trace import trace
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace

__all__ = [
    "MemoryMonitor",
    "Plan",
    "Session",
    "StaticPartition",
    "StepSettings",
    "StepTrace",
    "WarmUp",
    "compare",
    "empty_weights",
    "errors",
    "explain",
    "find_leaks",
    "make_plan",
    "manage",
    "observe",
    "trace",
]
