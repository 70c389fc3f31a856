"""What two compilers hold of one graph, beside what was measured and published."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.lab_tables import newest_peak
from benchmarks.records import table
from lowtide.errors import BadRecordError
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.units import GiB, MiB

SCHEMA = "lowtide.inductor_code/1"
OLDER, NEWER = "2.8", "2.11"
"""The experiment's torch, and that of our runs."""


def generated(results: Path) -> str:
    """Bytes of the backward by the generated code of both, and the peaks of runs with the same two."""
    found: dict[tuple[str, float], dict[str, dict[str, Any]]] = defaultdict(dict)
    for path in sorted((results / "inductor_code").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA:
            raise BadRecordError(f"{path} is no record of generated code ({SCHEMA}); take it away")
        found[record["name"], record["budget"]][record["torch"].rpartition(".")[0]] = record
    lines = []
    for (name, budget), by_torch in sorted(found.items(), key=lambda item: -item[1][NEWER]["backward_bytes"]):
        older, newer = by_torch[OLDER], by_torch[NEWER]
        recipe = read_recipe(find_recipe(name))
        is_own = recipe.compile is not None and (recipe.compile.activation_budget or 1.0) == budget
        published = recipe.published.peak_gib if recipe.published and is_own else None
        measured = newest_peak(results, name, None if is_own else budget)
        lines.append(
            [
                name.rpartition("/")[2],
                f"{budget:.2f}",
                f"{older['backward_bytes'] / GiB:.3f}",
                f"{newer['backward_bytes'] / GiB:.3f}",
                f"{(older['backward_bytes'] - newer['backward_bytes']) / MiB:+,.0f}",
                f"{newer['all_reused_bytes'] / GiB:.3f}",
                "-" if published is None else f"{published:.3f}",
                "-" if measured is None else f"{measured / GiB:.3f}",
                "-" if published is None or measured is None else f"{published * GiB / MiB - measured / MiB:+,.0f}",
            ]
        )
    header = [
        *("recipe", "activation_budget", f"code of {OLDER}, GiB", f"of {NEWER}", "difference, MiB"),
        *(f"of {NEWER}, all reused", "published GiB", "measured GiB", "difference, MiB"),
    ]
    around = [record for by_torch in found.values() for record in by_torch.values()]
    said = [", ".join(sorted({record[key] for record in around})) for key in ("torch", "commit")]
    provenance = (
        f"From `benchmarks/results/inductor_code`: generated without a card, torch {said[0]}, commit {said[1]}."
    )
    return table(header, lines, num_text=1) + f"\n\n{provenance}"
