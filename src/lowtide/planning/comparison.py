"""`lowtide.compare`: a prediction beside what was observed, as memory of two traces or as time of a step's lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

from lowtide.errors import ConfigError
from lowtide.planning.simulator import SimulatedStep
from lowtide.planning.timeline import Lane, Timeline, lanes_that_work
from lowtide.tracing.explanation.compare import Comparison, compare_traces
from lowtide.tracing.step_trace import StepTrace

_FIRST_STEP = 1
"""The number of a session's first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifference:
    """Seconds a step, simulated and observed."""

    what: str
    simulated_s: float
    observed_s: float

    @property
    def error(self) -> float | None:
        """Relative to the observation; None where nothing was observed."""
        return (self.simulated_s - self.observed_s) / self.observed_s if self.observed_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineComparison:
    """A simulated step against the steps that a session recorded, on average.

    A session records the computation of the modules that it stands in: groups that stay on the device and are updated there
    are not among them, and their time is in the step's alone. Where the device waits for launches inside a module, that
    counts as computation there and not in the simulation. A session's first step, before which nothing was prefetched, is left
    out where there are others.
    """

    step: TimeDifference
    lanes: tuple[TimeDifference, ...]
    """How long each lane works."""
    waits: TimeDifference
    """How long the computation waits for copies and updates."""
    num_steps: int
    """That were observed."""
    is_emulated: bool
    """The observed device was a tier of host memory: its times say nothing about a GPU."""

    @property
    def rows(self) -> tuple[TimeDifference, ...]:
        """Those of a table: the step, the lanes, the waits."""
        return self.step, *self.lanes, self.waits


@overload
def compare(predicted: StepTrace, observed: StepTrace) -> Comparison: ...
@overload
def compare(predicted: SimulatedStep, observed: Timeline) -> TimelineComparison: ...
def compare(predicted: StepTrace | SimulatedStep, observed: StepTrace | Timeline) -> Comparison | TimelineComparison:
    """How far a prediction is from what was observed.

    Args:
        predicted: A trace, usually of `lowtide.trace`; or the simulated step of a plan, `lowtide.plan(...).simulated`.
        observed: A trace of the same step, usually of `lowtide.observe`; or what a session under the plan recorded,
            `session.timeline()`.

    Raises:
        ConfigError: One is a trace and the other is not, or the timeline has no step.

    Example:
        >>> import lowtide, torch
        >>> model, batch = torch.nn.Linear(64, 64), torch.ones(8, 64)
        >>> def loss(model, x):
        ...     return model(x).sum()
        >>> result = compare(lowtide.trace(model, batch, loss=loss), lowtide.observe(model, batch, loss=loss))
        >>> result.by_category[0].what, result.by_category[0].observed_bytes
        ('weights', 16640)
    """
    if isinstance(predicted, StepTrace) and isinstance(observed, StepTrace):
        return compare_traces(predicted, observed)
    if isinstance(predicted, SimulatedStep) and isinstance(observed, Timeline):
        return _compare_times(predicted, observed)
    raise ConfigError(
        f"a {type(predicted).__name__} cannot be compared with a {type(observed).__name__}; give two traces, or the simulated "
        "step of a plan and the timeline of a session",
        key="observed",
    )


def _compare_times(simulated: SimulatedStep, observed: Timeline) -> TimelineComparison:
    starts = observed.step_starts()
    if not starts:
        raise ConfigError(
            "the timeline holds no step; train one under the session before its timeline is compared", key="observed"
        )
    if len(starts) > 1 and starts[0][0] <= _FIRST_STEP:
        observed, starts = observed.last_steps(len(starts) - 1), starts[1:]
    num_steps = len(starts)
    compute_ends = [span.end_s for span in observed.spans if span.lane is Lane.COMPUTE]
    last_s = max(compute_ends, default=observed.end_s) - starts[-1][1]
    # From one start to the next is the step with all that the loop does; the last one's end is not known.
    step_s = (starts[-1][1] - starts[0][1]) / (num_steps - 1) if num_steps > 1 else last_s
    return TimelineComparison(
        step=TimeDifference(what="step", simulated_s=simulated.step_s, observed_s=step_s),
        lanes=tuple(
            TimeDifference(
                what=str(lane), simulated_s=simulated.busy_s[lane], observed_s=observed.busy_s(lane) / num_steps
            )
            for lane in lanes_that_work({lane for lane in simulated.busy_s if simulated.busy_s[lane]} | observed.lanes)
        ),
        waits=TimeDifference(
            what="waits of the computation",
            simulated_s=simulated.timeline.exposed_copy_s(),
            observed_s=observed.exposed_copy_s() / num_steps,
        ),
        num_steps=num_steps,
        is_emulated=observed.is_emulated,
    )
