"""What recipes of the lab are predicted to need under other settings, without a GPU: one record.

python -m benchmarks.lab.predict --commit 0123abc
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.records import RESULTS
from lowtide.lab.preflight import predict
from lowtide.lab.recipe_file import find_recipe, resolve_recipe
from lowtide.lab.record import write_json

SCHEMA = "lowtide.lab_predictions/1"
HARDWARE = "h200"
ROWS: tuple[tuple[str, str], ...] = (
    *(("fused_checkpoint", f"plan.activations=recompute/{size}") for size in (1, 2, 4, 6, 8)),
    ("bfloat16", "plan.schedule=deferred"),
)


def main() -> None:
    """Predict each row, and write them beside the other results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=RESULTS / "lab_predicted")
    arguments = parser.parse_args()
    rows = []
    for name, setting in ROWS:
        recipe = resolve_recipe(find_recipe(f"peak_memory/{name}"), [setting]).recipe
        figures = predict(recipe, hardware=HARDWARE, say=lambda _: None)
        rows.append(
            {"name": name, "setting": setting, "peak_bytes": figures.peak_bytes, "peak_phase": figures.peak_phase}
        )
        print(f"{name}, {setting}: {figures.peak_bytes:,} bytes in {figures.peak_phase}", flush=True)
    record = {
        "schema": SCHEMA,
        "hardware": f"{HARDWARE}, predicted without a GPU",
        "torch": torch.__version__,
        "commit": arguments.commit,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    path = arguments.out / f"{time.strftime('%Y-%m-%dT%H%M')}_{arguments.commit}.json"
    write_json(path, record)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
