"""The planner against a GPU: plans and their predictions are made first, and measured afterwards.

python -m benchmarks.planner sweep --out benchmarks/results/planner_predicted/NAME.json
python -m benchmarks.planner plan --out FILE [--hardware this] [--sweep benchmarks/results/planner_predicted/NAME.json]
python -m benchmarks.planner measure --planned FILE --out FOLDER --commit 0123abc

`sweep` does not ask the planner: it writes the plans that the planner's are compared with, uniform ones and random mixed ones
whose step fits. `plan` asks it for every cell, predicts the time of the sweep's plans and of steps in a few words, and writes
one file of rows. `measure` trains each row for a few steps, those of one model and batch in one process, and adds what was
measured. `--hardware this` predicts with the calibration of the machine, which `lowtide hardware` makes before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import checkout, machine
from benchmarks.suite import results_together

Row = dict[str, Any]

IN_BACKWARD: Row = {"schedule": "in_backward"}
CLIPPED: Row = {"schedule": "deferred", "max_grad_norm": 1.0}
_BUDGETS: list[tuple[str, str, Row, tuple[str, ...]]] = [
    ("1b", "4x2048", IN_BACKWARD, ("6GiB", "8GiB", "20GiB", "60GiB")),
    ("1b", "4x2048", CLIPPED, ("12GiB",)),
    ("gpt2-xl", "8x1024", IN_BACKWARD, ("8GiB", "12GiB", "24GiB", "60GiB")),
    ("3.14b", "2x2048", IN_BACKWARD, ("8GiB", "24GiB", "48GiB")),
    ("3.14b", "2x2048", CLIPPED, ("24GiB",)),
    ("3.14b", "8x2048", IN_BACKWARD, ("12GiB", "16GiB", "24GiB", "40GiB", "110GiB")),
    ("3.14b", "8x2048", CLIPPED, ("12GiB", "24GiB", "48GiB")),
    ("8b", "4x2048", IN_BACKWARD, ("48GiB", "100GiB", "64GiB", "24GiB")),
    ("8b", "4x2048", CLIPPED, ("48GiB",)),
]
CELLS: list[Row] = [
    {"model": model, "batch": batch, "budget": budget, **words}
    for model, batch, words, budgets in _BUDGETS
    for budget in budgets
]
"""What the planner is asked."""
SWEEP: list[Row] = [
    {"model": model, "batch": batch, "budget": budget, **IN_BACKWARD}
    for model, batch, budgets in (("1b", "4x2048", ("8GiB", "20GiB")), ("3.14b", "8x2048", ("16GiB", "40GiB")))
    for budget in budgets
]
"""Two models with two budgets each, in which the planner's plan is compared with others that were really run."""
_RESIDENT: Row = {"weights": "resident", "update": "device"}
_STREAMED: Row = {"weights": "streamed", "update": "host"}
STEPS: list[Row] = [
    *({"model": "1b", "batch": batch, "kind": "plain"} for batch in ("1x2048", "4x2048", "8x2048")),
    {"model": "1b", "batch": "4x2048", "kind": "plain", "recompute": True},
    {"model": "3.14b", "batch": "8x2048", "kind": "plain", "recompute": True},
    {"model": "3.14b", "batch": "8x2048", "kind": "plain"},
    {"model": "3.14b", "batch": "8x2048", **_RESIDENT, "precision": None},
    {"model": "launch-bound", "batch": "2x64", "kind": "plain"},
    {"model": "launch-bound", "batch": "2x64", **_RESIDENT, "precision": None},
    {"model": "launch-bound", "batch": "2x64", **_STREAMED, **IN_BACKWARD},
    {"model": "many launches", "batch": "1x16", "kind": "plain"},
    {"model": "many launches", "batch": "1x16", **_STREAMED},
    {"model": "1b", "batch": "8x2048", **_RESIDENT, "activations": "offload"},
    {"model": "1b", "batch": "8x2048", **_RESIDENT, "activations": "recompute"},
    {"model": "1b", "batch": "1x2048", **_STREAMED, **IN_BACKWARD},
]
"""Plain steps and small ones, without a budget, for the prediction of times."""
_EXACT: Row = {"optimizer": "adamw", "precision": "bf16 exact", "recompute": False, "warm_up": 2, "steps": 8}
_NUM_SWEPT, _LEAST_MIXED, _MOST_DRAWN = 10, 3, 40
_HOST_MEMORY = "100GiB"
_POLICIES = ("keep", "selective", "recompute", "offload")
_NUM_JOBS = 8
_TIMEOUT_S = 120.0


