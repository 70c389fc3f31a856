"""The `fresh` suite: each step in a process of its own, from the first allocation on, and its prediction made before.

    python -m benchmarks.accuracy.fresh predict --out DIR --commit SHA      on any machine, before the measurement
    python -m benchmarks.accuracy.fresh measure --out DIR --commit SHA      on the GPU
    python -m benchmarks.accuracy.fresh compare PREDICTED.json MEASURED.json

`--list fresh2` takes the second list.

A measured process does what a plain script does: it builds the model on the host, moves it to the GPU and trains three steps.
The first two commands write one record each. The measurement also writes `details.pickle.gz`, which is not a record: all allocator
events and what each operator allocates, in the first and the third step, to find out why a prediction was off.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import subprocess
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.fresh_cases import fresh, fresh2
from benchmarks.accuracy.measure import PHASES, OpRecorder, provenance, step
from lowtide.lab.record import write_json

STEPS = 3
ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free")
LISTS = {"fresh": fresh, "fresh2": fresh2}
MEASURED_SCHEMA, PREDICTED_SCHEMA = "lowtide.fresh/1", "lowtide.fresh_predicted/1"


def start(case: Case) -> tuple[torch.nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    """Model, batch and optimizer; nothing has been on the GPU before."""
    torch.manual_seed(0)
    model = case.make_model().cuda()
    batch = {key: value.cuda() for key, value in case.make_batch().items()}
    return model, batch, case.make_optimizer(model)


def run_life(case: Case) -> dict[str, Any]:
    """Peaks of each phase of each step, the segments at the end, and the history of the allocator."""
    torch.cuda.init()
    # The history is kept in host memory and changes no allocation.
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    model, batch, optimizer = start(case)
    state = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    steps: list[dict[str, Any]] = []
    moments = [time.time_ns() // 1000]

    def after(phase: str) -> None:
        facts = steps[-1]
        facts[phase] = max(facts.get(phase, 0), torch.cuda.max_memory_allocated())
        facts["reserved"] = max(facts.get("reserved", 0), torch.cuda.max_memory_reserved())
        moments.append(time.time_ns() // 1000)
        torch.cuda.reset_peak_memory_stats()

    for _ in range(STEPS):
        steps.append({})
        step(case, model, batch, optimizer, after)
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    owned = {tensor.untyped_storage().data_ptr() for tensor in kept(model, batch, optimizer)}
    return {
        "state": state,
        "steps": steps,
        "allocated_life": max(facts[phase] for facts in steps for phase in PHASES),
        "reserved_life": max(facts["reserved"] for facts in steps),
        "allocated_steady": max(steps[-1][phase] for phase in PHASES),
        "reserved_steady": steps[-1]["reserved"],
        "num_retries": statistics["num_alloc_retries"],
        "segments": [
            [each["total_size"], each["allocated_size"], each["stream"], each["segment_type"]]
            for each in snapshot["segments"]
        ],
        # What stays allocated and belongs to no tensor of the script: workspaces, the generator's state.
        "others": [
            [block["size"], block.get("requested_size", 0), each["total_size"], each["stream"]]
            for each in snapshot["segments"]
            for block in each["blocks"]
            if block["state"] == "active_allocated" and block["address"] not in owned
        ],
        "history": packed(snapshot["device_traces"][0]),
        "moments_us": moments,
    }


def kept(model: torch.nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors the script holds between two steps."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *batch.values(), *states]
    return [tensor for tensor in tensors if tensor.is_cuda]


def packed(entries: list[dict[str, Any]]) -> bytes:
    """Allocator events as rows of (action, address, size, stream, microseconds), compressed."""
    rows = [
        (ACTIONS.index(entry["action"]), entry["addr"], entry["size"], entry["stream"], entry["time_us"])
        for entry in entries
        if entry["action"] in ACTIONS
    ]
    return zlib.compress(np.array(rows, dtype=np.int64).tobytes(), 9)


def run_ops(case: Case) -> dict[str, Any]:
    """What each operator allocates beyond its outputs, in the first step and in the last."""
    model, batch, optimizer = start(case)
    found = {}
    for number in range(STEPS):
        if number in (0, STEPS - 1):
            recorder = OpRecorder()
            with recorder:
                step(case, model, batch, optimizer)
            keys = sorted(recorder.index, key=recorder.index.__getitem__)
            found[f"step {number + 1}"] = {
                "ops": [[*key, *recorder.table[key]] for key in keys],
                "order": recorder.order,
            }
        else:
            step(case, model, batch, optimizer)
    return found


RUNS = {"life": run_life, "ops": run_ops}


def child(case: Case, run: str, path: Path) -> None:
    """One measurement; its pickle lies at `path` afterwards, also where it failed."""
    try:
        result = RUNS[run](case)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
    path.write_bytes(pickle.dumps(result))


def measure(cases: list[Case], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All processes, some beside each other; a peak is its own process's."""
    began_s = time.monotonic()
    queue = [(case.name, run) for run in options.runs.split(",") for case in cases]
    active: dict[tuple[str, str], tuple[subprocess.Popen[bytes], float]] = {}
    results: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    while queue or active:
        while queue and len(active) < options.jobs and time.monotonic() - began_s < options.deadline:
            name, run = queue.pop(0)
            path = options.out / f"{name}.{run}.pickle"
            words = [sys.executable, "-m", "benchmarks.accuracy.fresh", "child", options.list, name, run, str(path)]
            active[name, run] = subprocess.Popen(words), time.monotonic()
        if queue and not active:
            print(f"{len(queue)} runs left out: {options.deadline} s are over", flush=True)
            break
        for (name, run), (process, started_s) in list(active.items()):
            if process.poll() is None:
                if time.monotonic() - started_s > options.limit:
                    process.kill()
                continue
            del active[name, run]
            path = options.out / f"{name}.{run}.pickle"
            outcome = pickle.loads(path.read_bytes()) if path.exists() else {"error": f"exit code {process.returncode}"}
            path.unlink(missing_ok=True)
            results[name][run] = outcome
            note = outcome.get("error", "ok")[:200]
            if "reserved_life" in outcome:
                note = f"{outcome['allocated_life'] / 2**20:.0f} MiB, reserved {outcome['reserved_life'] / 2**20:.0f}"
            print(f"{time.monotonic() - began_s:.0f} s: {name} {run}: {note}", flush=True)
        time.sleep(0.05)
    return results


