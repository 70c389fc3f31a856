"""The lab's tables in the documentation, from its records."""

from __future__ import annotations

import datetime as dt
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lab.predict import SCHEMA
from benchmarks.records import footnote, gib, newest, percent, sources, table
from lowtide.errors import BadRecordError
from lowtide.lab.record import MemoryFigures, Outcome, RunRecord, SpeedFigures, perplexity, read_record
from lowtide.lab.records import seed_of
from lowtide.lab.report.comparison import speed_text
from lowtide.lab.report.rows import Spread, make_rows
from lowtide.units import GiB, MiB

_PHASES = ("forward", "backward", "update")

NUM_COLD_STEPS = 10
"""That a warm speed leaves out."""

Measured = tuple[RunRecord, MemoryFigures]


def memory(results: Path) -> str:
    """Peaks of Deep One's recipes: measured, predicted before the run, and published; of each recipe the newest run."""
    rows = _newest(results)
    header = ["recipe", "published GiB", "measured GiB", "in", "predicted GiB", "error", "reserved GiB"]
    return table(header, [_cells(*row) for row in rows], num_text=1) + f"\n\n{_provenance(rows)}"


def phases(results: Path) -> str:
    """The highest point of each part of a step: why a technique moves the peak, or does not."""
    rows = _newest(results)
    lines = []
    for record, memory in rows:
        cells = (f"{memory.by_phase[phase] / GiB:.3f}" if phase in memory.by_phase else "-" for phase in _PHASES)
        lines.append([record.name.rpartition("/")[2], *cells])
    header = ["recipe", *(f"{phase}, GiB" for phase in _PHASES)]
    return table(header, lines, num_text=1) + f"\n\n{_provenance(rows)}"


def compiled(results: Path) -> str:
    """Compiled recipes that have a published peak."""
    lines, rows = [], []
    for record, memory in _newest(results):
        theirs = _published_gib(record)
        if theirs is not None and record.recipe.get("compile") is not None:
            rows.append((record, memory))
            difference = memory.peak_bytes / MiB - theirs * GiB / MiB
            name = record.name.rpartition("/")[2]
            lines.append([name, f"{theirs:.3f}", f"{memory.peak_bytes / GiB:.3f}", f"{difference:+,.0f}"])
    header = ["recipe", "published GiB", "measured GiB", "difference, MiB"]
    return table(header, lines, num_text=1) + f"\n\n{_provenance(rows)}"


def quality(results: Path) -> str:
    """Perplexities over seeds and warm speeds, of the runs that are long enough for either; the best perplexity first."""
    records = [
        record
        for record in _finished(results)
        if record.evaluation_loss is not None or (record.speed and record.speed.is_alone and _warm(record.speed))
    ]
    rows = sorted(make_rows(records), key=lambda row: row.perplexity.mean if row.perplexity else math.inf)
    lines = []
    for row in rows:
        published, perplexity, speed = row.published, row.perplexity, row.warm_samples_per_s
        lines.append(
            [
                row.label,
                f"{row.peak_bytes / GiB:.3f}" if row.peak_bytes else "-",
                ", ".join(map(str, sorted(row.seeds))),
                "-" if perplexity is None else f"{perplexity.mean:.1f}",
                "-" if perplexity is None else _range(perplexity),
                "-" if published is None or published.perplexity is None else f"{published.perplexity:.1f}",
                "-" if speed is None else speed_text(speed.mean),
                "-" if published is None or published.samples_per_s is None else speed_text(published.samples_per_s),
            ]
        )
    header = ["recipe", "peak GiB", "seeds", "perplexity", "least–largest", "published", "warm samples/s", "published"]
    measured = [(record, record.memory) for record in records if record.memory]
    return table(header, lines, num_text=1) + f"\n\n{_provenance(measured)}"


def moments(results: Path) -> str:
    """Perplexities of single runs after several of their steps; of each recipe and seed the newest run."""
    found: dict[tuple[str, int], RunRecord] = {}
    for record in _finished(results, "lab_moments"):
        key = (record.name, seed_of(record))
        if record.evaluation_loss is not None and (key not in found or _when(record) > _when(found[key])):
            found[key] = record
    rows = [found[key] for key in sorted(found)]
    losses = [_evaluation_losses(record) for record in rows]
    steps = sorted({step for row in losses for step in row})
    lines = [
        [
            record.name.rpartition("/")[2],
            str(seed_of(record)),
            *(f"{perplexity(row[step]):.1f}" if step in row else "-" for step in steps),
        ]
        for record, row in zip(rows, losses, strict=True)
    ]
    provenance = _provenance([(record, record.memory) for record in rows if record.memory], "lab_moments")
    samples = _unique(_evaluation_samples(record) for record in rows)
    said = f"Perplexity after so many steps, on {samples} validation samples."
    return table(["recipe", "seed", *map(str, steps)], lines, num_text=1) + f"\n\n{said}\n\n{provenance}"


