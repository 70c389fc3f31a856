"""Tables of the budget sweep and of its check against compiled code."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import gib, newest, percent, table
from lowtide.errors import BadRecordError
from lowtide.lab.budget import pareto, read_sweep
from lowtide.units import MiB

PUBLISHED = {1.0: "19.712", 0.6: "15.636", 0.05: "13.561"}
"""GiB of the Peak Memory table: RTX 4090, torch 2.8, with the allocator's rounding and the update."""
_CHECK_FIELDS = (
    "name",
    "batch",
    "budget",
    "measured_saved_bytes",
    "static_saved_bytes",
    "measured_peak_bytes",
    "static_peak_bytes",
)


def sweep(results: Path) -> str:
    """Every point of the newest sweep."""
    paths = sorted((results / "budget_sweep").glob("*.json"))
    if not paths:
        raise BadRecordError(f"there are no records in {results / 'budget_sweep'}; run benchmarks.budget_sweep first")
    found = read_sweep(paths[-1])
    best = {point.budget for point in pareto(found.points)}
    header = ["budget", "saved GiB", "peak GiB", "unfused GiB", "computed again", "seconds", "published GiB"]
    rows = [
        [
            f"**{point.budget:.2f}**" if point.budget in best else f"{point.budget:.2f}",
            gib(point.saved_bytes),
            gib(point.peak_bytes),
            gib(point.unfused_peak_bytes),
            f"{point.recomputed_flops_share:.1%}",
            f"{point.seconds:.1f}",
            PUBLISHED.get(point.budget, ""),
        ]
        for point in found.points
    ]
    file = Path(*paths[-1].parts[-4:])
    provenance = (
        f"From `{file}`: {found.model}, {found.batch}, {found.dtype}, torch {found.torch}; the graph was traced once, in "
        f"{found.trace_seconds:.1f} s, on one core without a GPU. No other budget beats those in bold in both peak and computation."
    )
    rises = "\n".join(f"- {remark}" for remark in found.remarks if remark.startswith("not monotone"))
    return f"{table(header, rows, num_text=1)}\n\n{provenance}\n\n{rises}".rstrip()


def check(results: Path) -> str:
    """Compiled code on the host against what was read off the graph."""
    record = newest(results / "budget_check", "lowtide.budget_check/1")
    rows = []
    for row in record.rows("rows", _CHECK_FIELDS):
        number = {key: value for key, value in row.items() if isinstance(value, int | float)}
        rows.append(
            [
                f"{row['name']}, {row['batch']}",
                f"{number['budget']:.2f}",
                f"{number['measured_saved_bytes']:,}",
                f"{number['static_saved_bytes']:,}",
                f"{number['measured_peak_bytes'] / MiB:.2f}",
                f"{number['static_peak_bytes'] / MiB:.2f}",
                percent(number["static_peak_bytes"] / number["measured_peak_bytes"] - 1),
            ]
        )
    header = ["model", "budget", "saved bytes", "static", "peak MiB", "static", "error"]
    return f"{table(header, rows, num_text=1)}\n\n{record.provenance}"
