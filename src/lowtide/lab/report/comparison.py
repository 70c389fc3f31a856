"""Comparison: the rows of one experiment on one device, and the row that the others are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.lab.record import RunRecord
from lowtide.lab.report.pareto import pareto_front
from lowtide.lab.report.rows import Row, make_rows
from lowtide.lab.report.spread import Spread
from lowtide.lab.report.titles import group_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows whose figures may be set side by side: the same experiment, model and device."""

    title: str
    device: str
    rows: tuple[Row, ...]
    """The control first, then by falling peak; those that did not finish last."""
    control: Row | None
    """None where no run finished with a peak."""
    control_words: str
    """Which row it is and why, as a sentence."""
    front: tuple[Row, ...]
    """Finished rows with a `speed` than which no other is as small and as fast, from the smallest peak."""
    is_warm: bool
    """Whether `speed` leaves out the first steps: where any row can. Shorter runs, made for their memory, have none then."""

    @property
    def is_emulated(self) -> bool:
        """Whether the host played the device, so that times say nothing about a card."""
        return "emulated" in self.device

    @property
    def is_compiled(self) -> bool:
        """Whether anything is compiled, so that the first steps of a run wait for it."""
        return any(row.is_compiled for row in self.rows)

    def speed(self, row: Row) -> Spread | None:
        """The samples/s that rows are compared by; None for a run without such."""
        return row.warm_samples_per_s if self.is_warm else row.samples_per_s

    @property
    def speed_name(self) -> str:
        """What `speed` is, for sentences."""
        return "speed after warm-up" if self.is_warm else "speed"

    @property
    def speedless(self) -> tuple[Row, ...]:
        """Finished rows that can be on no front, for want of a `speed`."""
        return tuple(row for row in self.rows if row.is_finished and row.peak_bytes and self.speed(row) is None)

    def reduction(self, row: Row) -> float | None:
        """The share of the control's peak that is saved; None for the control, and for what has no peak to compare."""
        if self.control is None or row is self.control or row.peak_bytes is None or not row.is_finished:
            return None
        assert self.control.peak_bytes, "a control has a peak"
        return 1 - row.peak_bytes / self.control.peak_bytes


def make_comparisons(records: Sequence[RunRecord], *, with_older: bool = False) -> tuple[Comparison, ...]:
    """One for each experiment (the folder of the names), model and device, in the order of their first record.

    Args:
        records: Of all experiments.
        with_older: Whether older runs of the same configuration and seed are rows too.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in make_rows(records, with_older=with_older):
        groups.setdefault((row.folder, row.model, row.device), []).append(row)
    # A model is worth a word only where one experiment tries several.
    models: dict[str, set[str]] = {}
    for folder, model, _ in groups:
        models.setdefault(folder, set()).add(model)
    return tuple(
        _compare(rows, title=f"{group_words(rows)}{f' ({model})' if len(models[folder]) > 1 else ''} on {device}")
        for (folder, model, device), rows in groups.items()
    )


def _compare(rows: Sequence[Row], *, title: str) -> Comparison:
    control, control_words = _control(rows)
    usable = [row for row in rows if row.is_finished and row.peak_bytes is not None]
    is_warm = any(row.warm_samples_per_s is not None for row in usable)
    timed = [
        (row, float(row.peak_bytes or 0), speed.mean)
        for row in usable
        if (speed := row.warm_samples_per_s if is_warm else row.samples_per_s) is not None
    ]
    front = pareto_front([(peak_bytes, speed) for _, peak_bytes, speed in timed])
    return Comparison(
        title=title,
        device=rows[0].device,
        rows=tuple(sorted(rows, key=lambda row: (row is not control, not row.is_finished, -(row.peak_bytes or 0)))),
        control=control,
        control_words=control_words,
        front=tuple(timed[index][0] for index in front),
        is_warm=is_warm,
    )


def _control(rows: Sequence[Row]) -> tuple[Row | None, str]:
    usable = [row for row in rows if row.is_finished and row.peak_bytes]
    # Of equal ones the longer run, which knows speed and perplexity too.
    usable.sort(key=lambda row: (row.peak_bytes or 0, row.steps or 0), reverse=True)
    named = [row for row in usable if row.is_control]
    if named:
        several = f", the largest of {len(named)} rows of that name" if len(named) > 1 else ""
        return named[0], f"Reductions are against {named[0].label}{several}."
    if not usable:
        return None, "No run finished with a peak, so that there is nothing to measure a reduction against."
    lost = next((row for row in rows if row.is_control), None)
    if lost is None:
        why = "there is no row whose name ends in control"
    elif lost.is_finished:
        why = f"{lost.label} has no peak"
    else:
        why = f"{lost.label} did not finish: {lost.outcome}"
    return usable[0], f"Reductions are against {usable[0].label}, the row with the largest peak, because {why}."