def batches(results: Path) -> str:
    """Recipes at other batches than their own; of each recipe, batch and seed the newest run."""
    found: dict[tuple[str, str, int], Measured] = {}
    for record in _finished(results, "lab_batches"):
        key = (str(record.recipe["batch"]), record.name, seed_of(record))
        if record.memory and (key not in found or _when(record) > _when(found[key][0])):
            found[key] = (record, record.memory)
    rows = [found[key] for key in sorted(found)]
    lines = []
    for record, memory in rows:
        name, *_, phase, predicted, error, reserved = _cells(record, memory)
        lines.append(
            [name, str(record.recipe["batch"]), phase, f"{memory.peak_bytes / GiB:.3f}", predicted, error, reserved]
        )
    header = ["recipe", "batch", "in", "measured GiB", "predicted GiB", "error", "reserved GiB"]
    return table(header, lines, num_text=3) + f"\n\n{_provenance(rows, 'lab_batches')}"


def curve(results: Path) -> str:
    """Speed against device memory, from all layers streamed to none; runs of one sitting, one at a time."""
    rows = sorted(_measured(results, "lab_curve"), key=lambda pair: pair[1].peak_bytes)
    lines = []
    for record, memory in rows:
        name, _, peak, _, predicted, error, _ = _cells(record, memory)
        speed = record.speed.warm_samples_per_s(NUM_COLD_STEPS) if record.speed and record.speed.is_alone else None
        if record.speed is None or speed is None:
            raise BadRecordError(
                f"a run of {record.name} in {results / 'lab_curve'} has no speed of its own: it was short, or beside others; "
                "run it again, or take it away"
            )
        warm_s = sorted(record.speed.step_s[NUM_COLD_STEPS:])
        lines.append(
            [
                name,
                _budget_of(record),
                peak,
                predicted,
                error,
                speed_text(speed),
                f"{warm_s[0]:.2f}, {statistics.median(warm_s):.2f}, {warm_s[-1]:.2f}",
            ]
        )
    header = [
        "recipe",
        "device_memory",
        "peak GiB",
        "predicted GiB",
        "error",
        "warm samples/s",
        "fastest, median, slowest step, s",
    ]
    return table(header, lines, num_text=2) + f"\n\n{_provenance(rows, 'lab_curve')}"


def other_budgets(results: Path) -> str:
    """Compiled recipes under other activation budgets than their own."""
    rows = sorted(_measured(results, "lab_budgets"), key=lambda pair: -pair[1].peak_bytes)
    lines = []
    for record, memory in rows:
        compiling = record.recipe["compile"]
        assert isinstance(compiling, dict), "only compiled runs have a budget"
        by_phase = (f"{memory.by_phase[phase] / GiB:.3f}" for phase in _PHASES)
        lines.append([record.name.rpartition("/")[2], f"{compiling['activation_budget']:.2f}", *by_phase])
    header = ["recipe", "activation_budget", *(f"{phase}, GiB" for phase in _PHASES)]
    return table(header, lines, num_text=1) + f"\n\n{_provenance(rows, 'lab_budgets')}"


def newest_peak(results: Path, name: str, budget: float | None) -> int | None:
    """Measured bytes of a recipe, as it is or compiled under another activation budget; None where there is no run."""
    if budget is None:
        return next((memory.peak_bytes for record, memory in _newest(results) if record.name == name), None)
    runs = _measured(results, "lab_budgets") if (results / "lab_budgets").exists() else []
    found = [pair for pair in runs if pair[0].name == name and _is_under(pair[0], budget)]
    return max(found, key=lambda pair: _when(pair[0]))[1].peak_bytes if found else None


def predicted(results: Path) -> str:
    """Recipes under other settings, predicted."""
    record = newest(results / "lab_predicted", SCHEMA)
    rows: list[dict[str, Any]] = record.rows("rows", ("name", "setting", "peak_bytes", "peak_phase"))
    lines = [[row["name"], f"`{row['setting']}`", row["peak_phase"], f"{row['peak_bytes'] / GiB:.3f}"] for row in rows]
    return table(["recipe", "--set", "in", "predicted GiB"], lines, num_text=3) + f"\n\n{sources([record])}"


