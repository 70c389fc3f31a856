"""What the backward of a compiled recipe holds, by the code that the installed torch generates for it, without a GPU.

python -m benchmarks.inductor.run peak_memory/memory_budget_60 [NAME ...] [--budget 0.05 ...] --out FOLDER --commit 0123abc

Needs a build of torch for CUDA. With torch 2.8 it says what the experiment's compiler did. A recipe takes about a minute.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.inductor.generate import generate_backward
from benchmarks.inductor.record import CodeRecord, budget_of, write
from benchmarks.inductor.replay import peak_bytes, read_events
from benchmarks.inductor.reuse import kept_for_reuse
from lowtide.errors import LowtideError
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.lab.recipe_parts import RandomInputs
from lowtide.units import GiB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--budget", type=float, nargs="+", help="other activation budgets than the recipes'")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    if torch.version.cuda is None:
        raise SystemExit(f"torch {torch.__version__} is a build without CUDA, which generates no code for a GPU")
    # All of them before the first minute is spent.
    try:
        recipes = {name: read_recipe(find_recipe(name)) for name in arguments.names}
    except LowtideError as error:
        raise SystemExit(str(error)) from error
    for name, recipe in recipes.items():
        if recipe.compile is None or recipe.compile.scope != "model":
            raise SystemExit(f"{name} is not compiled as one graph, and has no code to read")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # where a compiler that is stopped leaves its files
        for name, recipe in recipes.items():
            for budget in arguments.budget or [budget_of(recipe)]:
                write(_examine(name, recipe, budget, arguments.commit), arguments.out)


def _examine(name: str, recipe: Recipe, budget: float, commit: str) -> CodeRecord:
    print(f"{name} at {budget:g}: torch {torch.__version__} generates code", flush=True)
    code = generate_backward(replace(recipe, data=RandomInputs(), evaluation=None), budget)
    events = read_events(code, recipe.dtype)
    record = CodeRecord(
        name=name,
        budget=budget,
        torch=torch.__version__,
        commit=commit,
        date=time.strftime("%Y-%m-%d %H:%M"),
        backward_bytes=peak_bytes(events),
        all_reused_bytes=peak_bytes(kept_for_reuse(events)),
    )
    print(
        f"  the backward holds {record.backward_bytes / GiB:.3f} GiB, with all reused {record.all_reused_bytes / GiB:.3f}",
        flush=True,
    )
    return record


if __name__ == "__main__":
    main()
