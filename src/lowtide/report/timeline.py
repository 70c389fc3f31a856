"""The memory curve of a trace: where its phases lie, which of its points a screen can show, and the data of its chart.

A *position* is an index into `StepTrace.curve`: 0 is before the step, `i` is after event `i - 1`. A *run* is a stretch
of positions in one phase; with gradient accumulation a phase has several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np
import numpy.typing as npt

from lowtide.report.palette import STACK_ORDER
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import Phase, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRun:
    """One stretch of positions in one phase, both ends included."""

    phase: Phase
    first: int
    last: int


def phase_runs(trace: StepTrace) -> tuple[PhaseRun, ...]:
    """The runs of a trace in order; together they cover every position, the one before the step included."""
    runs: list[PhaseRun] = []
    last = 0
    for phase, events in groupby(event.phase for event in trace.events):
        first, last = last + 1 if runs else 0, last + len(list(events))
        runs.append(PhaseRun(phase=phase, first=first, last=last))
    return tuple(runs) or (PhaseRun(phase=Phase.FORWARD, first=0, last=0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A horizontal axis over positions that gives each phase room to be seen.

    The loss is a handful of the thousands of events of a step, and the peak is often in it; at true scale it would be a
    line. So a phase takes at least a small share of the width, inside which positions are evenly spaced.
    """

    positions: tuple[float, ...]
    """Edges of the runs, from 0 to the last position."""
    places: tuple[float, ...]
    """Where each edge lies, from 0 to the last position again; the same as `positions` where nothing was widened."""

    @property
    def widened(self) -> bool:
        """Whether some phase is drawn wider than its share of events."""
        return self.places != self.positions

    def place(self, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Places of some positions."""
        return np.asarray(np.interp(np.asarray(positions, dtype=np.float64), self.positions, self.places))


def phase_axis(trace: StepTrace, *, least_share: float = 0.1, most_runs: int = 8) -> Axis:
    """The axis of a trace, on which each run has at least `least_share` of the width.

    Beyond `most_runs` runs (accumulation over many batches) the axis is true to scale: widening many would distort all.
    """
    runs, end = phase_runs(trace), float(len(trace.events))
    edges = (0.0, *(run.first - 0.5 for run in runs[1:]), end)
    shares = np.diff(edges) / max(end, 1.0)
    short = shares < least_share
    if len(runs) > most_runs or not short.any() or short.all():
        return Axis(positions=edges, places=edges)
    room = 1.0 - least_share * int(short.sum())
    widths = np.where(short, least_share, shares * room / shares[~short].sum())
    places = (0.0, *(end * np.cumsum(widths)[:-1]).tolist(), end)
    return Axis(positions=edges, places=places)


def run_peak(trace: StepTrace, run: PhaseRun) -> int:
    """The first position of a run at which memory is highest."""
    return run.first + int(np.argmax(trace.curve[run.first : run.last + 1]))


def aligned_positions(trace: StepTrace, onto: StepTrace) -> npt.NDArray[np.float64]:
    """For each position of `trace`, the place on the axis of `onto` where the same part of the step happens.

    A prediction and an observation of one step have different numbers of events, so their indices say nothing about
    each other. What they share is the order of the phases: each run is stretched over the run of `onto` that is the
    same phase the same time round. A run that `onto` lacks collapses between its neighbours, where it stays visible as
    a vertical line.
    """
    theirs = _numbered(phase_runs(onto))
    from_edges, to_edges = [-0.5], [-0.5]
    for key, run in _numbered(phase_runs(trace)).items():
        match = theirs.get(key)
        # Edges must not run backwards, as they would where the two disagree on the order of the phases.
        if match is None or match.first - 0.5 < to_edges[-1]:
            continue
        from_edges += [run.first - 0.5, run.last + 0.5]
        to_edges += [match.first - 0.5, match.last + 0.5]
    end = len(onto.events)
    positions = np.arange(len(trace.events) + 1, dtype=np.float64)
    return np.clip(np.interp(positions, from_edges, to_edges), 0.0, float(end))


def _numbered(runs: tuple[PhaseRun, ...]) -> dict[tuple[Phase, int], PhaseRun]:
    seen: Counter[Phase] = Counter()
    numbered: dict[tuple[Phase, int], PhaseRun] = {}
    for run in runs:
        numbered[run.phase, seen[run.phase]] = run
        seen[run.phase] += 1
    return numbered


MAX_POINTS = 4000
"""More than the pixels of a wide screen; a few hundred kilobytes of page."""

_PER_BUCKET = 4  # first, lowest, highest, last


def kept_positions(trace: StepTrace, *, limit: int = MAX_POINTS) -> npt.NDArray[np.int64]:
    """Positions of the curve to draw, at most `limit`, in order; all of them when they are few enough.

    The curve is cut into buckets, and each keeps its first, lowest, highest and last position, so that a spike of
    one event survives. The start, the end and the ends and summit of each phase are kept besides, so that phase tables
    can be read off the picture. Values are never averaged: each kept point is a state that the step really went
    through.
    """
    curve = trace.curve
    if len(curve) <= limit:
        return np.arange(len(curve), dtype=np.int64)
    kept = {0, len(curve) - 1, trace.peak_event + 1}
    runs = phase_runs(trace)
    if 3 * len(runs) <= limit // 2:  # phases that alternate by the event would leave no room for the buckets
        kept.update(position for run in runs for position in (run.first, run_peak(trace, run), run.last))
    num_buckets = max(1, (limit - len(kept)) // _PER_BUCKET - 1)
    # Equal on the axis as it is drawn: a phase that is drawn wider gets the points to fill its width.
    axis = phase_axis(trace)
    edges = np.interp(np.linspace(0, len(trace.events), num_buckets + 1), axis.places, axis.positions).astype(np.int64)
    edges = np.unique([*edges.tolist(), 0, len(curve)])
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        bucket = curve[start:stop]
        kept.update((start, start + int(bucket.argmin()), start + int(bucket.argmax()), stop - 1))
    return np.array(sorted(kept), dtype=np.int64)


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
    # Rows in order of first sight, each kept once.
    instants: defaultdict[tuple[str, ...], int] = defaultdict(count().__next__)
    tensors: defaultdict[tuple[str, ...], int] = defaultdict(count().__next__)
    columns: dict[str, list[int]] = {"instant": [], "tensor": [], "category": [], "change": []}
    for position in positions.tolist():
        instant = instant_of(trace, position - 1)
        columns["instant"].append(instants[instant.op, instant.module, instant.source])
        if position == 0:
            tensor, category, change = ("", ""), STACK_ORDER[0], 0
        else:
            event = trace.events[position - 1]
            allocation = trace.allocations[event.allocation]
            tensor = (allocation.label, f"{list(allocation.shape)} {allocation.dtype}")
            category, change = allocation.category, -allocation.bytes if event.is_free else allocation.bytes
        columns["tensor"].append(tensors[tensor])
        columns["category"].append(STACK_ORDER.index(category))
        columns["change"].append(change)
    axis, peak = phase_axis(trace), instant_of(trace, trace.peak_event)
    return {
        "name": f"{trace.model} ({trace.origin})",
        "origin": trace.origin,
        "numEvents": len(trace.events),
        "capacity": trace.target.capacity_bytes,
        "context": trace.target.context_bytes,
        "categories": [category.value for category in STACK_ORDER],
        "runs": [[run.phase.value, run.first, run.last] for run in phase_runs(trace)],
        "axis": [axis.positions, axis.places],
        "peak": {
            "position": trace.peak_event + 1,
            "bytes": trace.peak_bytes,
            "phase": peak.phase.value if peak.phase else "",
            "place": peak.place,
            "source": peak.source,
        },
        "x": _differences(positions),
        "stack": [_differences(trace.stacked[category][positions]) for category in STACK_ORDER],
        "reserved": _differences(reserved[positions]),
        "instants": list(instants),
        "tensors": list(tensors),
        **columns,
        "observed": None if observed is None else _observed_line(observed, trace, max_points),
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
