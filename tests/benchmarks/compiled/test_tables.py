"""The sweep's table in the documentation, beside the runs that belong to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.compiled.tables import sweep
from lowtide.lab.budget import BudgetPoint, BudgetSweep, write_sweep
from lowtide.lab.record import MemoryFigures, RunRecord, write_record
from lowtide.units import GiB
from tests.lab.report.samples import SURROUNDINGS, record

POINT = BudgetPoint(
    budget=0.5,
    saved_bytes=GiB,
    peak_bytes=2 * GiB,
    unfused_peak_bytes=3 * GiB,
    recomputed_flops_share=0.0,
    seconds=1.0,
)
SWEPT = BudgetSweep(
    model="deep-one-tiny", batch="2x32", dtype="float32", torch="2.13.0", trace_seconds=1.0, points=(POINT,)
)


def ran(peak_gib: int, *, date: str = SURROUNDINGS.date, budget: float = 0.5, **recipe: Any) -> RunRecord:
    """A compiled run, of a recipe that has another budget without its overrides."""
    compiled = {"scope": "model", "activation_budget": budget, "backend": "inductor"}
    settings = {"model": "deep-one-tiny", "batch": "2x32", "compile": compiled, "plan": {"schedule": "deferred"}}
    made = record("peak_memory/memory_budget_05", peak_bytes=peak_gib * GiB, recipe={**settings, **recipe})
    return replace(made, surroundings=replace(SURROUNDINGS, date=date))


def row(folder: Path, *records: RunRecord) -> list[str]:
    """What stands beside the point: measured, error, published."""
    write_sweep(SWEPT, folder / "budget_sweep" / "2026-03-01_deep-one-tiny_float32_torch-2.13.0.json")
    for number, each in enumerate(records):
        write_record(each, folder / "lab" / f"{number}.json")
    (line,) = (line for line in sweep(folder).splitlines() if line.startswith("| **0.50** |"))
    return [cell.strip() for cell in line.split("|")[7:-1]]


def test_runs_count_by_what_they_ran_with(tmp_path: Path) -> None:
    others = (ran(5, budget=0.05), ran(6, model="deep-one-1.6b"), ran(7, batch="4x32"), ran(8, dtype="bfloat16"))
    assert row(tmp_path, ran(4), *others) == ["4.000", "-50.00%", ""]


def test_the_newest_run_counts(tmp_path: Path) -> None:
    assert row(tmp_path, ran(4, date="2026-03-02T10:00:00+00:00"), ran(5))[0] == "4.000"


def test_an_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    figures = MemoryFigures(peak_bytes=4 * GiB, by_phase={"backward": 2 * GiB, "evaluation": 4 * GiB})
    assert row(tmp_path, replace(ran(4), memory=figures)) == ["2.000", "+0.00%", ""]
