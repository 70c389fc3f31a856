"""What the backward of a compiled recipe holds, by the code that the installed torch generates for it, without a card.

python -m benchmarks.inductor.run peak_memory/memory_budget_60 [NAME ...] [--budget 0.05] --out FOLDER --commit 0123abc

Needs a build of torch for CUDA. With torch 2.8 it says what the experiment's compiler did.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.inductor.generate import generate
from benchmarks.inductor.replay import kept_for_reuse, peak_of, read_events
from lowtide.lab.data_recipe import RandomInputs
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.units import GiB

SCHEMA = "lowtide.inductor_code/1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--budget", type=float, help="another activation budget than the recipes'")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    version = torch.__version__.partition("+")[0]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        recipe = replace(read_recipe(find_recipe(name)), data=RandomInputs(), evaluation=None)
        if recipe.compile is None:
            raise SystemExit(f"{name} is not compiled, and has no generated code")
        budget = recipe.compile.activation_budget if arguments.budget is None else arguments.budget
        budget = 1.0 if budget is None else budget
        print(f"{name} at {budget:.2f}: torch {torch.__version__} generates code", flush=True)
        code = generate(recipe, budget)
        events = read_events(code.backward, recipe.dtype)
        as_written, all_reused = peak_of(events).num_bytes, peak_of(kept_for_reuse(events)).num_bytes
        print(f"  the backward holds {as_written / GiB:.3f} GiB, with all reused {all_reused / GiB:.3f}", flush=True)
        record = {
            "schema": SCHEMA,
            "name": name,
            "budget": budget,
            "commit": arguments.commit,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "backward_bytes": as_written,
            "all_reused_bytes": all_reused,
        }
        stem = f"{name.rpartition('/')[2]}_{budget:.2f}_torch-{version}"
        (arguments.out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
