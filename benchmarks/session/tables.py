"""Tables of the session's benchmarks, from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.records import Record, newest, newest_rows, percent, row_of_the_run, sources, table
from benchmarks.session.checkpoints import SCHEMA as SAVES
from benchmarks.session.suites import SUITES
from lowtide.errors import BadRecordError
from lowtide.units import GiB

_SCHEMA = "lowtide.session_benchmark/1"


def streaming(results: Path) -> str:
    """Managed rows against plain torch in the same run: time, device memory, host memory, copies not hidden."""
    folder = results / "session"
    found = newest_rows(folder, _SCHEMA, "streaming_*")
    names = [str(row["name"]) for row in SUITES["streaming"]]
    if missing := [name for name in names if name not in found]:
        raise BadRecordError(f"{folder}: no record has the rows {', '.join(missing)}; run the suite again")
    lines = []
    for name in names:
        row, record = found[name]
        if "failed" in row:
            lines.append([name, str(row["failed"]), "-", "-", "-", "-"])
            continue
        stats = row.get("stats")
        host = "-" if stats is None else f"{_tier(stats, 'host') / row['parameters']:.2f}"
        waiting = "-" if stats is None else f"{1000 * stats['exposed_copy_s'] / max(1, stats['num_steps']):.1f}"
        median_s = float(row["median_s"])
        lines.append(
            [
                name,
                f"{1000 * median_s:.0f}",
                percent(median_s / _plain_s(record) - 1),
                f"{row['max_reserved_bytes'] / GiB:.2f}",
                host,
                waiting,
            ]
        )
    header = ["", "ms a step", "against plain SGD", "reserved GiB", "host bytes a parameter", "ms waiting a step"]
    return table(header, lines, num_text=1) + f"\n\n{sources(found[name][1] for name in names)}"


def _plain_s(record: Record) -> float:
    """Plain steps bracket the managed ones of a run: their spread is what the run can tell apart."""
    rows: list[dict[str, Any]] = record.rows("rows", ("name", "kind"))
    plain = [row for row in rows if row["kind"] == "plain" and row["optimizer"] != "none" and "failed" not in row]
    if not plain:
        raise BadRecordError(f"{record.path}: no plain row to compare with; run the suite again")
    return sum(float(row["median_s"]) for row in plain) / len(plain)


def budgets(results: Path) -> str:
    """Models inside device budgets that the allocator itself enforces; each row from the newest record that has it."""
    folder = results / "session"
    found = newest_rows(folder, _SCHEMA, "budgets_*")
    lines, used = [], []
    for name in (row["name"] for row in SUITES["budgets"]):
        if name not in found:
            raise BadRecordError(f"{folder}: no record has the row {name!r}; run the suite again")
        row, record = found[name]
        used.append(record)
        failed = row.get("failed")
        # No times: rows may run beside each other, since only their memory is asked for.
        reserved = str(failed) if failed else f"{row['max_reserved_bytes'] / GiB:.2f}"
        parameters = "-" if failed else f"{row['parameters'] / 1e9:.2f}"
        lines.append([str(row["model"]), str(row["batch"]), parameters, str(row["device_memory"]), reserved])
    header = ["Llama", "batch", "billion parameters", "budget", "reserved GiB"]
    return table(header, lines, num_text=2) + f"\n\n{sources(used)}"


def start_up(results: Path) -> str:
    """From nothing to a managed model, read from a file."""
    record = newest(results / "session", _SCHEMA, "start_up_*")
    rows: list[dict[str, Any]] = record.rows("rows", ("name", "model", "kind"))
    lines = [
        [
            str(row["model"]),
            *(f"{seconds:.1f}" for seconds in (*_start_up_seconds(row), sum(_start_up_seconds(row)))),
        ]
        for row in rows
        if "failed" not in row
    ]
    header = ["Llama", "importing, s", "building on meta, s", "reading and managing, s", "together, s"]
    return table(header, lines, num_text=1) + f"\n\n{sources([record])}"


def _start_up_seconds(row: dict[str, Any]) -> tuple[float, float, float]:
    """Python, torch and transformers; the model without memory; its weights."""
    return row["imported_s"], row["built_s"], row["managed_s"]


def _tier(stats: dict[str, Any], name: str) -> int:
    return int(next(tier["peak_bytes"] for tier in stats["tiers"] if tier["tier"] == name))


def saves(results: Path) -> str:
    """Saves of the largest model beside its training, in the order in which they were made, and a load."""
    record = newest(results / "checkpoints", SAVES)
    row = row_of_the_run(record, "3.14B")
    if row is None:
        raise BadRecordError(f"{record.path}: no row of the 3.14B model that did not fail; run it again")
    lines = [
        [
            str(save["allowance"]).replace("GiB", " GiB"),
            f"{save['num_bytes'] / GiB:.1f}",
            f"{save['write_s']:.1f}",
            f"{save['stall_s']:.1f}",
            f"{save['stall_s'] / save['write_s']:.0%}",
            f"{save['staging_bytes'] / GiB:.1f}",
        ]
        for save in row["saves"]
    ]
    header = ["allowance", "GiB written", "seconds", "of stall", "share", "GiB of host memory"]
    remark = (
        f"A step takes {row['median_s']:.2f} s undisturbed, and the disk took {row['disk_bytes_per_s'] / GiB:.2f} GiB/s. Loading, "
        f"from the building of the model to the end of its first step, took {row['load']['to_first_step_s']:.0f} s."
    )
    return table(header, lines, num_text=1) + f"\n\n{sources([record], remark)}"
