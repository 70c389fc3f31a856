"""What is alive at the peak of a recipe's steps on a GPU, by size and by the line of code that asked for it.

python -m benchmarks.compiled.peak peak_memory/memory_budget_60 --out FOLDER --commit 0123abc [--budget 0.05]

Meant for compiled recipes: their lines are those of the code that torch generated, which is kept beside the record.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import machine
from lowtide import compat
from lowtide.lab.experiment import run_experiment
from lowtide.lab.progress import Progress
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.lab.recipe_parts import RandomInputs
from lowtide.lab.record import write_json
from lowtide.units import GiB, MiB

SCHEMA = "lowtide.compiled_peak/1"
GENERATED = re.compile(r"/c[a-z0-9]{20,}\.py$")
"""Names of the files that inductor writes."""
MOST_EVENTS = 4_000_000

Event = Mapping[str, Any]
"""An entry of torch's record of the allocator: an action, a block's address, the bytes asked for, and the frames above it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that blocks of the record had at once, and those blocks."""

    num_bytes: int
    blocks: tuple[Event, ...]


def find_peak(events: Iterable[Event]) -> Peak:
    """Replay a record from the first block on."""
    live: dict[int, Event] = {}
    used = highest = 0
    at_peak: tuple[Event, ...] = ()
    rising = False
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            used += event["size"]
            rising = rising or used > highest
        elif event["action"] == "free_completed" and event["addr"] in live:
            if rising and used > highest:
                # Only now: copying what is live at each step of a rise would take hours.
                highest, at_peak = used, tuple(live.values())
            rising = False
            used -= live.pop(event["addr"])["size"]
    if used > highest:
        highest, at_peak = used, tuple(live.values())
    return Peak(highest, at_peak)


def asked_by(frames: Sequence[Mapping[str, Any]]) -> str:
    """Who asked for a block: a line of generated code, or else the innermost line of Python that is not torch's."""
    for frame in frames:
        if GENERATED.search(frame["filename"]):
            return f"{Path(frame['filename']).name}:{frame['line']}"
    for frame in frames:
        if frame["filename"].endswith(".py") and "/torch/" not in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "-"


def rows_of(peak: Peak) -> list[dict[str, Any]]:
    """Blocks of one size that one line asked for, together, the largest sum first."""
    counts = Counter((block["size"], asked_by(block.get("frames", ()))) for block in peak.blocks)
    rows = [{"block_bytes": size, "num_blocks": count, "asked_by": who} for (size, who), count in counts.items()]
    return sorted(rows, key=lambda row: -row["block_bytes"] * row["num_blocks"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--budget", type=float, help="another activation budget than the recipe's")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("what is alive on a GPU is asked of its allocator, and torch sees no CUDA device here")
    recipe = replace(read_recipe(find_recipe(arguments.name)), steps=2, evaluation=None, data=RandomInputs())
    if arguments.budget is not None:
        if recipe.compile is None:
            raise SystemExit(f"{arguments.name} is not compiled, and has no activation budget")
        recipe = replace(recipe, compile=replace(recipe.compile, activation_budget=arguments.budget))
    if recipe.cublas_workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = recipe.cublas_workspace
    device = torch.device("cuda", torch.cuda.current_device())
    compat.start_allocator_history(device, MOST_EVENTS)
    made = run_experiment(recipe, name=arguments.name, on_progress=_say)
    peak = find_peak(compat.allocator_history(device))
    assert made.memory is not None
    record = {
        "schema": SCHEMA,
        "name": arguments.name,
        "budget": None if recipe.compile is None else recipe.compile.activation_budget,
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "machine": machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "measured_bytes": made.memory.peak_bytes,
        "by_phase": made.memory.by_phase,
        "replayed_bytes": peak.num_bytes,
        "rows": rows_of(peak),
    }
    stem = f"{arguments.name.rpartition('/')[2]}_{record['budget']}_{arguments.commit}"
    write_json(arguments.out / f"{stem}.json", record)
    lines = {row["asked_by"].partition(":")[0] for row in record["rows"]}
    for block in peak.blocks:
        for frame in block.get("frames", ()):
            path = Path(frame["filename"])
            if path.name in lines and GENERATED.search(frame["filename"]) and path.exists():
                (arguments.out / f"{stem}_{path.name}").write_text(path.read_text())
                lines.discard(path.name)
    print(f"measured {made.memory.peak_bytes / GiB:.3f} GiB, replayed {peak.num_bytes / GiB:.3f}")
    for row in record["rows"][:20]:
        print(f"{row['num_blocks']:5} x {row['block_bytes'] / MiB:9.2f} MiB  {row['asked_by']}")


def _say(progress: Progress) -> None:
    print(f"{progress.step or 0}/{progress.steps or 0} {progress.words}", flush=True)


if __name__ == "__main__":
    main()