def sweep_cells(out: Path) -> None:
    """Write the plans of the sweep, with no word from the planner: all uniform ones that fit, and random mixed ones."""
    from lowtide.memory.groups import find_groups

    rows: list[Row] = []
    for number, cell in enumerate(SWEEP):
        model, _ = _model_and_batch(cell)
        names = [group.name for group in find_groups(model) if group.is_block]
        uniform = [
            {"weights": weights, "update": update, "activations": policy}
            for policy, weights, update in itertools.product(_POLICIES, ("resident", "streamed"), ("device", "host"))
        ]
        fitting = [row for words in uniform if (row := _row_if_it_fits(cell, words, "uniform"))]
        wanted = max(_NUM_SWEPT, len(fitting) + _LEAST_MIXED)
        random.seed(number)
        for _ in range(_MOST_DRAWN):
            if len(fitting) == wanted:
                break
            if row := _row_if_it_fits(cell, _random_words(names), "mixed"):
                fitting.append(row)
        rows += fitting
        print(
            f"{cell}: {len(fitting)} plans, {sum(row['kind_of_plan'] == 'uniform' for row in fitting)} of them uniform"
        )
    _write(out, rows)


def _random_words(names: list[str]) -> Row:
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


def _row_if_it_fits(cell: Row, words: Row, kind: str) -> Row | None:
    """The row of a plan whose predicted step stays inside the cell's budget."""
    import lowtide
    from lowtide.planning.plan import plan_to_json
    from lowtide.units import parse_bytes

    model, batch = _model_and_batch(cell)
    budget = {"device_memory": cell["budget"], "host_memory": _HOST_MEMORY, "schedule": cell["schedule"]}
    try:
        plan = lowtide.make_plan(model, **words, **budget)
        traced = lowtide.trace(
            model,
            batch,
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


def plan_all(out: Path, hardware: str, swept: Path | None, match: str) -> None:
    """Plan every cell, predict the sweep's plans and the steps in a few words, and write all rows."""
    others = [] if swept is None else json.loads(swept.read_text())["rows"]
    jobs: list[tuple[Row, list[Row]]] = [(step, []) for step in STEPS]
    jobs += [(cell, [row for row in others if all(row.get(key) == cell[key] for key in cell)]) for cell in CELLS]
    jobs = [job for job in jobs if match in _name(job[0])]
    rows: dict[str, Row] = {}
    with ProcessPoolExecutor(max_workers=_NUM_JOBS) as pool:
        for found in pool.map(_plan_job, jobs, itertools.repeat(hardware)):
            rows |= {row["name"]: row for row in found}
            for row in found:
                print(
                    f"{row['name']}: {row['predicted_s']:.3f} s, {row['predicted_reserved_bytes'] / 2**30:.2f} GiB",
                    flush=True,
                )
    _write(out, list(rows.values()))


def _plan_job(job: tuple[Row, list[Row]], hardware: str) -> list[Row]:
    """The planner's row for one cell and, predicted with the same costs, the rows of other plans for it."""
    cell, others = job
    if "budget" not in cell:
        return [_predicted_step(cell, hardware)]
    import lowtide
    from lowtide.planning.plan import plan_from_json, plan_to_json

    model, batch = _model_and_batch(cell)
    begun = time.perf_counter()
    try:
        found = lowtide.plan(
            model,
            batch,
            optimizer=torch.optim.AdamW,
            device_memory=cell["budget"],
            host_memory=_HOST_MEMORY,
            hardware=hardware,
            torch_version="2.11.0",
            precision="bf16 exact",
            schedule=cell["schedule"],
            max_grad_norm=cell.get("max_grad_norm"),
        )
    except lowtide.errors.PlanError as error:
        print(f"{cell}: {error}")
        return []
    rows = [
        {
            **cell,
            "name": _name(cell),
            "kind_of_plan": "planner",
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
    ]
    for number, other in enumerate(others):
        step = found.simulate(plan_from_json(other["plan"]))
        row = {**other, "name": f"{_name(cell)}, {other['kind_of_plan']} {number}", "predicted_s": step.step_s}
        rows.append({**row, "bound_by": step.bound_by})
    return rows


def _predicted_step(step: Row, hardware: str) -> Row:
    import lowtide
    from benchmarks.session.row import plan_of
    from lowtide.tracing.step_trace import step_time

    model, batch = _model_and_batch(step)
    precision = step.get("precision", "bf16 exact")
    traced: Row = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, fused=True), "hardware": hardware}
    if step.get("kind") == "plain":
        traced = lowtide.trace(model, batch, torch_version="2.11.0", **traced)
        time_of = step_time(traced)
        assert time_of is not None, "the hardware's rates are known"
        predicted = {"predicted_s": time_of.step_s, "bound_by": time_of.bound_by}
    else:
        found = lowtide.plan(
            model,
            batch,
            host_memory=_HOST_MEMORY,
            torch_version="2.11.0",
            precision=precision,
            schedule=step.get("schedule", "deferred"),
            **traced,
        )
        plan = plan_of(step, model)
        simulated = found.simulate(plan)
        predicted = {"predicted_s": simulated.step_s, "bound_by": simulated.bound_by}
        traced = lowtide.trace(model, batch, plan=plan, torch_version="2.11.0", precision=precision, **traced)
    return {**step, "name": _name(step), "predicted_reserved_bytes": traced.peak_reserved_bytes, **predicted}


