"""Fewer points for the same curve: what a screen can show, with every summit kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowtide.report.phase_runs import phase_axis, phase_runs, run_peak
from lowtide.tracing.step_trace import StepTrace

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
