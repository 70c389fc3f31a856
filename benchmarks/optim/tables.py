"""Tables of the optimizer benchmarks, from their records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.optim.classes import IDENTICAL, NOT_RUN, PLANS, SCHEMA
from benchmarks.optim.run import SUITES as PEERS
from benchmarks.records import Record, footnote, newest, newest_rows, row_of_the_run, sources, table
from benchmarks.session.suites import SUITES
from lowtide.units import GiB

_SESSION, _PEERS = "lowtide.session_benchmark/1", "lowtide.optimizer_benchmark/1"
_BASE = "plain torch, forward and backward"
_SUMMARY = (
    "plain torch, fused AdamW, all bf16",
    "all on the device, exact",
    "streamed, on the host in backward, exact",
    "streamed, on the host deferred, exact, clipped",
)
"""The own rows that stand beside the peers in the README."""

Row = dict[str, Any]
Found = dict[str, tuple[Row, Record]]


def steps(results: Path, suite: str = "optimizer") -> str:
    """Steps with all state on the host and on the device, beside plain torch in the same run."""
    found: Found = newest_rows(results / "session", _SESSION, f"{suite}_20*")
    return _steps(found, [str(row["name"]) for row in SUITES[suite]])


def beside_peers(results: Path) -> str:
    """The main rows and the peers, each beside the plain row of its own run."""
    found = _own_and_peers(results)
    others = [str(row["name"]) for row in PEERS["peers"] if row["peer"] != "none"]
    return _steps(found, [_BASE, *_SUMMARY, *others])


_README = {
    "streamed, on the host in backward, exact": "**Lowtide**, in backward, fp32 masters",
    "streamed, on the host deferred, exact, clipped": "**Lowtide**, deferred, clipped, fp32 masters",
    "DeepSpeed ZeRO-3, all on the host, clipped": "DeepSpeed ZeRO-3, clipped, fp32 masters",
    "FSDP2, CPUOffloadPolicy, fp32 master": "FSDP2, `CPUOffloadPolicy`, fp32 masters",
    "torchao CPUOffloadOptimizer, all bf16": "torchao, `CPUOffloadOptimizer`, all bf16",
}
"""The rows of the README's table, in the words that it has for them."""


def readme(results: Path) -> str:
    """Five rows for the README: everything on the host, here and by the peers."""
    lines, commits, hardware = [], [], []
    used: dict[str, list[str]] = {}
    for row, record, times, host_bytes in own_and_peers(results, list(_README)):
        words = _README[str(row["name"])]
        commits.append(record.text("commit"))
        hardware.append(record.text("hardware").removeprefix("NVIDIA "))
        used.setdefault(f"`{record.path.stem}`", []).append(words.partition(",")[0].strip("*"))
        lines.append(
            [
                words,
                f"{1000 * float(row['median_s']):.0f}",
                f"{times:.2f}",
                f"{row['max_reserved_bytes'] / GiB:.1f}",
                f"{host_bytes:.1f}",
            ]
        )
    header = [
        f"AdamW on one {' or '.join(dict.fromkeys(hardware))}",
        "ms a step",
        "time / forward and backward alone",
        "reserved GiB",
    ]
    said = "; ".join(f"{record}: {', '.join(dict.fromkeys(names))}" for record, names in used.items())
    remark = f"{len(used)} runs at {len(set(commits))} commits, each with its own baseline: {said}."
    if curve := dict.fromkeys(record.path.stem for _, record, _ in shares_of(results, "3.14b")):
        remark += f" The chart's curve: {', '.join(f'`{name}`' for name in curve)}."
    return table([*header, "host bytes a parameter"], lines, num_text=1) + f"\n\n{footnote(remark)}"


def own_and_peers(results: Path, names: Sequence[str]) -> Iterator[tuple[Row, Record, float, float]]:
    """Rows of the optimizer's suite and of the peers', with their record.

    Each has its time in forwards and backwards of its own run, and its bytes on the host a parameter.
    """
    found = _own_and_peers(results)
    for _, row, record in _measured(found, names):
        base = row_of_the_run(record, _BASE) or found[_BASE][0]
        beyond = max(0, int(row["host_rss_bytes"]) - int(base["host_rss_bytes"]))
        yield row, record, float(row["median_s"]) / float(base["median_s"]), beyond / row["parameters"]


def shares_of(results: Path, model: str) -> list[tuple[Row, Record, float]]:
    """Rows by the share of updates on the host, with their record and their time in forwards and backwards of its run."""
    if not any((results / "session").glob("host_share_*.json")):
        return []
    found = _shares(results)
    rows = [pair for name, pair in found.items() if re.fullmatch(rf"{re.escape(model)}, \d+% on the host", name)]
    based = ((row, record, row_of_the_run(record, f"{model}, forward and backward")) for row, record in rows)
    return [(row, record, float(row["median_s"]) / float(base["median_s"])) for row, record, base in based if base]


def _shares(results: Path) -> Found:
    return newest_rows(results / "session", _SESSION, "host_share_*", "partition_*")


def _own_and_peers(results: Path) -> Found:
    found: Found = newest_rows(results / "session", _SESSION, "optimizer_20*")
    peers: Found = newest_rows(results / "optim", _PEERS, "peers_*")
    parameters = found[_BASE][0]["parameters"]
    for name, (row, record) in peers.items():
        if row["peer"] != "none":
            found[name] = {"parameters": parameters, **row}, record
    return found


