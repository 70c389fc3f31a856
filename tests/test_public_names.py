"""The public face: what `lowtide` exports is what it says, and does not change by accident."""

from __future__ import annotations

import inspect
import types

import pytest

import lowtide
from lowtide import activations, optim

# Changing this list is changing the API: say so in the commit.
PUBLIC = (
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
)


def test_exports_are_the_pinned_ones() -> None:
    assert sorted(lowtide.__all__) == sorted(PUBLIC)


def test_nothing_public_is_missing_from_all() -> None:
    # Submodules become attributes as soon as anything imports them, and are reached by their own path.
    visible = {name for name, value in vars(lowtide).items() if not isinstance(value, types.ModuleType)}
    public = {name for name in visible if not name.startswith("_")} - {"annotations"}
    assert public <= set(lowtide.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_export_exists_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(lowtide, name)), f"lowtide.{name} needs a docstring"


@pytest.mark.parametrize("namespace", [activations, optim])
def test_every_name_of_a_namespace_exists(namespace: types.ModuleType) -> None:
    # Some are imported when they are first asked for.
    assert [name for name in namespace.__all__ if not hasattr(namespace, name)] == []
    assert not hasattr(namespace, "nothing")
