"""Sweep: what torch's activation memory budget does to a model, and where less of it gives a larger peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide import config
from lowtide.errors import BadRecordError, ConfigError
from lowtide.report.table import byte_unit
from lowtide.units import format_bytes

SCHEMA = "lowtide.budget_sweep/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One budget."""

    budget: float
    """0 to 1, of what a compiled graph saves by default."""
    saved_bytes: int
    """For the backward."""
    peak_bytes: int
    recomputed_flops_share: float
    """The share of the forward's work that is done again in the backward."""
    kind: Literal["static", "real"]
    """Read off the compiled graphs, or measured in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reversal:
    """A smaller budget with a larger peak."""

    point: SweepPoint
    better: SweepPoint
    """The larger budget with the smallest peak."""

    @property
    def words(self) -> str:
        """The reversal as a sentence, with the numbers."""
        unit = byte_unit(self.point.peak_bytes)
        peak, less = unit.text(self.point.peak_bytes), unit.text(self.better.peak_bytes)
        more = format_bytes(self.point.peak_bytes - self.better.peak_bytes)
        return (
            f"Budget {self.point.budget:g} has a larger peak, {peak} {unit.name}, than budget {self.better.budget:g} with "
            f"{less} {unit.name}: {more} more ({self.point.kind})."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All budgets tried on a model."""

    model: str
    title: str
    """The model with the batch, the type and the version of torch, as far as they are known."""
    points: tuple[SweepPoint, ...]
    """By rising budget, one kind after the other."""

    @property
    def curves(self) -> dict[str, tuple[SweepPoint, ...]]:
        """The points of each kind."""
        kinds = dict.fromkeys(point.kind for point in self.points)
        return {kind: tuple(point for point in self.points if point.kind == kind) for kind in kinds}

    @property
    def reversals(self) -> tuple[Reversal, ...]:
        """Where the curve of a kind is not monotone, by rising budget."""
        return tuple(reversal for points in self.curves.values() for reversal in _reversals(points))


def read_sweep(plain: Mapping[str, object]) -> Sweep:
    """A sweep from the plain data of its file.

    Raises:
        BadRecordError: It is of another kind, has no points, or a point lacks something.
    """
    if plain.get("schema") != SCHEMA:
        raise BadRecordError(f"the schema of a budget sweep is {plain.get('schema')!r}, not {SCHEMA!r}")
    model, points = plain.get("model"), plain.get("points")
    if not isinstance(model, str) or not isinstance(points, Sequence) or isinstance(points, str) or not points:
        raise BadRecordError("a budget sweep needs 'model', a text, and 'points', a list with at least one")
    read = [_point(number, point, model) for number, point in enumerate(points, 1)]
    kinds = list(dict.fromkeys(point.kind for point in read))
    torch = plain.get("torch")
    words = (model, plain.get("batch"), plain.get("dtype"), f"torch {torch}" if torch else None)
    return Sweep(
        model=model,
        title=", ".join(str(word) for word in words if word),
        points=tuple(sorted(read, key=lambda point: (kinds.index(point.kind), point.budget))),
    )


def _point(number: int, plain: object, model: str) -> SweepPoint:
    # A later version of the sweep may say more of a point than is drawn here.
    known = {key: plain[key] for key in SweepPoint.__slots__ if key in plain} if isinstance(plain, Mapping) else plain
    try:
        return config.from_plain(SweepPoint, known)
    except ConfigError as error:
        raise BadRecordError(f"point {number} of the budget sweep of {model}: {error}") from error


def _reversals(points: Sequence[SweepPoint]) -> Iterable[Reversal]:
    for index, point in enumerate(points):
        larger = [other for other in points[index + 1 :] if other.budget > point.budget]
        better = min(larger, key=lambda other: other.peak_bytes, default=point)
        if better.peak_bytes < point.peak_bytes:
            yield Reversal(point=point, better=better)
