"""Spread: one figure over several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and range of some values; their standard deviation where there are at least two."""

    mean: float
    least: float
    largest: float
    deviation: float | None
    """Of the sample, divided by one less than the number of values; None for a single one, or one that is not finite."""
    count: int


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Of the values that are there; None without any.

    Example:
        >>> spread_of([1.0, None, 3.0])
        Spread(mean=2.0, least=1.0, largest=3.0, deviation=1.4142135623730951, count=2)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    is_finite = all(map(math.isfinite, known))
    return Spread(
        mean=statistics.fmean(known),
        least=min(known),
        largest=max(known),
        deviation=statistics.stdev(known) if len(known) > 1 and is_finite else None,
        count=len(known),
    )


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinite where it is beyond any float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
