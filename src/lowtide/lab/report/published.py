"""Our figures beside those that somebody else published for the same configuration."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.lab.recipe import PublishedFigures
from lowtide.lab.report.rows import Row
from lowtide.lab.report.spread import Spread
from lowtide.units import GiB

_TIMED_STEPS = 90
"""From the end of step 10 to that of step 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One quantity, ours and published; None where either side does not have it."""

    ours: float | None
    published: float | None

    @property
    def difference(self) -> float | None:
        """Ours over the published one, less 1."""
        if self.ours is None or not self.published or self.ours != self.ours:
            return None
        return self.ours / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BesidePublished:
    """All quantities of a row. Ours of a run that did not finish are left out: they are no results."""

    source: str
    peak_bytes: Beside
    samples_per_s: Beside
    """Over all steps with their compilation, and over the evaluation where theirs is of a run that had one."""
    steps_10_to_100_s: Beside
    perplexity: Beside


def beside_published(row: Row) -> BesidePublished | None:
    """The row against its published figures; None where it has none."""
    published = row.published
    if published is None:
        return None
    return BesidePublished(
        source=published.source,
        peak_bytes=Beside(
            ours=row.peak_bytes if row.is_finished else None,
            published=None if published.peak_gib is None else published.peak_gib * GiB,
        ),
        samples_per_s=Beside(
            ours=speed.mean if (speed := _speed_like(published, row)) else None, published=published.samples_per_s
        ),
        steps_10_to_100_s=Beside(
            ours=row.steps_10_to_100_s.mean if row.steps_10_to_100_s else None, published=published.steps_10_to_100_s
        ),
        perplexity=Beside(
            ours=row.perplexity.mean if row.perplexity and not _is_shorter(row, published) else None,
            published=published.perplexity,
        ),
    )


def _speed_like(published: PublishedFigures, row: Row) -> Spread | None:
    """Our samples/s of the kind of theirs; None for a run that is shorter than theirs, or has no evaluation as theirs has.

    Whoever publishes a perplexity evaluated, and that is in the time that their samples are divided by.
    """
    if _is_shorter(row, published):
        return None
    if published.perplexity is None:
        return row.samples_per_s
    return row.samples_per_s_with_evaluation


def _is_shorter(row: Row, published: PublishedFigures) -> bool:
    """Whether theirs has steps that ours has not: whoever publishes a time of steps 10 to 100 made these steps."""
    return published.steps_10_to_100_s is not None and (row.steps or 0) < 100


def published_speed(row: Row, *, is_warm: bool) -> float | None:
    """Published samples/s of the kind that ours is: after warm-up it follows from the time of steps 10 to 100."""
    published = row.published
    if published is None or not is_warm:
        return published.samples_per_s if published else None
    if not published.steps_10_to_100_s or row.samples_per_step is None:
        return None
    return _TIMED_STEPS * row.samples_per_step / published.steps_10_to_100_s
