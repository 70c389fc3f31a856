"""Axis: from a value to a place, linear or logarithmic as the range asks, with round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_RATIO = 8.0
"""Values that are this far apart leave no room for the small ones on a linear axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 8) -> tuple[float, ...]:
        """Round values within the range, not many more than `most`."""
        if not self.is_log:
            step = _round_step((self.high - self.low) / most)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return tuple(index * step for index in range(first, last + 1))
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            # Divided below 1, because 10**-1 is not quite a tenth and would be written so.
            values = [
                factor * 10**power if power >= 0 else factor / 10**-power for power in powers for factor in factors
            ]
            shown = tuple(value for value in values if self.low <= value <= self.high)
            if len(shown) <= most:
                break
        return shown


def axis_over(values: Iterable[float]) -> Axis:
    """An axis with some room around all values: logarithmic where they are far apart, otherwise linear from 0."""
    known = list(values)
    least, largest = min(known), max(known)
    if least > 0 and largest / least > LOG_RATIO:
        return Axis(low=least / 1.35, high=largest * 1.35, is_log=True)
    return Axis(low=min(0.0, least), high=largest * 1.12 if largest > 0 else 1.0, is_log=False)


def tick_text(value: float) -> str:
    """A tick without needless digits.

    Example:
        >>> tick_text(0.1 * 3), tick_text(20.0), tick_text(12500.0)
        ('0.3', '20', '12,500')
    """
    return f"{value:,.10g}" if value >= 1000 else f"{value:.6g}"


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * (1 - 1e-9)), 10 * power)
