"""A report's comparisons, and what it says in words.

A comparison is the rows of one experiment on one device, the row that the others are measured against, those that no other
beats, and what others published for the same configurations. The report adds the fastest configuration within a budget,
remarks, and where the figures come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.lab.budget import BudgetSweep
from lowtide.lab.record import RunRecord
from lowtide.lab.records import by_configuration, newest_records
from lowtide.lab.report.rows import Row, Spread, make_rows
from lowtide.report.table import ByteUnit, byte_unit
from lowtide.units import GiB, format_bytes


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Indices of the points of which no other has less of the first and more of the second, by rising first value.

    A point is beaten by another that is no worse in either and better in one; equal points are on the front together.

    Args:
        points: Memory, where less is better, and speed, where more is.

    Example:
        >>> pareto_front([(8.0, 2.0), (4.0, 1.0), (9.0, 1.5)])
        (1, 0)
    """
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    for index in order:
        # In this order nothing that comes later beats what is kept, so that the last one kept is the fastest so far.
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return tuple(front)


_TIMED_STEPS = 90
"""How many steps lie between the end of step 10 and that of step 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPair:
    """One quantity, ours and published; None where either side does not have it."""

    ours: float | None
    published: float | None

    @property
    def difference(self) -> float | None:
        """Ours over the published one, less 1."""
        if self.ours is None or not self.published or self.ours != self.ours:
            return None
        return self.ours / self.published - 1


def pairs_with_published(row: Row) -> dict[str, PublishedPair]:
    """Each quantity of a row against its published figure, by name; empty where none was published.

    Ours of a run that did not finish are left out, because they are no results. So is a perplexity of fewer steps than
    theirs: a published time of steps 10 to 100 means that these steps were made. A published perplexity means an
    evaluation, whose time is in that which the samples are divided by: our speed is then over both too.
    """
    published = row.published
    if published is None:
        return {}
    is_shorter = published.steps_10_to_100_s is not None and (row.steps or 0) < 100
    speed = row.samples_per_s if published.perplexity is None else row.samples_per_s_with_evaluation

    def pair(ours: Spread | None, theirs: float | None) -> PublishedPair:
        return PublishedPair(ours=ours.mean if ours else None, published=theirs)

    return {
        "peak": PublishedPair(
            ours=row.peak_bytes if row.is_finished else None,
            published=None if published.peak_gib is None else published.peak_gib * GiB,
        ),
        "samples/s": pair(None if is_shorter else speed, published.samples_per_s),
        "steps 10 to 100, s": pair(row.steps_10_to_100_s, published.steps_10_to_100_s),
        "perplexity": pair(None if is_shorter else row.perplexity, published.perplexity),
    }


def published_speed(row: Row, *, is_warm: bool) -> float | None:
    """Published samples/s of the kind that ours is: after warm-up it follows from the time of steps 10 to 100."""
    published = row.published
    if published is None or not is_warm:
        return published.samples_per_s if published else None
    if not published.steps_10_to_100_s or row.samples_per_step is None:
        return None
    return _TIMED_STEPS * row.samples_per_step / published.steps_10_to_100_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows whose figures may be set side by side: the same experiment, model and device."""

    title: str
    device: str
    rows: tuple[Row, ...]
    """The control first, then by falling peak; those that did not finish last."""
    control: Row | None
    """The row that others are measured against; None where no run finished with a peak."""
    control_words: str
    """Which row it is and why, as a sentence."""
    front: tuple[Row, ...]
    """Finished rows with a `speed` than which no other is as small and as fast, from the smallest peak."""
    is_warm: bool
    """Whether `speed` leaves out the first steps: where any row can. Shorter runs, made for their memory, have none then."""

    @property
    def is_emulated(self) -> bool:
        """Whether the host stood in for the device, so that times say nothing about a GPU."""
        return "emulated" in self.device

    @property
    def is_compiled(self) -> bool:
        """Whether anything is compiled, so that the first steps of a run wait for it."""
        return any(row.is_compiled for row in self.rows)

    @property
    def sources(self) -> str:
        """Who published figures, as a sentence; "" where nobody did."""
        sources = dict.fromkeys(row.published.source for row in self.rows if row.published)
        return f"Published: {'; '.join(sources)}." if sources else ""

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
        _compare(
            rows,
            # A recipe without a folder stands for itself.
            title=(folder or listed(list(dict.fromkeys(row.name for row in rows)), "recipe"))
            + f"{f' ({model})' if len(models[folder]) > 1 else ''} on {device}",
        )
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
    # Among equal ones the longer run, which knows speed and perplexity too.
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


def unit_for(rows: Iterable[Row]) -> ByteUnit:
    """The largest unit of which the largest peak has at least one."""
    return byte_unit(max((row.peak_bytes or 0 for row in rows), default=0))


def speed_text(samples_per_s: float) -> str:
    """Four digits, as published tables have them.

    Example:
        >>> speed_text(2.518), speed_text(31.234), speed_text(1250.0)
        ('2.518', '31.23', '1,250.0')
    """
    decimals = 3 if samples_per_s < 10 else 2 if samples_per_s < 100 else 1
    return f"{samples_per_s:,.{decimals}f}"


MOST_NAMES = 3
"""How many names a title has; the rest is counted."""


def listed(names: Sequence[str], noun: str) -> str:
    """The first names, and how many others there are."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    shown = names[: MOST_NAMES - 1]
    return f"{', '.join(shown)} and {len(names) - len(shown)} other {noun}s"


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
