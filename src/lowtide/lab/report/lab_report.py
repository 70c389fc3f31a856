"""LabReport: all that a report is made of, and what it says in words: its title, the fastest configuration within a budget,
remarks, and where the figures come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.lab.budget import BudgetSweep
from lowtide.lab.record import RunRecord
from lowtide.lab.records import by_configuration, newest_records
from lowtide.lab.report.comparison import Comparison, listed, make_comparisons, speed_text, unit_for
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LabReport:
    """What is drawn and written, whatever the form."""

    comparisons: tuple[Comparison, ...]
    records: tuple[RunRecord, ...]
    """Those that the figures are from."""
    num_older: int = 0
    """How many others were left out."""
    skipped: tuple[str, ...] = ()
    """Files that could not be read, a line each with the reason."""
    sweeps: tuple[BudgetSweep, ...] = ()

    @property
    def title(self) -> str:
        """The experiments, whatever folders they are of; without any, the models whose budget was swept."""
        rows = [row for comparison in self.comparisons for row in comparison.rows]
        if not rows:
            return f"Lab report: memory budget of {listed(_different(sweep.model for sweep in self.sweeps), 'model')}"
        # A recipe without a folder stands for itself.
        groups = _different(row.folder or row.name for row in rows)
        return f"Lab report: {listed(groups, 'group' if any(row.folder for row in rows) else 'recipe')}"


def make_report(
    records: Sequence[RunRecord],
    *,
    skipped: Sequence[str] = (),
    sweeps: Sequence[BudgetSweep] = (),
    with_older: bool = False,
) -> LabReport:
    """The report of some records; with `with_older` runs that a newer one of the same configuration and seed replaces have
    rows too.
    """
    # What the figures were made with is said of those that count.
    counted = records if with_older else newest_records(records)
    return LabReport(
        comparisons=make_comparisons(records, with_older=with_older),
        records=tuple(counted),
        num_older=len(records) - len(counted),
        skipped=tuple(skipped),
        sweeps=tuple(sweeps),
    )


def fastest_words(comparison: Comparison) -> str:
    """The front as a sentence, from the smallest budget that holds any row to the largest that is worth having.

    By peaks, as the front is: what the allocator reserves and the context take comes on top. "" where there is no front.
    """
    if not comparison.front:
        return ""
    unit = unit_for(comparison.rows)
    steps = []
    for row in comparison.front:
        speed = comparison.speed(row)
        assert speed is not None, "a row on the front has a peak and a speed"
        assert row.peak_bytes is not None, "a row on the front has a peak and a speed"
        steps.append(f"from {unit.text(row.peak_bytes)} {unit.name} {row.label} ({speed_text(speed.mean)} samples/s)")
    missing = ""
    if comparison.speedless:
        labels = ", ".join(row.label for row in comparison.speedless)
        missing = f" Not among them, for want of a {comparison.speed_name}: {labels}."
    doubt = (
        " The times are of an emulated device, so that the order may be another on a GPU."
        if comparison.is_emulated
        else ""
    )
    return f"Fastest within a budget, by peak: {'; '.join(steps)}.{missing}{doubt}"


def provenance(report: LabReport) -> tuple[tuple[str, str], ...]:
    """What the records were made with; several values where they do not agree, which the reader must know."""
    if not report.records:
        return (("records", "none, sweeps are read off the graph that torch would compile"),)
    around = [record.surroundings for record in report.records]
    dates = sorted(surroundings.date for surroundings in around)
    left_out = ""
    if report.num_older:
        ones = "one older one" if report.num_older == 1 else f"{report.num_older} older ones"
        left_out = f"; {ones} of the same configuration and seed left out"
    # Older records have neither the host's memory nor its processor.
    known = [each for each in around if each.memory_bytes is not None]
    found = (
        ("commit", ", ".join(_different(each.commit for each in around))),
        # As rows have it: a run that ended before it could say has none of its own.
        ("device", "; ".join(_different(device for _, device, _ in by_configuration(report.records)))),
        ("torch", ", ".join(_different(each.torch for each in around))),
        ("lowtide", ", ".join(_different(each.lowtide for each in around))),
        ("python", ", ".join(_different(each.python for each in around))),
        ("platform", "; ".join(_different(each.platform for each in around))),
        ("processor", ", ".join(_different(each.processor for each in known))),
        ("host memory", ", ".join(_different(format_bytes(each.memory_bytes or 0) for each in known))),
        ("driver", ", ".join(_different(each.driver for each in around if each.driver is not None))),
        ("date", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"),
        ("records", f"{len(report.records)}{left_out}"),
    )
    return tuple((name, values) for name, values in found if values)


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """What a reader of the figures should know."""
    lines = list(run_remarks(comparison))
    if comparison.is_emulated:
        lines.insert(0, "The device is emulated on the host: bytes are true, times say nothing about a GPU.")
    for row in comparison.rows:
        if row.num_older:
            runs = "an older run" if row.num_older == 1 else f"{row.num_older} older runs"
            lines.append(f"{row.label}: {runs} with the same seeds left out, the newest of each seed counts.")
    return tuple(lines)


def run_remarks(comparison: Comparison) -> tuple[str, ...]:
    """What the runs themselves want to be known, each said once with the rows that say it."""
    said: dict[str, list[str]] = {}
    for row in comparison.rows:
        for remark in row.remarks:
            said.setdefault(remark, []).append(row.label)
    everywhere = len(comparison.rows)
    return tuple(
        remark if len(labels) == everywhere else f"{', '.join(labels)}: {remark}" for remark, labels in said.items()
    )


def _different(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
