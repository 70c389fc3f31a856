"""Predict the rows of the policy suites on a machine without a GPU.

    python -m benchmarks.activations.predict

Writes a record to benchmarks/results/activations_predicted. Nothing measured is read.
"""

from __future__ import annotations

import argparse
import time

import torch

import lowtide
from benchmarks.activations.suites import SUITES
from benchmarks.records import RESULTS, checkout
from benchmarks.session.row import SIZES, build
from lowtide.lab.record import write_json

TORCH = "2.11.0"
"""What the rows are measured under."""


def predict(row: dict[str, object]) -> dict[str, object]:
    """One row: forward and backward without an optimizer, as it is measured."""
    sequences, length = (int(part) for part in str(row["batch"]).split("x"))
    model = build(str(row["model"]), on="meta", recompute=row["kind"] == "checkpoint", positions=length)
    ids = torch.randint(0, SIZES[str(row["model"])]["v"], (sequences, length))
    settings = lowtide.StepSettings(activations=_word(row))
    result = lowtide.trace(
        model, {"input_ids": ids, "labels": ids}, settings=settings, hardware="h200", torch_version=TORCH
    )
    return {
        "name": row["name"],
        "batch": row["batch"],
        "predicted_allocated_bytes": result.peak_bytes,
        "predicted_reserved_bytes": result.peak_reserved_bytes,
        "peak_phase": str(result.peak_phase),
    }


def _word(row: dict[str, object]) -> str | None:
    if "share" in row:
        return f"compile-budget/{row['share']}"
    return str(row["policy"]) if "policy" in row else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default=None)
    arguments = parser.parse_args()
    commit = arguments.commit or checkout()
    rows = []
    for suite in ("policies", "policies_long"):
        for row in SUITES[suite]:
            # Not predicted: torch's own way to the host. Layers compiled one by one under torch's own switch are compiled as
            # under our policy.
            if row["kind"] in ("plain", "checkpoint", "policy", "torch budget"):
                rows.append({"suite": suite, **predict(row)})
                print(rows[-1], flush=True)
    record = {
        "schema": "lowtide.activation_prediction/1",
        "commit": commit,
        "hardware": "H200, predicted without a GPU",
        "torch": TORCH,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    write_json(RESULTS / "activations_predicted" / f"{time.strftime('%Y-%m-%dT%H%M')}_{commit}.json", record)


if __name__ == "__main__":
    main()
