"""Tables of the job of two ranks, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks.run import BASE, SCHEMA, SUITES
from benchmarks.records import newest_rows, row_of_the_run, sources, table
from lowtide.errors import BadRecordError
from lowtide.units import MiB

HEADER = [
    "",
    "tensors between steps, MiB",
    "bytes a parameter",
    "peak, MiB",
    "of the device, MiB",
    "of the host, MiB",
    "processor, ms a step",
    "losses off by",
]


def beside_peers(results: Path, precision: str) -> str:
    """Bytes and time of each peer and of Lowtide, and how far their losses are from those of the baseline in the same run."""
    folder = results / "ranks"
    found = newest_rows(folder, SCHEMA, f"{precision}_*")
    lines, used, failed = [], [], []
    for name in (str(row["name"]) for row in SUITES[precision]):
        if name not in found:
            raise BadRecordError(f"{folder}: no record has the row {name!r} of {precision}; run the suite again")
        row, record = found[name]
        used.append(record)
        if "failed" in row:
            failed.append(f"{name}: {row.get('message', row['failed'])}.")
            lines.append([name, str(row["failed"]), *["-"] * (len(HEADER) - 2)])
            continue
        base = row_of_the_run(record, BASE)
        if base is None:
            raise BadRecordError(f"{record.path}: no row {BASE} to compare with; run the suite again")
        lines.append([name, *_figures(row, base["losses"])])
    return table(HEADER, lines, num_text=1) + f"\n\n{sources(used, ' '.join(failed))}"


def _figures(row: dict[str, Any], losses: Sequence[float]) -> list[str]:
    # The clock's time is in the record: on a machine that does other work it says nothing.
    times = [1000 * float(seconds) for seconds in row["cpu_s"]]
    off = largest_difference(row["losses"], losses)
    tracked = [f"{row[key] / MiB:.0f}" if key in row else "-" for key in ("device_peak_bytes", "host_peak_bytes")]
    return [
        f"{row['tensor_bytes'] / MiB:.0f}",
        f"{row['tensor_bytes'] / row['parameters']:.1f}",
        f"{row['peak_bytes'] / MiB:.0f}",
        *tracked,
        f"{1000 * row['median_cpu_s']:.0f} ({min(times):.0f} to {max(times):.0f})",
        "0" if off == 0 else f"{off:.0e}",
    ]


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Of all steps, as a share of the second ones.

    Raises:
        BadRecordError: They are not of the same steps.
    """
    if len(losses) != len(others):
        raise BadRecordError(f"{len(losses)} losses are compared with {len(others)}; run both rows with the same steps")
    return max(abs(mine - other) / abs(other) for mine, other in zip(losses, others, strict=True))
