"""Tables of the budget sweep and of its check against compiled code."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path

from benchmarks.records import footnote, gib, newest, percent, sources, table
from lowtide import config
from lowtide.errors import BadRecordError
from lowtide.lab.budget import BudgetPoint, BudgetSweep, pareto, read_sweep
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import RunRecord, read_record
from lowtide.units import MiB

_CHECK_FIELDS = (
    "name",
    "batch",
    "budget",
    "measured_saved_bytes",
    "static_saved_bytes",
    "measured_peak_bytes",
    "static_peak_bytes",
)


def sweep(results: Path, dtype: str = "float32") -> str:
    """Every point of the newest sweep in a type, beside the runs of the lab that were compiled with such a budget."""
    paths = sorted((results / "budget_sweep").glob(f"*_{dtype}_*.json"))
    if not paths:
        raise BadRecordError(
            f"there are no records of {dtype} in {results / 'budget_sweep'}; run benchmarks.compiled.sweep first"
        )
    found = read_sweep(paths[-1])
    best = {point.budget for point in pareto(found.points)}
    ran = _compiled_runs(results, found)
    header = ["budget", "saved GiB", "peak GiB", "unfused GiB", "computed again", "seconds"]
    header += ["measured GiB", "error", "published GiB"]
    rows = [
        [
            f"**{point.budget:.2f}**" if point.budget in best else f"{point.budget:.2f}",
            gib(point.saved_bytes),
            gib(point.peak_bytes),
            gib(point.unfused_peak_bytes),
            f"{point.recomputed_flops_share:.1%}",
            f"{point.seconds:.1f}",
            *_beside(point, ran.get(point.budget)),
        ]
        for point in found.points
    ]
    provenance = footnote(
        f"Records. {found.model}, {found.batch}, {found.dtype}, torch {found.torch}, one core without a GPU, traced once in "
        f"{found.trace_seconds:.1f} s: `budget_sweep/{paths[-1].stem}`."
    )
    rises = "\n".join(f"- {remark}" for remark in found.remarks if remark.startswith("not monotone"))
    return f"{table(header, rows, num_text=1)}\n\n{provenance}\n\n{rises}".rstrip()


def _compiled_runs(results: Path, swept: BudgetSweep) -> dict[float, RunRecord]:
    """The newest runs of the whole compiled model whose update comes after the backward, by budget."""
    runs = {}
    records = [read_record(path) for path in sorted((results / "lab").glob("*.json"))]
    for path in sorted((results / "lab_budgets").glob("*.json")):
        # What was published of the recipe is of its own budget.
        record = read_record(path)
        records.append(replace(record, recipe={**record.recipe, "published": None}))
    for record in sorted(records, key=lambda record: dt.datetime.fromisoformat(record.surroundings.date)):
        # As it ran: overrides are in the record, and not in the recipe of its name.
        recipe = config.from_plain(Recipe, record.recipe)
        if (recipe.model, recipe.batch, recipe.dtype) != (swept.model, swept.batch, swept.dtype):
            continue
        if recipe.compile is None or recipe.compile.scope != "model" or recipe.plan is None:
            continue
        if recipe.plan.schedule == "deferred":
            budget = recipe.compile.activation_budget
            runs[1.0 if budget is None else budget] = record
    return runs


def _beside(point: BudgetPoint, ran: RunRecord | None) -> list[str]:
    if ran is None or ran.memory is None:
        return ["", "", ""]
    published = ran.recipe.get("published")
    theirs = published.get("peak_gib") if isinstance(published, dict) else None
    # An evaluation that is higher says nothing about a step.
    measured = ran.memory.training_peak_bytes or ran.memory.peak_bytes
    error = percent(point.peak_bytes / measured - 1)
    return [gib(measured), error, "" if theirs is None else f"{theirs:.3f}"]


def check(results: Path) -> str:
    """Compiled code on the host against what was read off the graph."""
    record = newest(results / "budget_check", "lowtide.budget_check/1")
    rows = []
    for row in record.rows("rows", _CHECK_FIELDS):
        number = {key: value for key, value in row.items() if isinstance(value, int | float)}
        rows.append(
            [
                f"{row['name']}, {row['batch']}",
                f"{number['budget']:.2f}",
                f"{number['measured_saved_bytes']:,}",
                f"{number['static_saved_bytes']:,}",
                f"{number['measured_peak_bytes'] / MiB:.2f}",
                f"{number['static_peak_bytes'] / MiB:.2f}",
                percent(number["static_peak_bytes"] / number["measured_peak_bytes"] - 1),
            ]
        )
    header = ["model", "budget", "saved bytes", "static", "peak MiB", "static", "error"]
    return f"{table(header, rows, num_text=1)}\n\n{sources([record])}"
