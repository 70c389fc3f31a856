"""Where each phase lies on the memory curve, and how one trace's phases map onto another's.

A *position* is an index into `StepTrace.curve`: 0 is before the step, `i` is after event `i - 1`. A *run* is a stretch
of positions in one phase; with gradient accumulation a phase has several.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    first = 0
    for position, event in enumerate(trace.events, start=1):
        if position == 1 or event.phase is trace.events[position - 2].phase:
            continue
        runs.append(PhaseRun(phase=trace.events[position - 2].phase, first=first, last=position - 1))
        first = position
    phase = trace.events[-1].phase if trace.events else Phase.FORWARD
    return (*runs, PhaseRun(phase=phase, first=first, last=len(trace.events)))


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
