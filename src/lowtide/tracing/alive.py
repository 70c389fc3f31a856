"""What is alive at an instant, with equal tensors of equal layers counted together.

A model of 32 layers has 32 times the same activation at its peak. One by one they fill a screen and say nothing;
together they are the line that explains the peak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.tracing.step_trace import Allocation, Category, StepTrace

_NUMBERED_PART = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveGroup:
    """Allocations that differ only in the numbers of their module path."""

    category: Category
    module: str
    """With `*` for each number that differs: `layers.*.mlp`; as it is for a single allocation."""
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


def group_alike(allocations: Iterable[Allocation]) -> list[list[Allocation]]:
    """Sets of allocations that differ only in the numbers of their module path, in order of first appearance."""
    members: dict[tuple[object, ...], list[Allocation]] = {}
    for allocation in allocations:
        pattern = _NUMBERED_PART.sub("*", allocation.module)
        key = (allocation.category, pattern, allocation.op, allocation.source, allocation.shape, allocation.dtype)
        members.setdefault(key, []).append(allocation)
    return list(members.values())


def group_alive(trace: StepTrace, event: int) -> list[AliveGroup]:
    """All that is alive right after an event (-1: before the step), largest first; its bytes sum to the curve."""
    groups = [describe(alike) for alike in group_alike(trace.alive_at(event))]
    return sorted(groups, key=lambda group: (-group.bytes, group.module, group.op))


def largest_alive(trace: StepTrace, event: int, limit: int) -> list[Allocation]:
    """The largest single allocations alive right after an event, largest first."""
    return sorted(trace.alive_at(event), key=lambda allocation: -allocation.bytes)[:limit]


def describe(alike: list[Allocation]) -> AliveGroup:
    """One line for allocations that are alike, as `group_alike` gives them."""
    first = alike[0]
    return AliveGroup(
        category=first.category,
        module=_common_pattern([allocation.module for allocation in alike]),
        op=first.op,
        source=first.source,
        shape=first.shape,
        dtype=first.dtype,
        count=len(alike),
        bytes=sum(allocation.bytes for allocation in alike),
    )


def _common_pattern(modules: Iterable[str]) -> str:
    # Only the numbers that really differ become a star: experts.0 of every layer reads layers.*.experts.0.
    columns = zip(*(module.split(".") for module in modules), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
