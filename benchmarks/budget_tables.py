"""Tables of the budget sweep and of its check against compiled code."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import gib, newest, percent, table
from lowtide.errors import BadRecordError
from lowtide.lab.budget import BudgetPoint, pareto, read_sweep
from lowtide.lab.recipe_file import find_recipe, read_recipe
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
            f"there are no records of {dtype} in {results / 'budget_sweep'}; run benchmarks.budget_sweep first"
        )
    found = read_sweep(paths[-1])
    best = {point.budget for point in pareto(found.points)}
    ran = _compiled_runs(results, dtype)
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
    file = Path(*paths[-1].parts[-4:])
    provenance = (
        f"From `{file}`: {found.model}, {found.batch}, {found.dtype}, torch {found.torch}; the graph was traced once, in "
        f"{found.trace_seconds:.1f} s, on one core without a GPU. No other budget beats those in bold in both peak and computation."
    )
    rises = "\n".join(f"- {remark}" for remark in found.remarks if remark.startswith("not monotone"))
    return f"{table(header, rows, num_text=1)}\n\n{provenance}\n\n{rises}".rstrip()


def _compiled_runs(results: Path, dtype: str) -> dict[float, RunRecord]:
    """The runs of whole compiled models whose update comes after the backward, by budget."""
    runs = {}
    for path in sorted((results / "lab").glob("*.json")):
        record = read_record(path)
        recipe = read_recipe(find_recipe(record.name))
        if recipe.compile is None or recipe.compile.scope != "model" or recipe.dtype != dtype or recipe.plan is None:
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
    error = percent(point.peak_bytes / ran.memory.peak_bytes - 1)
    return [gib(ran.memory.peak_bytes), error, "" if theirs is None else f"{theirs:.3f}"]


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
    return f"{table(header, rows, num_text=1)}\n\n{record.provenance}"
