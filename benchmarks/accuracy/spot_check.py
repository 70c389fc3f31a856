"""Predict some cases of the suite with the torch that is installed, and set them beside a measured record.

    python -m benchmarks.accuracy.spot_check benchmarks/results/measured/FILE.json [NAME ...]

The record of the suite is predicted with one torch version for another; this shows that the others predict the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.accuracy.cases import held_out, suite
from benchmarks.accuracy.predict import row

DEFAULT = (
    "llama-bf16-loop", "llama-autocast", "llama-bf16-adafactor", "gpt2-fp32-recompute", "bert-autocast", "mixtral-bf16", "t5-bf16",
    "resnet-autocast", "unet-fp32", "nn-transformer-bf16", "swin-autocast", "llama-bf16-accumulate",
)  # fmt: skip


def main() -> None:
    measured = json.loads(Path(sys.argv[1]).read_text())
    names = sys.argv[2:] or DEFAULT
    print("torch", torch.__version__)
    for case in [*suite(), *held_out()]:
        if case.name in names:
            facts = row(case, measured["cases"][case.name], measured["torch"].split("+")[0])
            if facts["predicted_allocated_bytes"] is None:
                print(case.name, "failed:", facts["error"])
                continue
            errors = [
                facts[f"predicted_{side}_bytes"] / facts[f"measured_{side}_bytes"] - 1
                for side in ("allocated", "reserved")
            ]
            print(f"{case.name}: allocated {errors[0]:+.2%}, reserved {errors[1]:+.2%}", flush=True)


if __name__ == "__main__":
    main()