def facts_of(case: Case) -> dict[str, Any]:
    """What a row says about its case."""
    return {
        "name": case.name,
        "family": case.family,
        "precision": case.precision,
        "channels_last": case.channels_last,
        "recompute": case.recompute,
        "optimizer": case.optimizer,
    }


def write_measured(cases: list[Case], options: argparse.Namespace) -> None:
    results = measure(cases, options)
    details: dict[str, Any] = {}
    rows = []
    for case in cases:
        life = results[case.name].pop("life", {"error": "left out"})
        details[case.name] = {**results[case.name], "history": life.pop("history", b"")}
        details[case.name]["moments_us"] = life.pop("moments_us", [])
        rows.append({**facts_of(case), **({"failed": life["error"]} if "error" in life else life)})
    found = provenance()
    head = {"schema": MEASURED_SCHEMA, "commit": options.commit, "hardware": found.pop("gpu").split(",")[0], **found}
    head["date"] = time.strftime("%Y-%m-%d %H:%M")
    write_json(options.out / f"{options.list}_measured_{options.commit[:7]}.json", {**head, "rows": rows})
    with gzip.open(options.out / "details.pickle.gz", "wb", compresslevel=6) as file:
        pickle.dump(details, file)


def write_predicted(cases: list[Case], options: argparse.Namespace) -> None:
    import lowtide
    from benchmarks.accuracy.predict import predict

    rows = []
    for case in cases:
        began_s = time.monotonic()
        try:
            trace = predict(case, options.torch)
        except lowtide.errors.LowtideError as error:
            rows.append({**facts_of(case), "failed": str(error)})
        else:
            rows.append(
                {
                    **facts_of(case),
                    "allocated": trace.peak_bytes,
                    "reserved": trace.peak_reserved_bytes,
                    "phases": {str(phase): num_bytes for phase, num_bytes in trace.phase_peaks().items()},
                }
            )
        note = rows[-1].get("failed") or f"{trace.peak_bytes / 2**20:.0f} {trace.peak_reserved_bytes / 2**20:.0f} MiB"
        print(f"{case.name}: {note} ({time.monotonic() - began_s:.1f} s)", flush=True)
    record = {
        "schema": PREDICTED_SCHEMA,
        "commit": options.commit,
        "hardware": "h200",
        "torch": options.torch,
        "predicted_with": f"torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    path = options.out / f"{options.list}_predicted_{options.commit[:7]}.json"
    write_json(path, record)
    print(path)


def compare(predicted: Path, measured: Path) -> None:
    """Errors of allocated and reserved, and their 95th percentiles."""
    before = {row["name"]: row for row in json.loads(predicted.read_text())["rows"]}
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for row in json.loads(measured.read_text())["rows"]:
        guess = before[row["name"]]
        if "failed" in row or "failed" in guess:
            print(f"{row['name']}: failed")
            continue
        words = []
        for side, found in errors.items():
            found.append(guess[side] / row[f"{side}_life"] - 1)
            words.append(f"{side} {row[f'{side}_life'] / 2**20:.0f} MiB {found[-1]:+.2%}")
        print(f"{row['name']}: {', '.join(words)}")
    for side, found in errors.items():
        shares = np.abs(np.array(found))
        median, high = np.percentile(shares, [50, 95])
        print(f"{side}: {len(found)} steps, median {median:.2%}, 95th percentile {high:.2%}, worst {shares.max():.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("predict", "measure"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--commit", required=True)
        command.add_argument("--only", default="")
        command.add_argument("--list", choices=LISTS, default="fresh")
    command.add_argument("--jobs", type=int, default=6)
    command.add_argument("--runs", default="life,ops")
    command.add_argument("--limit", type=float, default=120)
    command.add_argument("--deadline", type=float, default=270)
    commands.choices["predict"].add_argument("--torch", default="2.11.0")
    command = commands.add_parser("compare")
    command.add_argument("predicted", type=Path)
    command.add_argument("measured", type=Path)
    command = commands.add_parser("child")
    command.add_argument("list", choices=LISTS)
    command.add_argument("name")
    command.add_argument("run", choices=RUNS)
    command.add_argument("path", type=Path)
    options = parser.parse_args()
    if options.command == "child":
        child(next(case for case in LISTS[options.list]() if case.name == options.name), options.run, options.path)
    elif options.command == "compare":
        compare(options.predicted, options.measured)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        cases = [case for case in LISTS[options.list]() if options.only in case.name]
        {"predict": write_predicted, "measure": write_measured}[options.command](cases, options)


if __name__ == "__main__":
    main()
