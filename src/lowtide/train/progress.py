"""How a run goes: its speed, what bounds its steps, how full the tiers are, and how long it will take."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.plain_text import Plain
from lowtide.runtime.session import Session
from lowtide.runtime.statistics.session_stats import SessionStats, TierRow

_LOOK_S = 2.0
"""Between two looks at a session's statistics, which wait for copies that are under way."""
_RECENT = 50
"""Steps whose speed is the present one."""
_FEW = 3
"""Steps that do not tell how long a run takes."""
_SHARE = 0.25
"""Of the time, from which on something other than computation bounds a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """One tier of memory."""

    name: str
    peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How far a run is."""

    words: str
    """What is being done: `training`, `evaluating`, `saving`."""
    step: int
    steps: int
    loss: float | None = None
    losses: tuple[float, ...] = ()
    """The recent ones, for a curve."""
    tokens_per_s: float | None = None
    step_s: float | None = None
    left_s: float | None = None
    """Seconds to the end at the present speed."""
    bound_by: str | None = None
    tiers: tuple[TierStatus, ...] = ()
    evaluation: tuple[int, float] | None = None
    """(step, loss) of the last one."""
    saved_step: int | None = None
    saved_at_s: float | None = None
    """When that was, by `time.monotonic`."""
    is_saving: bool = False


class Meter:
    """Measures a session's loop.

    Args:
        session: Asked now and then.
        tokens_per_step: Of all backward calls of an update.
        steps: Of the whole run.
        clock: In seconds.
    """

    def __init__(
        self, session: Session, tokens_per_step: int, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._tokens_per_step = tokens_per_step
        self._steps = steps
        self._clock = clock
        self.num_steps = 0
        """Of this start."""
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._step_s: deque[float] = deque(maxlen=_RECENT)
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)
        self._looked_at = -math.inf
        self._stats: SessionStats | None = None
        self._bound_by: str | None = None
        self._num_plans = 0

    def step_ended(self, step_s: float, loss: float, *, is_last: bool) -> None:
        """A step took so long, and had this loss."""
        self.num_steps += 1
        self._step_s.append(step_s)
        if math.isfinite(loss):
            self._losses.append(loss)
        self._ends.append(self._clock())
        if is_last or self.num_steps == 1 or self._clock() - self._looked_at >= _LOOK_S:
            self._look()

    def _look(self) -> None:
        before, self._stats = self._stats, self._session.stats()
        self._looked_at = self._clock()
        if before is not None:
            self._bound_by = bound_by(before, self._stats) or self._bound_by

    def row(self) -> dict[str, Plain]:
        """What the last step's row of the log has; peaks are the most of this start, as last looked at."""
        step_s = self._step_s[-1]
        row: dict[str, Plain] = {"tokens_per_s": round(self._tokens_per_step / step_s, 1), "step_s": round(step_s, 6)}
        return row | {f"{tier.name}_peak_bytes": tier.peak_bytes for tier in self._tiers()}

    def new_plans(self) -> list[str]:
        """Why the session has changed its plan since this was last asked."""
        plans = () if self._stats is None else self._stats.plans
        new, self._num_plans = plans[self._num_plans :], len(plans)
        return [row.reason for row in new]

    def status(
        self,
        words: str,
        *,
        step: int,
        evaluation: tuple[int, float] | None,
        saved_step: int | None,
        saved_at_s: float | None,
        is_saving: bool,
    ) -> RunStatus:
        """What a person sees."""
        recent_s = sum(self._step_s) / len(self._step_s) if self._step_s else None
        # Evaluations and saves between the steps take their time too. The first step, which warms up, says nothing yet.
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > _FEW else None
        return RunStatus(
            words=words,
            step=step,
            steps=self._steps,
            loss=self._losses[-1] if self._losses else None,
            losses=tuple(self._losses),
            tokens_per_s=None if recent_s is None else self._tokens_per_step / recent_s,
            step_s=recent_s,
            left_s=None if pace_s is None else pace_s * (self._steps - step),
            bound_by=self._bound_by,
            tiers=self._tiers(),
            evaluation=evaluation,
            saved_step=saved_step,
            saved_at_s=saved_at_s,
            is_saving=is_saving,
        )

    def _tiers(self) -> tuple[TierStatus, ...]:
        rows: tuple[TierRow, ...] = () if self._stats is None else self._stats.tiers
        return tuple(
            TierStatus(name=row.tier, peak_bytes=row.peak_bytes, budget_bytes=row.budget_bytes)
            for row in rows
            if row.tier in ("device", "host")
        )


def bound_by(before: SessionStats, after: SessionStats) -> str | None:
    """What took the time between two looks: the computation, unless it stood still for a quarter of it; None where none passed."""
    whole_s = after.seconds.total_s - before.seconds.total_s
    if whole_s <= 0:
        return None
    waiting = (after.exposed_copy_s - before.exposed_copy_s) / whole_s
    rest = (after.seconds.rest_s - before.seconds.rest_s) / whole_s
    if max(waiting, rest) < _SHARE:
        return "computation"
    if rest > waiting:
        return "data and the rest of the loop"
    updates = (after.host_update_s - before.host_update_s) / whole_s
    return "updates on the host" if updates > 0.5 else "copies between host and device"
