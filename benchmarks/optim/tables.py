"""Tables of the optimizer benchmarks, from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.optim.run import SUITES as PEERS
from benchmarks.records import Record, newest_rows, sources, table
from benchmarks.session.suites import SUITES
from lowtide.units import GiB

_BASE = "plain torch, forward and backward"


def steps(results: Path, suite: str = "optimizer") -> str:
    """Steps with all state on the host and on the device, beside plain torch and, where they were run, the peers."""
    found: dict[str, tuple[dict[str, Any], Record]] = newest_rows(results / suite, "lowtide.session_benchmark/1")
    names = [str(row["name"]) for row in SUITES[suite]]
    if suite == "optimizer" and (results / "optimizer_peers").exists():
        found |= newest_rows(results / "optimizer_peers", "lowtide.optimizer_benchmark/1")
        names += [str(row["name"]) for row in PEERS["peers"]]
    base_s = float(found[_BASE][0]["median_s"])
    own_rss = int(found[_BASE][0]["host_rss_bytes"])
    lines, used, missing = [], [], []
    for name in names:
        if name not in found:
            missing.append(name)
            continue
        row, record = found[name]
        used.append(record)
        if "failed" in row:
            lines.append([name, str(row["failed"]), "-", "-", "-"])
            continue
        beyond = max(0, int(row["host_rss_bytes"]) - own_rss)
        lines.append(
            [
                name,
                f"{1000 * float(row['median_s']):.0f}",
                f"{float(row['median_s']) / base_s:.2f}",
                f"{row['max_reserved_bytes'] / GiB:.2f}",
                f"{beyond / row['parameters']:.2f}",
            ]
        )
    header = ["", "ms a step", "times forward and backward", "reserved GiB", "host bytes a parameter"]
    remark = f" Not measured yet: {', '.join(missing)}." if missing else ""
    return table(header, lines, num_text=1) + f"\n\n{sources(used)}{remark}"


def host_kernel(results: Path) -> str:
    """Speed of the host's update by format of weights and moments, beside torch's own."""
    found: dict[str, tuple[dict[str, Any], Record]] = newest_rows(
        results / "optim_host_kernel", "lowtide.host_kernel_benchmark/1"
    )
    lines, used = [], []
    for name, (row, record) in found.items():
        used.append(record)
        lines.append(
            [
                name,
                f"{row['gparams_per_s']:.2f}",
                f"{row['bytes_per_element']:.1f}",
                f"{row['gbytes_per_s']:.0f}",
            ]
        )
    header = ["", "billion parameters a second", "bytes a parameter", "GB/s"]
    return table(header, lines, num_text=1) + f"\n\n{sources(used)}"
