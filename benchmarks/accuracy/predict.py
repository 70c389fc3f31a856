"""Predict the accuracy suite on a machine without a GPU and set it beside the measured figures.

    python -m benchmarks.accuracy.predict benchmarks/results/measured/FILE.json [--only llama] [--suite policies]

Writes one record to benchmarks/results/accuracy (or held_out, policies). Nothing is fitted here: the measured file is read after
the prediction has been made.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.accuracy.cases import OPTIMIZERS, Case, held_out, policies, suite
from benchmarks.records import RESULTS, checkout
from lowtide.lab.record import write_json
from lowtide.tracing.step_trace import Phase

SUITES = {"accuracy": suite, "held_out": held_out, "policies": policies}


def predict(case: Case, torch_version: str) -> lowtide.StepTrace:
    """The case's step on an H200 under the torch version it was measured with."""
    with torch.device("meta"):
        model = case.make_model()
    return lowtide.trace(
        model,
        case.make_batch(),
        optimizer=OPTIMIZERS[case.optimizer],
        autocast="bfloat16" if case.precision == "autocast" else None,
        settings=case.settings(),
        hardware="h200",
        torch_version=torch_version,
        name=case.name,
    )


def technique(case: Case) -> str:
    """What is on, in words."""
    words = {
        "recompute": case.recompute,
        case.activations or "": case.activations is not None,
        "chunked loss": case.chunked_loss,
        f"accumulate {case.accumulate}": case.accumulate > 1,
        "frozen": bool(case.frozen),
        "channels last": case.channels_last,
        "eager attention": "eager-attention" in case.name,
    }
    return ", ".join(word for word, is_on in words.items() if is_on) or "-"


def row(case: Case, measured: dict[str, Any], torch_version: str) -> dict[str, Any]:
    """One case of the record."""
    facts: dict[str, Any] = {
        "name": case.name,
        "family": case.family,
        "precision": case.precision,
        "technique": technique(case),
        "optimizer": case.optimizer,
    }
    started = time.perf_counter()
    try:
        trace = predict(case, torch_version)
    except lowtide.errors.LowtideError as error:
        predicted = {
            "predicted_allocated_bytes": None,
            "predicted_reserved_bytes": None,
            "predicted_peak_phase": "failed",
            "error": str(error),
        }
    else:
        phase = trace.peak_phase
        predicted = {
            "predicted_allocated_bytes": trace.peak_bytes,
            "predicted_reserved_bytes": trace.peak_reserved_bytes,
            # The harness measures forward and loss together.
            "predicted_peak_phase": str(Phase.FORWARD if phase is Phase.LOSS else phase),
            "predicted_phase_peaks": {str(p): b for p, b in trace.phase_peaks().items()},
            "named_share": sum(a.bytes for a in trace.alive_at(trace.peak_event) if a.module and a.op)
            / trace.peak_bytes,
        }
    peaks = measured["peaks"]
    return {
        **facts,
        **predicted,
        "predicting_s": round(time.perf_counter() - started, 2),
        "measured_allocated_bytes": measured["allocated"],
        "measured_reserved_bytes": measured["reserved"],
        "measured_peak_phase": max(peaks, key=peaks.__getitem__),
        "measured_phase_peaks": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--suite", default="accuracy", choices=SUITES)
    options = parser.parse_args()
    measured = json.loads(options.measured.read_text())
    version = measured["torch"].split("+")[0]
    cases = [case for case in SUITES[options.suite]() if options.only in case.name]
    rows = []
    for number, case in enumerate(cases, 1):
        rows.append(row(case, measured["cases"][case.name], version))
        last = rows[-1]
        if last["predicted_allocated_bytes"] is None:
            print(f"[{number}/{len(cases)}] {case.name}: {last['error']}", flush=True)
            continue
        errors = [
            last[f"predicted_{side}_bytes"] / last[f"measured_{side}_bytes"] - 1 for side in ("allocated", "reserved")
        ]
        print(f"[{number}/{len(cases)}] {case.name}: allocated {errors[0]:+.2%}, reserved {errors[1]:+.2%}", flush=True)
    commit = checkout()
    record = {
        "schema": "lowtide.accuracy/1",
        "commit": commit,
        "hardware": measured["hardware"],
        "torch": measured["torch"],
        "predicted_with": f"torch {torch.__version__} on a CPU",
        "measured": options.measured.name,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cases": rows,
    }
    path = RESULTS / options.suite / f"{record['date'].replace(' ', 'T').replace(':', '')}_h200_{commit}.json"
    write_json(path, record)
    print(path)


if __name__ == "__main__":
    main()