def measure(planned: Path, out: Path, commit: str, limit_s: float, match: str) -> None:
    """Train each planned row for a few steps; a row that fails is a row too."""
    from lowtide.lab.record import write_json
    from lowtide.units import parse_bytes

    begun = time.perf_counter()
    predicted = json.loads(planned.read_text(encoding="utf-8"))
    rows = [
        {"kind": "managed", **_EXACT, **row, "stays_on_device": parse_bytes(row.get("budget", "1TiB")) > 20 << 30}
        for row in predicted["rows"]
        if match in row["name"]
    ]
    record: Row = {
        "schema": "lowtide.planner_benchmark/2",
        "commit": commit,
        "planned": planned.name,
        "predicted_at": predicted["date"],
        "predicted_for": predicted.get("hardware"),
        "hardware": {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **machine()},
        "torch": torch.__version__,
        "date": _now(),
        "rows": [],
    }
    path = out / f"planner_{datetime.now(UTC):%Y-%m-%dT%H%M}_h200_{commit}.json"
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: (row["model"], row["batch"]))]
    for result in results_together("benchmarks.session.row", groups, _TIMEOUT_S):
        result.pop("stats", None)
        result.pop("plan", None)
        record["rows"].append(result)
        write_json(path, record)
        print(_line(result), flush=True)
        if time.perf_counter() - begun > limit_s:
            print("the time is over")
            break


def _line(row: Row) -> str:
    if "failed" in row:
        return f"{row['name']}: {row['failed']} {row.get('message', '')[:300]}"
    off = row["predicted_s"] / row["median_s"] - 1
    reserved = row["predicted_reserved_bytes"] / row.get("max_reserved_bytes", float("nan")) - 1
    times = f"predicted {row['predicted_s']:.3f} s, measured {row['median_s']:.3f} s ({off:+.1%})"
    return f"{row['name']}: {times}; reserved {reserved:+.2%}"


def _name(row: Row) -> str:
    words = [row["model"], row["batch"], row.get("budget"), row.get("kind"), row.get("weights"), row.get("update")]
    words += [row.get("activations"), "recompute" if row.get("recompute") else None]
    words += [
        "in backward" if row.get("schedule") == "in_backward" else None,
        "clipped" if "max_grad_norm" in row else None,
    ]
    return " ".join(word for word in words if word)


def _model_and_batch(row: Row) -> tuple[Any, Row]:
    from benchmarks.session.row import build

    sequences, length = (int(part) for part in row["batch"].split("x"))
    ids = torch.zeros(sequences, length, dtype=torch.int64)
    return build(row["model"], on="meta", recompute=row.get("recompute", False)), {"input_ids": ids, "labels": ids}


def _write(out: Path, rows: list[Row]) -> None:
    from lowtide.lab.record import write_json

    write_json(out, {"schema": "lowtide.planned/1", "commit": checkout(), "date": _now(), "rows": rows})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    """Sweep, plan or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    sweeping = commands.add_parser("sweep")
    sweeping.set_defaults(job=lambda given: sweep_cells(given.out))
    planning = commands.add_parser("plan")
    planning.add_argument("--hardware", default="h200")
    planning.add_argument("--sweep", type=Path)
    planning.set_defaults(job=lambda given: plan_all(given.out, given.hardware, given.sweep, given.match))
    measuring = commands.add_parser("measure")
    measuring.add_argument("--planned", type=Path, required=True)
    measuring.add_argument("--commit", required=True)
    measuring.add_argument("--limit", type=float, default=540.0, help="seconds after which no row is begun")
    measuring.set_defaults(job=lambda given: measure(given.planned, given.out, given.commit, given.limit, given.match))
    for command in (sweeping, planning, measuring):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--match", default="", help="only rows whose name has this in it")
    given = parser.parse_args()
    given.job(given)


if __name__ == "__main__":
    main()
