"""Lowtide: train PyTorch models inside the memory you have."""

from __future__ import annotations

import importlib
import typing

from lowtide import errors

if typing.TYPE_CHECKING:
    from lowtide.lab.calibration.calibrate import calibrate
    from lowtide.planning.budget_plans import StaticPartition, WarmUp
    from lowtide.planning.comparison import compare
    from lowtide.planning.hand_plan import make_plan
    from lowtide.planning.plan import Plan, Sharding
    from lowtide.runtime.checkpoints.export import export
    from lowtide.runtime.checkpoints.loading import LoadedCheckpoint, load, load_weights, newest_checkpoint
    from lowtide.runtime.feasibility import largest_batch
    from lowtide.runtime.manage import manage
    from lowtide.runtime.parameters.deferred_weights import deferred_weights
    from lowtide.runtime.parameters.weight_file import empty_weights
    from lowtide.runtime.plan_problem import PlannedStep
    from lowtide.runtime.planner import plan, prepare
    from lowtide.runtime.prediction.trace import trace
    from lowtide.runtime.session import Session
    from lowtide.tracing.explanation.explain import explain
    from lowtide.tracing.leaks.find import find_leaks
    from lowtide.tracing.observation.monitor import MemoryMonitor
    from lowtide.tracing.observation.observe import observe
    from lowtide.tracing.settings import StepSettings
    from lowtide.tracing.step_trace import StepTrace

_AT_FIRST_USE = {
    "calibrate": "lowtide.lab.calibration.calibrate",
    "compare": "lowtide.planning.comparison",
    "deferred_weights": "lowtide.runtime.parameters.deferred_weights",
    "empty_weights": "lowtide.runtime.parameters.weight_file",
    "export": "lowtide.runtime.checkpoints.export",
    "explain": "lowtide.tracing.explanation.explain",
    "find_leaks": "lowtide.tracing.leaks.find",
    "largest_batch": "lowtide.runtime.feasibility",
    "load": "lowtide.runtime.checkpoints.loading",
    "load_weights": "lowtide.runtime.checkpoints.loading",
    "LoadedCheckpoint": "lowtide.runtime.checkpoints.loading",
    "make_plan": "lowtide.planning.hand_plan",
    "manage": "lowtide.runtime.manage",
    "MemoryMonitor": "lowtide.tracing.observation.monitor",
    "newest_checkpoint": "lowtide.runtime.checkpoints.loading",
    "observe": "lowtide.tracing.observation.observe",
    "Plan": "lowtide.planning.plan",
    "plan": "lowtide.runtime.planner",
    "PlannedStep": "lowtide.runtime.plan_problem",
    "prepare": "lowtide.runtime.planner",
    "Session": "lowtide.runtime.session",
    "Sharding": "lowtide.planning.plan",
    "StaticPartition": "lowtide.planning.budget_plans",
    "StepSettings": "lowtide.tracing.settings",
    "StepTrace": "lowtide.tracing.step_trace",
    "trace": "lowtide.runtime.prediction.trace",
    "WarmUp": "lowtide.planning.budget_plans",
}
"""Nothing is loaded that nobody uses, torch neither: a command starts its tracing subprocess before it loads the rest."""

__all__ = [
    "LoadedCheckpoint",
    "MemoryMonitor",
    "Plan",
    "PlannedStep",
    "Session",
    "Sharding",
    "StaticPartition",
    "StepSettings",
    "StepTrace",
    "WarmUp",
    "calibrate",
    "compare",
    "deferred_weights",
    "empty_weights",
    "errors",
    "explain",
    "export",
    "find_leaks",
    "largest_batch",
    "load",
    "load_weights",
    "make_plan",
    "manage",
    "newest_checkpoint",
    "observe",
    "plan",
    "prepare",
    "trace",
]


def __getattr__(name: str) -> object:
    """Load what `_AT_FIRST_USE` names."""
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_AT_FIRST_USE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_AT_FIRST_USE})
