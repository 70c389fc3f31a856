"""SoFar: what a run has told before it ended, for the record of one that could not write its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lowtide.lab.progress import Progress
from lowtide.units import GiB, MiB


class SoFar:
    """Collects progress."""

    def __init__(self) -> None:
        self.last: Progress | None = None
        self._losses: list[float] = []
        self._evaluations: list[tuple[int, float]] = []

    def add(self, progress: Progress) -> None:
        """One more word from the run."""
        self.last = progress
        # A loss counts once, and only where none before it is missing: its place says of which step it is.
        if progress.loss is not None and progress.step == len(self._losses) + 1:
            self._losses.append(progress.loss)
        if progress.evaluation_loss is not None:
            self._evaluations.append((progress.step, progress.evaluation_loss))

    @property
    def losses(self) -> tuple[float, ...]:
        """Of the first steps, up to one that was not told or is not finite, which no record can hold."""
        return finite_part(self._losses)

    @property
    def evaluations(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) of each that was told, up to one that is not finite."""
        return finite_evaluations(self._evaluations)

    @property
    def words(self) -> str:
        """The last progress, in words."""
        return "nothing was heard of it" if self.last is None else f"last heard: {describe(self.last)}"


def describe(progress: Progress) -> str:
    """In words: `training, step 3 of 100, loss 5.1234, peak 3.975 GiB, 6.1 samples/s`."""
    parts = [progress.words]
    if progress.steps:
        parts.append(f"step {progress.step} of {progress.steps}")
    return ", ".join([*parts, *figures(progress)])


def figures(progress: Progress) -> list[str]:
    """The numbers that are known, each in words."""
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.peak_bytes is not None:
        parts.append(f"peak {shown_bytes(progress.peak_bytes)}")
    if progress.samples_per_s is not None:
        parts.append(f"{progress.samples_per_s:.4g} samples/s")
    if progress.evaluation_loss is not None:
        parts.append(f"evaluation loss {progress.evaluation_loss:.4f}")
    return parts


def shown_bytes(num_bytes: int) -> str:
    """With the digits that such tables are published with.

    Example:
        >>> shown_bytes(22_725_752_832), shown_bytes(23_000_000)
        ('21.165 GiB', '21.935 MiB')
    """
    return f"{num_bytes / GiB:.3f} GiB" if num_bytes >= GiB // 10 else f"{num_bytes / MiB:.3f} MiB"


def finite_part(losses: list[float] | tuple[float, ...]) -> tuple[float, ...]:
    """The losses before the first that is not finite."""
    end = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    return tuple(losses[:end])


def finite_evaluations(evaluations: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The same of losses with their steps."""
    return tuple(evaluations[: len(finite_part([loss for _, loss in evaluations]))])
