"""Tables of killed runs and of long ones, from their records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.records import newest, newest_rows, sources, table
from benchmarks.session.kills import SCHEMA as KILLS
from benchmarks.session.soak import SCHEMA as SOAK
from lowtide.errors import BadRecordError
from lowtide.units import MiB
from tests.faults.forks import PHASES
from tests.faults.kills import KINDS


def kills(results: Path) -> str:
    """A row for each kind of run: what was killed, and what was compared."""
    found = _killed(results)
    figures = ("kills", "kills_in_a_save", "runs", "losses_compared", "steps_repeated")
    lines = [[name, *(f"{row[figure]:,}" for figure in figures), _lost(row)] for name, row in found.items()]
    sums = [f"{sum(row[figure] for row in found.values()):,}" for figure in figures]
    num_lost = sum("failed" in row for row in found.values())
    lines.append(["together", *sums, f"{num_lost} of them" if num_lost else "nothing"])
    header = ["run", "kills", "in a save", "runs to their end", "losses compared", "steps taken again", "lost"]
    return table(header, lines, num_text=1) + f"\n\n{_kill_sources(results)}"


def kill_phases(results: Path) -> str:
    """What the killed processes were doing."""
    found = _killed(results).values()
    by_time, by_operation = Counter[str](), Counter[str]()
    for row in found:
        by_time.update(row["at_random"])
        by_operation.update(row["at_operations"])
    lines = [
        [phase, str(by_time[phase]), str(by_operation[phase])]
        for phase in PHASES
        if by_time[phase] + by_operation[phase]
    ]
    header = ["while", "killed at a random time", "killed at an operation"]
    return table(header, lines, num_text=1) + f"\n\n{_kill_sources(results)}"


def _killed(results: Path) -> dict[str, dict[str, Any]]:
    rows = newest_rows(results / "kills", KILLS, "*")
    if missing := [name for name in KINDS if name not in rows]:
        raise BadRecordError(f"{results / 'kills'}: no record has the rows {', '.join(missing)}; run the rest")
    return {name: rows[name][0] for name in KINDS}


def _kill_sources(results: Path) -> str:
    rows = newest_rows(results / "kills", KILLS, "*")
    return sources(rows[name][1] for name in KINDS)


def _lost(row: dict[str, Any]) -> str:
    return "nothing" if "failed" not in row else str(row["failed"]).partition("\n")[0]


def soak(results: Path) -> str:
    """What a process held after the second tenth of a long run, and at its end."""
    record = newest(results / "soak", SOAK)
    by_name = {str(row["name"]): row for row in record.rows("rows", ("name", "count", "windows"))}
    windows: dict[str, Any] = {name: (row["windows"][1], row["windows"][-1]) for name, row in by_name.items()}  # type: ignore[index]  # windows are a list
    figures = {
        "device, MiB at most": lambda window: f"{window['device_bytes'] / MiB:.2f}",
        "host on the books, MiB at most": lambda window: f"{window['host_bytes'] / MiB:.2f}",
        "pinned of it, MiB at most": lambda window: f"{window['pinned_bytes'] / MiB:.2f}",
        "the process's memory, MiB": lambda window: f"{window['rss_bytes'] / MiB:.1f}",
        "threads": lambda window: str(window["num_threads"]),
        "descriptors": lambda window: str(window["num_descriptors"]),
        "median ms of a step, or of a session": lambda window: f"{1000 * window['median_s']:.1f}",
    }
    lines = [
        [name, *(show(window) for kind in ("steps", "sessions") for window in windows[kind])]
        for name, show in figures.items()
    ]
    header = ["", *(f"{window['num_done']:,} {kind}" for kind in ("steps", "sessions") for window in windows[kind])]
    return table(header, lines, num_text=1) + f"\n\n{sources([record])}"