def peak_memory(results: Path) -> str:
    """The rows of the published Peak Memory table, predicted for its GPU and torch."""
    record = newest(results / "peak_memory", "lowtide.peak_memory/1")
    rows = []
    for row in record.rows("rows", ("name", "published_gib", "predicted_bytes", "peak_phase")):
        published, predicted = row["published_gib"], row["predicted_bytes"]
        if not isinstance(published, int | float) or not isinstance(predicted, int) or published <= 0:
            raise BadRecordError(f"{record.path}: {row['name']!r} needs numbers in published_gib and predicted_bytes")
        error = percent(predicted / GiB / published - 1)
        rows.append([str(row["name"]), str(row["peak_phase"]), f"{published:.3f}", gib(predicted), error])
    header = ["configuration", "peak in", "published GiB", "predicted GiB", "error"]
    return table(header, rows, num_text=2) + f"\n\n{sources([record])}"


def _measured(results: Path, folder: str) -> list[Measured]:
    return [(record, record.memory) for record in _finished(results, folder) if record.memory]


def _is_under(record: RunRecord, budget: float) -> bool:
    compiling = record.recipe["compile"]
    return isinstance(compiling, dict) and compiling["activation_budget"] == budget


def _budget_of(record: RunRecord) -> str:
    plan = record.recipe["plan"]
    assert isinstance(plan, dict), "a run under a budget has a plan"
    return str(plan["device_memory"] or "-")


def _newest(results: Path) -> list[Measured]:
    """The newest run of each recipe, the highest peak first."""
    found: dict[str, Measured] = {}
    for record in _finished(results):
        if record.memory and (record.name not in found or _when(record) > _when(found[record.name][0])):
            found[record.name] = (record, record.memory)
    return sorted(found.values(), key=lambda pair: -pair[1].peak_bytes)


def _finished(results: Path, folder: str = "lab") -> list[RunRecord]:
    """All records of a folder."""
    records = []
    for path in sorted((results / folder).glob("*.json")):
        record = read_record(path)
        if record.memory is None or record.outcome is not Outcome.FINISHED:
            raise BadRecordError(
                f"{path}: the run of {record.name} has no peak ({record.outcome}), and so no place in the results; run it "
                "again, or take the file away"
            )
        records.append(record)
    if not records:
        raise BadRecordError(f"there are no records in {results / folder}; run the lab before its table is rendered")
    return records


def _evaluation_losses(record: RunRecord) -> dict[int, float]:
    """By the step that each evaluation comes after, the last one too."""
    assert record.evaluation_loss is not None, "only runs with one are asked"
    return {**dict(record.evaluations), len(record.losses): record.evaluation_loss}


def _evaluation_samples(record: RunRecord) -> str:
    evaluation = record.recipe.get("evaluation")
    return str(evaluation["samples"]) if isinstance(evaluation, dict) else "-"


def _warm(speed: SpeedFigures) -> bool:
    return speed.warm_samples_per_s() is not None


def _range(spread: Spread) -> str:
    return f"{spread.least:.1f}–{spread.largest:.1f}" if spread.count > 1 else "-"


def _cells(record: RunRecord, memory: MemoryFigures) -> list[str]:
    peak_gib, predicted = _published_gib(record), record.predicted
    # What is predicted is a step of training: an evaluation that is higher says nothing about it.
    trained = memory.training_peak_bytes or memory.peak_bytes
    return [
        record.name.rpartition("/")[2],
        "-" if peak_gib is None else f"{peak_gib:.3f}",
        f"{memory.peak_bytes / GiB:.3f}",
        memory.peak_phase,
        "-" if predicted is None else f"{predicted.peak_bytes / GiB:.3f}",
        "-" if predicted is None else percent(predicted.peak_bytes / trained - 1),
        "-" if memory.reserved_bytes is None else f"{memory.reserved_bytes / GiB:.2f}",
    ]


def _published_gib(record: RunRecord) -> float | None:
    published = record.recipe.get("published")
    peak_gib = published.get("peak_gib") if isinstance(published, dict) else None
    return float(peak_gib) if isinstance(peak_gib, int | float) else None


def _provenance(rows: list[Measured], folder: str = "lab") -> str:
    if not rows:
        raise BadRecordError(f"no record in benchmarks/results/{folder} has a place in this table; run the lab before")
    around = [record.surroundings for record, _ in rows]
    days = sorted(each.date[:10] for each in around)
    return footnote(
        f"Records in `{folder}`. {_unique(each.device for each in around)}, torch "
        f"{_unique(each.torch for each in around)}, commit {_unique(each.commit[:12] for each in around)}, "
        f"{days[0] if days[0] == days[-1] else f'{days[0]} to {days[-1]}'}."
    )


def _unique(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _when(record: RunRecord) -> dt.datetime:
    return dt.datetime.fromisoformat(record.surroundings.date)
