"""The time axis of a trace: when each op starts, and how long memory stays at each height of the curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.tracing.step_trace import StepTrace

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Estimated times of one step; ops run one after the other, as they do on one stream."""

    starts: Seconds
    """Start of each op, and the end of the step as last value: `len(ops) + 1` values."""
    is_timed: bool
    """False where the trace holds no times: then each op counts as one unit."""

    @property
    def total(self) -> float:
        """Length of the step."""
        return float(self.starts[-1])

    def wait(self, first: int, then: int) -> float:
        """From the end of one op to the start of a later one."""
        return float(max(self.starts[then] - self.starts[first + 1], 0.0))


def clock_of(trace: StepTrace) -> Clock:
    """The clock of a trace."""
    seconds = np.array([op.seconds for op in trace.ops], dtype=np.float64)
    is_timed = bool(seconds.sum() > 0)
    if not is_timed:
        seconds = np.ones(len(trace.ops), dtype=np.float64)
    return Clock(starts=np.concatenate([[0.0], np.cumsum(seconds)]), is_timed=is_timed)


def durations(trace: StepTrace, clock: Clock) -> Seconds:
    """How long the step stays at each value of `trace.curve`; the sum is the length of the step."""
    # An op holds what it allocates from its start on, and what it frees until its end.
    times = [clock.starts[event.op + 1 if event.is_free else max(event.op, 0)] for event in trace.events]
    # Scratch that is freed before the op's outputs are made would run backwards in time.
    ordered = np.maximum.accumulate(np.array([0.0, *times], dtype=np.float64))
    return np.diff(np.append(ordered, max(clock.total, ordered[-1])))
