"""Tables of the activation benchmarks, from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.activations.suites import SUITES
from benchmarks.records import Record, newest, newest_rows, percent, row_of_the_run, sources, table
from lowtide.units import GiB, MiB

_SCHEMA = "lowtide.activation_benchmark/1"
_BASE = "torch.utils.checkpoint on each layer"


def policies(results: Path, suite: str = "policies") -> str:
    """Each policy beside torch's own ways: time, allocated and reserved, and what was predicted."""
    found: dict[str, tuple[dict[str, Any], Record]] = newest_rows(results / "activations", _SCHEMA, f"{suite}_20*")
    predicted = newest(results / "activations_predicted", "lowtide.activation_prediction/1")
    foreseen = {row["name"]: row for row in predicted.rows("rows", ("name", "suite")) if row["suite"] == suite}
    lines, used, missing = [], [predicted], []
    for name in (str(row["name"]) for row in SUITES[suite]):
        if name not in found:
            missing.append(name)
            continue
        row, record = found[name]
        used.append(record)
        if "failed" in row:
            lines.append([name, str(row["failed"]), "-", "-", "-", "-", "-"])
            continue
        base = row_of_the_run(record, _BASE) or found[_BASE][0]
        lines.append(
            [
                name,
                f"{1000 * float(row['median_s']):.0f}",
                percent(float(row["median_s"]) / float(base["median_s"]) - 1),
                f"{row['max_allocated_bytes'] / GiB:.2f}",
                _error(foreseen.get(name), row, "allocated"),
                f"{row['max_reserved_bytes'] / GiB:.2f}",
                _error(foreseen.get(name), row, "reserved"),
            ]
        )
    header = [
        "",
        "ms a step",
        "against checkpoint in the same run",
        "allocated GiB",
        "predicted",
        "reserved GiB",
        "predicted",
    ]
    remark = f"Not measured yet: {', '.join(missing)}." if missing else ""
    return table(header, lines, num_text=1) + f"\n\n{sources(used, remark)}"


def chunked_loss(results: Path) -> str:
    """The head's loss, unchunked and chunked."""
    found = newest_rows(results / "activations", _SCHEMA, "chunked_loss_*")
    lines, used = [], []
    for name, (row, record) in found.items():
        used.append(record)
        ways: Any = row.get("results", {})
        for way, figures in ways.items():
            lines.append(
                [
                    name,
                    way,
                    f"{1000 * figures['median_s']:.1f}",
                    f"{figures['time_ratio']:.2f}",
                    f"{figures['peak_bytes'] / MiB:.0f}",
                    f"{100 * figures['peak_share']:.1f}%",
                    f"{figures['difference_hidden']:.1e}",
                    f"{figures['difference_weight']:.1e}",
                ]
            )
    header = ["", "loss", "ms", "of unchunked", "peak MiB", "of unchunked"]
    header += ["gradient of inputs differs by", "of the weight by"]
    return table(header, lines, num_text=2) + f"\n\n{sources(used)}"


def embedding(results: Path) -> str:
    """A table of 128k x 4096 on the host beside plain torch."""
    found = newest_rows(results / "activations", _SCHEMA, "embedding_*")
    lines, used = [], []
    for name, (row, record) in found.items():
        used.append(record)
        figures: Any = row
        if "failed" in row:
            lines.append([name, str(row["failed"]), "-", "-", "-", "-"])
            continue
        lines.append(
            [
                name,
                f"{figures['table_bytes'] / MiB:.0f}",
                f"{figures['max_allocated_bytes'] / MiB:.0f}",
                f"{1000 * figures['median_s']:.0f}",
                f"{figures['losses'][0]:.3f}",
                f"{figures['losses'][-1]:.3f}",
            ]
        )
    header = ["", "table MiB", "peak on the device, MiB", "ms a step", "first loss", "last loss"]
    return table(header, lines, num_text=1) + f"\n\n{sources(used)}"


def _error(foreseen: dict[str, object] | None, row: dict[str, Any], side: str) -> str:
    if foreseen is None:
        return "-"
    return percent(float(str(foreseen[f"predicted_{side}_bytes"])) / row[f"max_{side}_bytes"] - 1)