def _steps(found: Found, names: Sequence[str]) -> str:
    lines = []
    for name, row, record in _measured(found, names):
        if "failed" in row:
            lines.append([name, str(row["failed"]), "-", "-", "-", "-"])
            continue
        base = row_of_the_run(record, _BASE) or found[_BASE][0]
        beyond = max(0, int(row["host_rss_bytes"]) - int(base["host_rss_bytes"]))
        lines.append(
            [
                name,
                f"{1000 * float(row['median_s']):.0f}",
                f"{float(row['median_s']) / float(base['median_s']):.2f}",
                f"{row['max_allocated_bytes'] / GiB:.2f}",
                f"{row['max_reserved_bytes'] / GiB:.2f}",
                f"{beyond / row['parameters']:.2f}",
            ]
        )
    header = [
        "",
        "ms a step",
        "time / forward and backward alone",
        "allocated GiB",
        "reserved GiB",
        "host bytes a parameter",
    ]
    return table(header, lines, num_text=1) + f"\n\n{_origin(found, names)}"


def scale(results: Path) -> str:
    """Models that do not fit the GPU, and how far a peer comes on the same machine."""
    found: Found = newest_rows(results / "session", _SESSION, "scale_*")
    names = [str(row["name"]) for row in SUITES["scale"]]
    if any((results / "optim").glob("largest_*.json")):
        found |= newest_rows(results / "optim", _PEERS, "largest_*")
        names += [str(row["name"]) for row in PEERS["largest"]]
    lines = []
    for name, row, _ in _measured(found, names):
        if "failed" in row:
            lines.append([name, row["batch"], str(row["failed"]), "-", "-", "-"])
            continue
        losses = [float(loss) for loss in row["losses"]]
        lines.append(
            [
                name,
                row["batch"],
                f"{1000 * float(row['median_s']):.0f}",
                f"{row['max_reserved_bytes'] / GiB:.1f}",
                f"{row['host_peak_rss_bytes'] / GiB:.1f}",
                f"{losses[0]:.2f} to {losses[-1]:.3f} in {len(losses)}" if losses[-1] != losses[0] else "no updates",
            ]
        )
    header = ["", "batch", "ms a step", "reserved GiB", "host GiB", "loss on a repeated batch, steps"]
    return table(header, lines, num_text=2) + f"\n\n{_origin(found, names)}"


def shares(results: Path) -> str:
    """What each share of the host costs, and beside it static partitions of the device, each against its model's plain row."""
    found = _shares(results)
    suites = ("host_share_3b", "partition_3b", "host_share_8b", "host_share_staging_8b", "partition_8b")
    names = list(dict.fromkeys(str(row["name"]) for suite in suites for row in SUITES[suite]))
    lines = []
    for name, row, record in _measured(found, names):
        words = name.replace("of the card", "of the device")
        if "failed" in row:
            lines.append([words, row["batch"], str(row["failed"]), "-", "-", "-"])
            continue
        plain = f"{row['model']}, forward and backward"
        base = row_of_the_run(record, plain) or found[plain][0]
        lines.append(
            [
                words,
                row["batch"],
                f"{1000 * float(row['median_s']):.0f}",
                f"{float(row['median_s']) / float(base['median_s']):.2f}",
                f"{row['max_reserved_bytes'] / GiB:.1f}",
                f"{row['host_peak_rss_bytes'] / GiB:.1f}",
            ]
        )
    header = ["", "batch", "ms a step", "time / forward and backward alone", "reserved GiB", "host GiB"]
    return table(header, lines, num_text=2) + f"\n\n{_origin(found, names)}"


def host_kernel(results: Path) -> str:
    """Speed of the host's update by format of weights and moments, beside torch's own."""
    found: Found = newest_rows(results / "optim", "lowtide.host_kernel_benchmark/1", "host_kernel_*")
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


def _measured(found: Found, names: Iterable[str]) -> Iterator[tuple[str, Row, Record]]:
    """Those of the rows that there are, in the order of the names."""
    for name in names:
        if name in found:
            yield name, *found[name]


def _origin(found: Found, names: Sequence[str]) -> str:
    """Where the rows are from, and which are not there."""
    missing = [name for name in names if name not in found]
    remark = f"Not measured yet: {', '.join(missing)}." if missing else ""
    return sources((record for _, _, record in _measured(found, names)), remark)


def classes(results: Path) -> str:
    """Optimizer classes that train to the bit as in plain torch, by package."""
    record = newest(results / "optim", SCHEMA, "classes_*")
    versions = record.content["versions"]
    assert isinstance(versions, dict)
    rows = record.rows("rows", ("name", *PLANS))
    lines = []
    for package, version in versions.items():
        own = [row for row in rows if str(row["name"]).partition(".")[0] == package]
        both = [row for row in own if all(row[plan] == IDENTICAL for plan in PLANS)]
        deferred = [row for row in own if row not in both and row["deferred"] == IDENTICAL]
        cells = (", ".join(_class_name(row) for row in part) or "-" for part in (both, deferred))
        lines.append([f"{package} {version}", *cells, str(len(own))])
    header = ["package", "deferred and in backward", "deferred only", "classes"]
    return table(header, lines, num_text=3) + f"\n\n{sources([record])}"


def refused_classes(results: Path) -> str:
    """The other classes, with the reason in one sentence."""
    record = newest(results / "optim", SCHEMA, "classes_*")
    rows = [row for row in record.rows("rows", ("name", *PLANS)) if row["deferred"] != IDENTICAL]
    order = sorted(rows, key=lambda row: row["deferred"] == NOT_RUN)
    lines = [[f"`{row['name']}`", str(row["deferred"]), str(row["reason"]).replace("|", "\\|")] for row in order]
    return table(["class", "", "reason"], lines, num_text=3) + f"\n\n{sources([record])}"


def _class_name(row: Row) -> str:
    return str(row["name"]).partition(".")[2]
