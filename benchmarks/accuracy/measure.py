"""Measure the accuracy suite on a real GPU: plain torch, no Lowtide code in the measured process.

Except for the cases of `policies`, which are there to measure Lowtide's own policies and its chunked loss.

Each case runs in a process of its own, forked before CUDA starts, so that every run has a fresh allocator. Three runs a case:
`peaks` (nothing attached: the figures), `history` (the allocator's own record of every block) and `ops` (what each
operator allocates beyond its outputs). The last two say *why* a prediction was off; the published figures come from the first.

    python -m benchmarks.accuracy.measure --out results/ [--only llama] [--jobs 4] [--runs peaks]
"""

from __future__ import annotations

import argparse
import gc
import gzip
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.accuracy.cases import Case, held_out, policies, suite
from benchmarks.records import machine
from lowtide.lab.record import write_json

PHASES = ("forward", "backward", "update")
WARMUP_STEPS = 2
MARKER_BYTES = 1001
"""Sizes above this name an instant in the allocator's history: nothing else asks for such a number of bytes."""


def set_up(case: Case) -> tuple[torch.nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    """Model, batch and optimizer as a plain script would have them, over an allocator that has seen nothing else."""
    torch.manual_seed(0)
    with torch.device("cuda"):  # initialising on the GPU is fast; the detour over the host empties the allocator again
        model = case.build()
    model = model.cpu()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()  # the random generator's state: one small block
    assert left <= 4096, f"{left} bytes survived the detour over the host"
    case_model = type(case)(**{**case.__dict__, "build": lambda: model}).make_model()
    case_batch = case.make_batch()
    marker(0)
    case_model.cuda()
    batch = {key: value.cuda() for key, value in case_batch.items()}
    case.apply_settings(case_model)
    return case_model, batch, case.make_optimizer(case_model)


def marker(number: int) -> None:
    """Leave a mark in the allocator's history."""
    if RECORDING:
        torch.empty(MARKER_BYTES + number, dtype=torch.uint8, device="cuda")


RECORDING = False


def step(
    case: Case,
    model: torch.nn.Module,
    batch: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    after: Callable[[str], None] = lambda _: None,
) -> None:
    """The plain training step; `after` is told when a phase has ended."""
    for _ in range(case.accumulate):
        with case.autocast("cuda"):
            loss = model(**batch).loss
        after("forward")
        loss.backward()
        after("backward")
    optimizer.step()
    after("update")
    optimizer.zero_grad()


def run_peaks(case: Case) -> dict[str, Any]:
    model, batch, optimizer = set_up(case)
    for _ in range(WARMUP_STEPS):
        step(case, model, batch, optimizer)
    torch.cuda.reset_peak_memory_stats()
    peaks = dict.fromkeys(PHASES, 0)
    ends = {}

    def after(phase: str) -> None:
        peaks[phase] = max(peaks[phase], torch.cuda.max_memory_allocated())
        ends[phase] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    before = torch.cuda.memory_allocated()
    step(case, model, batch, optimizer, after)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "start": before,
        "peaks": peaks,
        "ends": ends,
        "allocated": max(peaks.values()),
        "reserved": torch.cuda.max_memory_reserved(),
        "requested": torch.cuda.memory_stats()["requested_bytes.all.current"],
        "device_used": total - free,
    }


def run_history(case: Case) -> bytes:
    global RECORDING
    RECORDING = True
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    model, batch, optimizer = set_up(case)
    for number in range(WARMUP_STEPS + 1):
        marker(10 + number * 10)
        step(case, model, batch, optimizer, lambda phase, n=number: marker(11 + n * 10 + PHASES.index(phase)))
    marker(99)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    live: dict[int, int] = {}
    events = []
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = len(events)
            events.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            events.append(-live.pop(entry["addr"]) - 1)
    return zlib.compress(np.array(events, dtype=np.int64).tobytes(), 9)


