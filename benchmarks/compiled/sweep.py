"""Sweep torch's activation memory budget over Deep One at 4 x 768, from 0 to 1, without a GPU.

python -m benchmarks.compiled.sweep [float32 | bfloat16]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from benchmarks.records import RESULTS
from lowtide.lab.budget import run_sweep, write_sweep
from lowtide.lab.progress import Progress
from lowtide.lab.recipe import Recipe
from lowtide.units import GiB

RECIPE = Recipe(model="deep-one-1.6b", batch="4x768", plan=None)
# Finer where the peak is smallest.
BUDGETS = (*(number / 20 for number in range(21)), 0.06, 0.07, 0.08, 0.09)


def say(progress: Progress) -> None:
    print(f"{progress.step}/{progress.steps} {progress.words}", flush=True)


def main(dtype: str = "float32") -> None:
    sweep = run_sweep(replace(RECIPE, dtype=dtype), BUDGETS, on_progress=say)
    for point in sweep.points:
        print(
            f"budget {point.budget:4.2f} saved {point.saved_bytes / GiB:6.3f} peak {point.peak_bytes / GiB:6.3f} "
            f"unfused {point.unfused_peak_bytes / GiB:6.3f} recomputed {point.recomputed_flops_share:6.1%} "
            f"{point.seconds:5.1f} s"
        )
    print("\n".join(sweep.remarks))
    version = sweep.torch.partition("+")[0]
    write_sweep(
        sweep,
        RESULTS / "budget_sweep" / f"{time.strftime('%Y-%m-%d')}_{sweep.model}_{sweep.dtype}_torch-{version}.json",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
