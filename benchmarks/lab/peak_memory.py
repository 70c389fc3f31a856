"""Predict the six eager rows of the published Peak Memory table (RTX 4090, torch 2.8, norms as separate operators).

    python -m benchmarks.lab.peak_memory

The published runs are reproduced as they were: Deep One, batch 4 x 768, Adafactor without momentum, and for the `bfloat16` row
fusion as well, which its text leaves out. Fusion means the update in the backward.
"""

from __future__ import annotations

import time

import torch

import lowtide
from benchmarks.records import RESULTS, checkout
from lowtide.lab.record import write_json
from lowtide.models import resolve_model
from lowtide.optim.optimizers import Adafactor
from lowtide.tracing.settings import UpdateSchedule

ROWS: dict[str, tuple[float, bool, bool, bool]] = {
    # name: published GiB, bf16, recompute, fused
    "control": (21.165, False, False, False),
    "optimizer fusion": (21.164, False, False, True),
    "activation checkpoint": (12.529, False, True, False),
    "fused + checkpoint": (7.425, False, True, True),
    "bfloat16 (+ fused)": (12.418, True, False, True),
    "bf16 + fused + checkpoint": (3.975, True, True, True),
}


def trace(bf16: bool, recompute: bool, fused: bool) -> lowtide.StepTrace:
    """One configuration of the experiment on its own GPU and torch version."""
    source = resolve_model("deep-one-1.6b", recompute=recompute)
    return lowtide.trace(
        source.build(torch.bfloat16 if bf16 else torch.float32),
        source.make_batch("4x768"),
        optimizer=Adafactor,
        settings=lowtide.StepSettings(update=UpdateSchedule.IN_BACKWARD if fused else UpdateSchedule.DEFERRED),
        hardware="rtx-4090",
        torch_version="2.8.0",
        name="deep-one-1.6b",
    )


def main() -> None:
    rows = []
    for name, (published, bf16, recompute, fused) in ROWS.items():
        result = trace(bf16, recompute, fused)
        error = result.peak_bytes / 2**30 / published - 1
        print(
            f"{name:28s} published {published:7.3f} predicted {result.peak_bytes / 2**30:7.3f} ({error:+.2%}) {result.peak_phase}",
            flush=True,
        )
        rows.append(
            {
                "name": name,
                "published_gib": published,
                "predicted_bytes": result.peak_bytes,
                "peak_phase": str(result.peak_phase),
                "at_peak": {str(category): nbytes for category, nbytes in result.at_peak.items()},
            }
        )
    commit = checkout()
    record = {
        "schema": "lowtide.peak_memory/1",
        "commit": commit,
        "hardware": "RTX 4090 (published), predicted without a GPU",
        "torch": "2.8.0",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    stamp = time.strftime("%Y-%m-%dT%H%M")
    write_json(RESULTS / "peak_memory" / f"{stamp}_rtx-4090_{commit}.json", record)


if __name__ == "__main__":
    main()
