"""ByteUnit: one unit for all sizes of a table, so that its columns can be compared at a glance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.lab.report.rows import Row
from lowtide.units import GiB, KiB, MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteUnit:
    """A binary unit, and the digits after the point that its tables have."""

    name: str
    num_bytes: int
    decimals: int

    def text(self, num_bytes: float) -> str:
        """A size without the unit's name, which stands in the head of the column."""
        return f"{num_bytes / self.num_bytes:,.{self.decimals}f}"


_UNITS = (
    # Published tables say GiB with three digits; differences of a few MiB are what they argue about.
    ByteUnit(name="GiB", num_bytes=GiB, decimals=3),
    ByteUnit(name="MiB", num_bytes=MiB, decimals=2),
    ByteUnit(name="KiB", num_bytes=KiB, decimals=1),
)


def unit_for(rows: Iterable[Row]) -> ByteUnit:
    """The largest unit of which the largest peak has at least one."""
    return byte_unit(max((row.peak_bytes or 0 for row in rows), default=0))


def byte_unit(largest_bytes: int) -> ByteUnit:
    """The largest unit of which there is at least one; KiB for less; GiB where nothing is known."""
    if not largest_bytes:
        return _UNITS[0]
    return next((unit for unit in _UNITS if largest_bytes >= unit.num_bytes), _UNITS[-1])
