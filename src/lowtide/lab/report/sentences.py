"""What a report says in words: its title, the fastest configuration within a budget, remarks, and where the figures come
from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.lab.record import RunRecord, Surroundings
from lowtide.lab.records import by_configuration
from lowtide.lab.report.comparison import Comparison, listed, unit_for
from lowtide.lab.report.rows import Row
from lowtide.lab.report.tables import speed_text
from lowtide.units import format_bytes


def report_title(rows: Sequence[Row], swept: Sequence[str] = ()) -> str:
    """A report over all rows, whatever folders they are of; without rows, over the models whose budget was swept.

    Example:
        >>> rows = [Row(name=name, device="", model="", seeds=(0,), by_phase={}) for name in ("a/b", "mine", "a/c", "own")]
        >>> report_title(rows)
        'Lab report: a, mine, own'
    """
    if not rows:
        return f"Lab report: memory budget of {listed(list(dict.fromkeys(swept)), 'model')}"
    # A recipe without a folder stands for itself.
    groups = list(dict.fromkeys(row.folder or row.name for row in rows))
    with_folder = any(row.folder for row in rows)
    return f"Lab report: {listed(groups, 'group' if with_folder else 'recipe')}"


def fastest_words(comparison: Comparison) -> str:
    """The front as a sentence, from the smallest budget that holds any row to the largest that is worth having.

    By peaks, as the front is: what the allocator reserves and the context take is beside that. "" where there is no front.
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


def provenance(records: Sequence[RunRecord], num_older: int = 0) -> tuple[tuple[str, str], ...]:
    """What the records were made with; several values where they do not agree, which the reader must know.

    Args:
        records: Those that the figures are from.
        num_older: How many others were left out.
    """
    if not records:
        return (("records", "none, sweeps are read off the graph that torch would compile"),)
    left_out = f"; {_older_words(num_older)}" if num_older else ""
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


def _older_words(num_older: int) -> str:
    """How many records do not count, in words."""
    ones = "one older one" if num_older == 1 else f"{num_older} older ones"
    return f"{ones} of the same configuration and seed left out"


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


def _unique(values: Iterable[str], *, separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(values))