def describe(value: Any) -> Any:
    """A tensor as `bf16[4, 1024]{strides}`, anything else as itself."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        strides = "" if value.is_contiguous() else "{" + ",".join(map(str, value.stride())) + "}"
        device = "" if value.is_cuda else "@" + value.device.type
        return f"{kind}{list(value.shape)}{strides}{device}"
    return str(value)


class OpRecorder(TorchDispatchMode):
    """What each operator allocates at its highest, and what it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[tuple[str, str, str], tuple[int, int, int]] = {}
        self.order: list[int] = []
        self.index: dict[tuple[str, str, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = "; ".join(str(describe(leaf)) for leaf in tree_flatten((args, kwargs))[0])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **kwargs)
        peak, end = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        outputs = "; ".join(str(describe(leaf)) for leaf in tree_flatten(out)[0])
        key = (str(func), inputs, outputs)
        old = self.table.get(key, (0, 0, 0))
        self.table[key] = (max(old[0], peak), max(old[1], end), old[2] + 1)
        self.order.append(self.index.setdefault(key, len(self.index)))
        return out


def run_ops(case: Case) -> dict[str, Any]:
    model, batch, optimizer = set_up(case)
    for _ in range(WARMUP_STEPS):
        step(case, model, batch, optimizer)
    recorder = OpRecorder()
    with recorder:
        step(case, model, batch, optimizer)
    keys = sorted(recorder.index, key=recorder.index.__getitem__)
    return {"ops": [[*key, *recorder.table[key]] for key in keys], "order": recorder.order}


RUNS: dict[str, Callable[[Case], Any]] = {"peaks": run_peaks, "history": run_history, "ops": run_ops}


def child(case: Case, run: str, path: Path) -> None:
    """Run one measurement and leave its pickle at `path`; never returns."""
    code = 0
    try:
        result = RUNS[run](case)
    except BaseException as error:  # a failed case is a record too
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
        code = 1
    path.write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    os._exit(code)


def measure(
    cases: list[Case], runs: list[str], folder: Path, jobs: int, limit_s: float, deadline_s: float
) -> dict[str, dict[str, Any]]:
    """All cases, `jobs` at a time; a case past its time limit is killed and recorded as such, none starts past the deadline."""
    began = time.monotonic()
    queue = [(case, run) for run in runs for case in cases]
    active: dict[int, tuple[Case, str, Path, float]] = {}
    results: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    total, done = len(queue), 0
    while queue or active:
        if queue and time.monotonic() - began > deadline_s:
            print(f"{len(queue)} runs left out: the deadline of {deadline_s} s is reached", flush=True)
            queue.clear()
        while queue and len(active) < jobs:
            case, run = queue.pop(0)
            path = folder / f"{case.name}.{run}.pickle"
            pid = os.fork()
            if pid == 0:
                child(case, run, path)
            active[pid] = (case, run, path, time.monotonic())
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            for other, (case, run, _path, started) in active.items():
                if time.monotonic() - started > limit_s:
                    print(f"{case.name} {run}: over {limit_s} s, killed", flush=True)
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.02)
            continue
        case, run, path, started = active.pop(pid)
        done += 1
        results[case.name][run] = pickle.loads(path.read_bytes()) if path.exists() else {"error": "killed"}
        path.unlink(missing_ok=True)
        outcome = results[case.name][run]
        note = outcome["error"][:150] if isinstance(outcome, dict) and "error" in outcome else "ok"
        if run == "peaks" and note == "ok":
            note = f"{outcome['allocated'] / 2**20:.0f} MiB, reserved {outcome['reserved'] / 2**20:.0f}"
        print(f"[{done}/{total}] {case.name} {run} {time.monotonic() - started:.1f} s: {note}", flush=True)
    return results


def provenance() -> dict[str, Any]:
    """Versions and hardware of this measurement."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "transformers": __import__("transformers").__version__,
        "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--runs", default="peaks,history,ops")
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--deadline", type=float, default=420)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    import transformers  # noqa: F401  (imported before the forks, once)

    cases = [case for case in suite() + held_out() + policies() if options.only in case.name]
    results = measure(cases, options.runs.split(","), options.out, options.jobs, options.limit, options.deadline)
    facts = provenance()
    peaks = {name: runs.pop("peaks") for name, runs in results.items() if "peaks" in runs}
    write_json(options.out / "peaks.json", {**facts, "cases": peaks})
    with gzip.open(options.out / "details.pickle.gz", "wb", compresslevel=6) as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main()
