"""The planner against a GPU: plans and their predictions are made first, on any machine, and measured later.

python -m benchmarks.planner sweep --out benchmarks/results/planner_predicted/NAME.json
python -m benchmarks.planner plan --out benchmarks/results/planner_predicted/NAME.json
python -m benchmarks.planner measure --planned FILE --out FOLDER --commit 0123abc

`plan` asks the planner. `sweep` does not: it writes the plans that the planner's are compared with, uniform ones and random
mixed ones whose step fits. Each row has a plan, its predicted peak and, from the planner, the predicted time of its step. The
last command trains each for a few steps, in one process, and adds what was measured.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.records import checkout, machine
from benchmarks.session.row import build, run
from lowtide.lab.record import json_text
from lowtide.memory.groups import find_groups
from lowtide.planning.plan import plan_to_json
from lowtide.units import parse_bytes

IN_BACKWARD: dict[str, Any] = {"schedule": "in_backward"}
CLIPPED: dict[str, Any] = {"schedule": "deferred", "max_grad_norm": 1.0}
CELLS: list[dict[str, Any]] = [
    *(
        {"model": "3.14b", "batch": "8x2048", "budget": budget, **IN_BACKWARD}
        for budget in ("12GiB", "16GiB", "24GiB", "48GiB", "110GiB")
    ),
    *({"model": "3.14b", "batch": "8x2048", "budget": budget, **CLIPPED} for budget in ("12GiB", "24GiB", "48GiB")),
    *({"model": "3.14b", "batch": "2x2048", "budget": budget, **IN_BACKWARD} for budget in ("8GiB", "24GiB", "48GiB")),
    {"model": "3.14b", "batch": "2x2048", "budget": "24GiB", **CLIPPED},
    *({"model": "1b", "batch": "4x2048", "budget": budget, **IN_BACKWARD} for budget in ("6GiB", "12GiB", "40GiB")),
    {"model": "1b", "batch": "4x2048", "budget": "12GiB", **CLIPPED},
    *({"model": "8b", "batch": "4x2048", "budget": budget, **IN_BACKWARD} for budget in ("48GiB", "100GiB", "24GiB")),
    {"model": "8b", "batch": "4x2048", "budget": "48GiB", **CLIPPED},
]
"""Models, batches and budgets; the most telling ones first, because time on a GPU may run out."""
SWEEP: list[dict[str, Any]] = [
    {"model": model, "batch": batch, "budget": budget, **IN_BACKWARD}
    for model, batch, budgets in (("1b", "4x2048", ("8GiB", "20GiB")), ("3.14b", "8x2048", ("16GiB", "40GiB")))
    for budget in budgets
]
"""Two models with two budgets each, in which the planner's plan is compared with others that were really run."""
_NUM_SWEPT, _LEAST_MIXED, _MOST_DRAWN = 10, 3, 40
_HOST_MEMORY = "100GiB"
_POLICIES = ("keep", "selective", "recompute", "offload")


def plan_cells(out: Path) -> None:
    """Plan every cell, and write the plans with what they predict."""
    rows = []
    for cell in CELLS:
        model = build(cell["model"], on="meta", recompute=False)
        sequences, length = (int(part) for part in cell["batch"].split("x"))
        ids = torch.zeros(sequences, length, dtype=torch.int64)
        begun = time.perf_counter()
        try:
            found = lowtide.plan(
                model,
                {"input_ids": ids, "labels": ids},
                optimizer=torch.optim.AdamW,
                device_memory=cell["budget"],
                host_memory=_HOST_MEMORY,
                hardware="h200",
                torch_version="2.11.0",
                precision="bf16 exact",
                schedule=cell["schedule"],
                max_grad_norm=cell.get("max_grad_norm"),
            )
        except lowtide.errors.PlanError as error:
            print(f"{cell}: {error}")
            continue
        rows.append(
            {
                **cell,
                "planned_in_s": time.perf_counter() - begun,
                "predicted_s": found.step_s,
                "bound_by": found.simulated.bound_by,
                "predicted_reserved_bytes": found.trace.peak_reserved_bytes,
                "predicted_allocated_bytes": found.trace.peak_bytes,
                "predicted_host_bytes": found.trace.host_bytes,
                "words": list(found.words),
                "best_uniform_s": found.rejected[0].step_s if found.rejected else None,
                "plan": plan_to_json(found.plan),
            }
        )
        print(f"{cell}: {found!r}")
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": "lowtide.planned/1", "commit": checkout(), "date": _now(), "rows": rows}
    out.write_text(json_text(record), encoding="utf-8")


