"""Where the figures come from, as pairs of a name and its values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.lab.record import RunRecord, Surroundings
from lowtide.lab.records import by_configuration
from lowtide.lab.report.comparison import Comparison
from lowtide.units import format_bytes


def provenance(records: Sequence[RunRecord], num_older: int = 0) -> tuple[tuple[str, str], ...]:
    """What the records were made with; several values where they do not agree, which the reader must know.

    Args:
        records: Those that the figures are from.
        num_older: How many others were left out.
    """
    if not records:
        return (("records", "none, sweeps are read off the graph that torch would compile"),)
    left_out = f"; {older_words(num_older)}" if num_older else ""
    around = [record.surroundings for record in records]
    dates = sorted(surroundings.date for surroundings in around)
    return (
        ("commit", _unique(surroundings.commit for surroundings in around)),
        # As rows have it: a run that ended before it could say has none of its own.
        ("device", _unique((device for _, device, _ in by_configuration(records)), separator="; ")),
        ("torch", _unique(surroundings.torch for surroundings in around)),
        ("lowtide", _unique(surroundings.lowtide for surroundings in around)),
        ("python", _unique(surroundings.python for surroundings in around)),
        ("platform", _unique((surroundings.platform for surroundings in around), separator="; ")),
        *_machine(around),
        ("date", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"),
        ("records", f"{len(records)}{left_out}"),
    )


def _machine(around: Sequence[Surroundings]) -> list[tuple[str, str]]:
    """The hosts and drivers, of the records that have them: older ones do not."""
    found = [
        ("processor", _unique(each.processor for each in around if each.memory_bytes is not None)),
        ("host memory", _unique(format_bytes(each.memory_bytes) for each in around if each.memory_bytes is not None)),
        ("driver", _unique(each.driver for each in around if each.driver is not None)),
    ]
    return [(name, values) for name, values in found if values]


def older_words(num_older: int) -> str:
    """That so many records do not count."""
    ones = "one older one" if num_older == 1 else f"{num_older} older ones"
    return f"{ones} of the same configuration and seed left out"


def remarks(comparison: Comparison) -> tuple[str, ...]:
    """What a reader of the figures should know."""
    lines = list(run_remarks(comparison))
    if comparison.is_emulated:
        lines.insert(0, "The device is emulated on the host: bytes are true, times say nothing about a card.")
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


def _unique(values: Iterable[str], *, separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(values))
