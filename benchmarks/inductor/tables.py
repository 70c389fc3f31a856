"""What two compilers hold of one graph, beside what was measured and published."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from benchmarks.inductor.record import CodeRecord, budget_of, read_all
from benchmarks.lab.tables import newest_peak
from benchmarks.records import footnote, table
from lowtide.errors import BadRecordError
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.units import GiB, MiB

OLDER, NEWER = "2.8", "2.11"
"""The experiment's torch, and that of our runs."""


def generated(results: Path) -> str:
    """Bytes of the backward by the generated code of both, and the peaks of runs with the same two."""
    found: dict[tuple[str, float], dict[str, CodeRecord]] = defaultdict(dict)
    for record in read_all(results / "inductor_code"):
        found[record.name, record.budget][record.version] = record  # the newest comes last
    for (name, budget), by_version in found.items():
        if missing := [version for version in (OLDER, NEWER) if version not in by_version]:
            raise BadRecordError(
                f"there is no record of {name} at {budget:g} by torch {missing[0]}; run benchmarks.inductor.run with it"
            )
    rows = sorted(found.values(), key=lambda by_version: -by_version[NEWER].backward_bytes)
    header = [
        *("recipe", "activation_budget", f"code of {OLDER}, GiB", f"of {NEWER}", "difference, MiB"),
        *(f"of {NEWER}, all reused", "published GiB", "measured GiB", "difference, MiB"),
    ]
    around = [record for by_version in rows for record in (by_version[OLDER], by_version[NEWER])]
    versions, commits = (
        ", ".join(sorted(values)) for values in ({r.torch for r in around}, {r.commit for r in around})
    )
    provenance = footnote(f"Records in `inductor_code`. Generated without a GPU, torch {versions}, commit {commits}.")
    lines = [_cells(by_version[OLDER], by_version[NEWER], results) for by_version in rows]
    return table(header, lines, num_text=1) + f"\n\n{provenance}"


def _cells(older: CodeRecord, newer: CodeRecord, results: Path) -> list[str]:
    recipe = read_recipe(find_recipe(newer.name))
    is_own = budget_of(recipe) == newer.budget
    published = recipe.published.peak_gib if recipe.published and is_own else None
    measured = newest_peak(results, newer.name, None if is_own else newer.budget)
    return [
        newer.name.rpartition("/")[2],
        f"{newer.budget:g}",
        f"{older.backward_bytes / GiB:.3f}",
        f"{newer.backward_bytes / GiB:.3f}",
        f"{(older.backward_bytes - newer.backward_bytes) / MiB:+,.0f}",
        f"{newer.all_reused_bytes / GiB:.3f}",
        "-" if published is None else f"{published:.3f}",
        "-" if measured is None else f"{measured / GiB:.3f}",
        "-" if published is None or measured is None else f"{published * GiB / MiB - measured / MiB:+,.0f}",
    ]