def sweep_cells(out: Path) -> None:
    """Write the plans of the sweep, with no word from the planner: all uniform ones that fit, and random mixed ones."""
    rows: list[dict[str, Any]] = []
    for number, cell in enumerate(SWEEP):
        model = build(cell["model"], on="meta", recompute=False)
        names = [group.name for group in find_groups(model) if group.is_block]
        uniform = [
            {"weights": weights, "update": update, "activations": policy}
            for policy, weights, update in itertools.product(_POLICIES, ("resident", "streamed"), ("device", "host"))
        ]
        fitting = [row for words in uniform if (row := _row_if_it_fits(cell, model, words, "uniform"))]
        wanted = max(_NUM_SWEPT, len(fitting) + _LEAST_MIXED)
        random.seed(number)
        for _ in range(_MOST_DRAWN):
            if len(fitting) == wanted:
                break
            if row := _row_if_it_fits(cell, model, _random_words(names), "mixed"):
                fitting.append(row)
        rows += fitting
        print(
            f"{cell}: {len(fitting)} plans, {sum(row['kind_of_plan'] == 'uniform' for row in fitting)} of them uniform"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": "lowtide.planned/1", "commit": checkout(), "date": _now(), "rows": rows}
    out.write_text(json_text(record), encoding="utf-8")


def _random_words(names: list[str]) -> dict[str, Any]:
    """Words of `make_plan` for each block by itself: how often each is drawn is drawn first."""

    def some(few: str, many: str) -> dict[str, str]:
        share = random.random()
        return {"*": many, **{name: few for name in names if random.random() < share}}

    one, other = random.sample(_POLICIES, 2)
    split = random.randint(0, len(names))
    return {
        "weights": some("resident", "streamed"),
        "update": some("device", "host"),
        "activations": {name: one if index < split else other for index, name in enumerate(names)},
    }


def _row_if_it_fits(cell: dict[str, Any], model: Any, words: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The row of a plan whose predicted step stays inside the cell's budget."""
    budget = {"device_memory": cell["budget"], "host_memory": _HOST_MEMORY, "schedule": cell["schedule"]}
    sequences, length = (int(part) for part in cell["batch"].split("x"))
    ids = torch.zeros(sequences, length, dtype=torch.int64)
    try:
        plan = lowtide.make_plan(model, **words, **budget)
        traced = lowtide.trace(
            model,
            {"input_ids": ids, "labels": ids},
            optimizer=torch.optim.AdamW,
            plan=plan,
            precision="bf16 exact",
            hardware="h200",
            torch_version="2.11.0",
        )
    except lowtide.errors.PlanError:
        return None
    if traced.peak_reserved_bytes > parse_bytes(cell["budget"]):
        return None
    return {
        **cell,
        "kind_of_plan": kind,
        "words": words if kind == "uniform" else [plan.summary],
        "predicted_reserved_bytes": traced.peak_reserved_bytes,
        "predicted_allocated_bytes": traced.peak_bytes,
        "predicted_host_bytes": traced.host_bytes,
        "plan": plan_to_json(plan),
    }


def measure(planned: Path, out: Path, commit: str, limit_s: float) -> None:
    """Train each planned row for a few steps; a row that fails is a row too."""
    begun = time.perf_counter()
    predicted = json.loads(planned.read_text(encoding="utf-8"))
    rows = []
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"planner_{datetime.now(UTC):%Y-%m-%dT%H%M}_h200_{commit}.json"
    for row in sorted(predicted["rows"], key=lambda row: row["batch"] == "8x2048"):  # the short ones first
        if time.perf_counter() - begun > limit_s:
            print("the time is over; left out:", row["model"], row["batch"], row["budget"], row["schedule"])
            continue
        words = {"kind": "managed", "optimizer": "adamw", "precision": "bf16 exact", "recompute": False}
        try:
            measured = run({**row, **words, "warm_up": 2, "steps": 4, "stays_on_device": row["model"] != "8b"})
        except Exception as error:  # an out of memory is a result
            measured = {key: value for key, value in row.items() if key != "plan"} | {
                "error": f"{type(error).__name__}: {error}"
            }
        else:
            del measured["stats"]
        rows.append(measured)
        gc.collect()
        torch.cuda.empty_cache() if torch.cuda.is_available() else None
        record = {
            "schema": "lowtide.planner_benchmark/1",
            "commit": commit,
            "planned": planned.name,
            "hardware": {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **machine()},
            "torch": torch.__version__,
            "date": _now(),
            "rows": rows,
        }
        path.write_text(json_text(record), encoding="utf-8")
        print(_line(measured), flush=True)


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['batch']} {row['budget']} {row['schedule']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    off = row["predicted_s"] / row["median_s"] - 1
    reserved = row["predicted_reserved_bytes"] / row.get("max_reserved_bytes", float("nan")) - 1
    return f"{name}: predicted {row['predicted_s']:.3f} s, measured {row['median_s']:.3f} s ({off:+.1%}); reserved {reserved:+.2%}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    """Plan or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    planning = commands.add_parser("plan")
    planning.add_argument("--out", type=Path, required=True)
    planning.set_defaults(job=lambda given: plan_cells(given.out))
    sweeping = commands.add_parser("sweep")
    sweeping.add_argument("--out", type=Path, required=True)
    sweeping.set_defaults(job=lambda given: sweep_cells(given.out))
    measuring = commands.add_parser("measure")
    measuring.add_argument("--planned", type=Path, required=True)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--commit", required=True)
    measuring.add_argument("--limit", type=float, default=540.0, help="seconds after which no row is begun")
    measuring.set_defaults(job=lambda given: measure(given.planned, given.out, given.commit, given.limit))
    given = parser.parse_args()
    given.job(given)


if __name__ == "__main__":
    main()
