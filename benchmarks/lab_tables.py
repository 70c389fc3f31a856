"""The lab's table in the documentation, from its records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.records import percent, table
from lowtide.errors import BadRecordError
from lowtide.lab.record import RunRecord, read_record
from lowtide.units import GiB

_PHASES = ("forward", "backward", "update")


def memory(results: Path) -> str:
    """Peaks of Deep One's recipes: measured, predicted before the run, and published."""
    newest = _newest(results)
    lines = []
    for name, record in sorted(newest.items(), key=lambda item: -_peak(item[1])):
        published = record.recipe.get("published")
        peak_gib = published.get("peak_gib") if isinstance(published, dict) else None
        memory, predicted = record.memory, record.predicted
        assert memory is not None, "an unfinished run has no place in the results"
        lines.append(
            [
                name.rpartition("/")[2],
                "-" if peak_gib is None else f"{peak_gib:.3f}",
                f"{memory.peak_bytes / GiB:.3f}",
                memory.peak_phase,
                "-" if predicted is None else f"{predicted.peak_bytes / GiB:.3f}",
                "-" if predicted is None else percent(predicted.peak_bytes / memory.peak_bytes - 1),
                "-" if memory.reserved_bytes is None else f"{memory.reserved_bytes / GiB:.2f}",
            ]
        )
    header = ["recipe", "published GiB", "measured GiB", "in", "predicted GiB", "error", "reserved GiB"]
    return table(header, lines, num_text=1) + f"\n\n{_origin(newest)}"


def phases(results: Path) -> str:
    """The highest point of each part of a step: why a technique moves the peak, or does not."""
    newest = _newest(results)
    lines = []
    for name, record in sorted(newest.items(), key=lambda item: -_peak(item[1])):
        assert record.memory is not None, "an unfinished run has no place in the results"
        by_phase = record.memory.by_phase
        cells = (f"{by_phase[phase] / GiB:.3f}" if phase in by_phase else "-" for phase in _PHASES)
        lines.append([name.rpartition("/")[2], *cells])
    return table(["recipe", *(f"{phase}, GiB" for phase in _PHASES)], lines, num_text=1) + f"\n\n{_origin(newest)}"


def _newest(results: Path) -> dict[str, RunRecord]:
    """The newest record of each recipe."""
    newest: dict[str, RunRecord] = {}
    for path in sorted((results / "lab").glob("*.json")):
        record = read_record(path)
        if record.name not in newest or record.surroundings.date > newest[record.name].surroundings.date:
            newest[record.name] = record
    if not newest:
        raise BadRecordError(f"there are no records in {results / 'lab'}; run the lab before its table is rendered")
    return newest


def _origin(newest: Mapping[str, RunRecord]) -> str:
    first = next(iter(newest.values())).surroundings
    commits = ", ".join(sorted({record.surroundings.commit[:12] for record in newest.values()}))
    return f"From `benchmarks/results/lab`: {first.device}, torch {first.torch}, commit {commits}, {first.date[:10]}."


def _peak(record: RunRecord) -> int:
    return 0 if record.memory is None else record.memory.peak_bytes
