"""The memory curve of a trace as the few columns of JSON that the page's timeline draws.

Everything is stored once: names through index tables, numbers as differences, which are short because most of them are
zero.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from lowtide.report.palette import STACK_ORDER
from lowtide.report.phase_runs import aligned_positions, phase_axis, phase_runs
from lowtide.report.sampling import MAX_POINTS, kept_positions
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import StepTrace

K = TypeVar("K", bound=Hashable)


def timeline_data(
    trace: StepTrace, *, observed: StepTrace | None = None, max_points: int = MAX_POINTS
) -> dict[str, object]:
    """What the script needs to draw one timeline, as plain data.

    Args:
        trace: The stack.
        observed: A second trace of the same step, drawn as a line over the stack and aligned to it by phase.
        max_points: Bound on the points of each curve; the peaks are among them.
    """
    positions = kept_positions(trace, limit=max_points)
    reserved = np.array([trace.start_reserved_bytes, *(event.reserved_bytes for event in trace.events)], dtype=np.int64)
    moments, tensors = _Table[tuple[str, str, str]](), _Table[tuple[str, str]]()
    columns: dict[str, list[int]] = {"moment": [], "tensor": [], "category": [], "change": []}
    for position in positions.tolist():
        moment = instant_of(trace, position - 1)
        columns["moment"].append(moments.index((moment.op, moment.module, moment.source)))
        if position == 0:
            tensor, category, change = ("", ""), STACK_ORDER[0], 0
        else:
            event = trace.events[position - 1]
            allocation = trace.allocations[event.allocation]
            tensor = (allocation.label, f"{list(allocation.shape)} {allocation.dtype}")
            category, change = allocation.category, -allocation.bytes if event.is_free else allocation.bytes
        columns["tensor"].append(tensors.index(tensor))
        columns["category"].append(STACK_ORDER.index(category))
        columns["change"].append(change)
    axis = phase_axis(trace)
    return {
        "name": f"{trace.model} ({trace.origin})",
        "origin": trace.origin,
        "numEvents": len(trace.events),
        "capacity": trace.target.capacity_bytes,
        "context": trace.target.context_bytes,
        "categories": [category.value for category in STACK_ORDER],
        "runs": [[run.phase.value, run.first, run.last] for run in phase_runs(trace)],
        "axis": [axis.positions, axis.places],
        "peak": _peak(trace),
        "x": _differences(positions),
        "stack": [_differences(trace.stacked[category][positions]) for category in STACK_ORDER],
        "reserved": _differences(reserved[positions]),
        "moments": moments.rows,
        "tensors": tensors.rows,
        **columns,
        "observed": None if observed is None else _observed_line(observed, trace, max_points),
    }


def _peak(trace: StepTrace) -> dict[str, object]:
    moment = instant_of(trace, trace.peak_event)
    return {
        "position": trace.peak_event + 1,
        "bytes": trace.peak_bytes,
        "phase": moment.phase.value if moment.phase else "",
        "place": moment.place,
        "source": moment.source,
    }


def _observed_line(observed: StepTrace, onto: StepTrace, max_points: int) -> dict[str, object]:
    positions = kept_positions(observed, limit=max_points)
    places = aligned_positions(observed, onto)
    return {
        "origin": observed.origin,
        # Two decimals are a hundredth of an event, far below a pixel at any zoom.
        "x": np.round(places[positions], 2).tolist(),
        "bytes": _differences(observed.curve[positions]),
        "peak": {"x": round(float(places[observed.peak_event + 1]), 2), "bytes": observed.peak_bytes},
    }


def _differences(values: npt.NDArray[np.int64]) -> list[int]:
    changes: list[int] = np.diff(values, prepend=0).tolist()
    return changes


class _Table(Generic[K]):
    """Rows in order of first sight, each kept once."""

    def __init__(self) -> None:
        self._index: dict[K, int] = {}

    def index(self, row: K) -> int:
        return self._index.setdefault(row, len(self._index))

    @property
    def rows(self) -> list[K]:
        return list(self._index)
