"""The points of a sweep, and what can be read off them: where the peak is not monotone, and which points are worth having."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.units import MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One budget, and what the compiled step would need under it."""

    budget: float
    """torch's activation memory budget, 0 to 1."""
    saved_bytes: int
    """What the forward makes and keeps for the backward."""
    peak_bytes: int
    """Largest sum of live bytes over forward and backward, as compiled code runs them, see `sweep.peak_bytes`."""
    unfused_peak_bytes: int
    """The same where every result is written: not quite a bound: another order of steps may hold more."""
    recomputed_flops_share: float
    """Of the forward's operations, those that the backward does again."""
    seconds: float
    """To find the point."""
    kind: Literal["static"] = "static"
    """Read off the graph, not measured."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A stretch on which a smaller budget gives a larger peak."""

    low: BudgetPoint
    """The smaller budget, of the larger peak."""
    high: BudgetPoint

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"from budget {self.high.budget:g} down to {self.low.budget:g} the peak rises from "
            f"{self.high.peak_bytes / MiB:,.1f} to {self.low.peak_bytes / MiB:,.1f} MiB"
        )


def not_monotone(points: Iterable[BudgetPoint]) -> list[Rise]:
    """Where less budget means more memory: each stretch from its largest to its smallest budget, the largest first."""
    ordered = sorted(points, key=lambda point: point.budget, reverse=True)
    rises: list[Rise] = []
    for high, low in itertools.pairwise(ordered):
        if low.peak_bytes <= high.peak_bytes:
            continue
        if rises and rises[-1].low is high:
            rises[-1] = Rise(low, rises[-1].high)
        else:
            rises.append(Rise(low, high))
    return rises


def pareto(points: Sequence[BudgetPoint]) -> list[BudgetPoint]:
    """The points that no other beats in both peak and recomputation, by peak; of equal ones the first."""
    kept: list[BudgetPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.recomputed_flops_share)):
        if not kept or point.recomputed_flops_share < kept[-1].recomputed_flops_share:
            kept.append(point)
    return kept
