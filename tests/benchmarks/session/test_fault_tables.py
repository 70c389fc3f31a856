"""Tables of killed and of long runs: sums over records, what is missing, and what was lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.session.fault_tables import kill_phases, kills, soak
from lowtide.errors import BadRecordError
from tests.faults.kills import KINDS

ABOUT = {"commit": "abc", "hardware": "none", "torch": "2.8"}


def row(name: str, **changes: Any) -> dict[str, Any]:
    found = {"name": name, "kills": 10, "kills_in_a_save": 6, "runs": 2, "losses_compared": 1100, "steps_repeated": 30}
    return {**found, "at_random": {"training": 4}, "at_operations": {"renaming": 6}, **changes}


def write(results: Path, folder: str, name: str, rows: list[dict[str, Any]]) -> None:
    record = {"schema": f"lowtide.{folder}/1", **ABOUT, "date": name, "rows": rows}
    (results / folder).mkdir(exist_ok=True)
    (results / folder / f"{name}.json").write_text(json.dumps(record))


def test_kills_are_summed_over_records(tmp_path: Path) -> None:
    first, *others = KINDS
    write(tmp_path, "kills", "2026-01-01", [row(first)])
    with pytest.raises(BadRecordError, match=f"kills: no record has the rows {', '.join(others)}; run the rest"):
        kills(tmp_path)
    write(tmp_path, "kills", "2026-01-02", [row(name) for name in others])
    lines = kills(tmp_path).split("\n")
    assert f"| {first} | 10 | 6 | 2 | 1,100 | 30 | nothing |" in lines
    assert f"| together | {10 * len(KINDS)} | {6 * len(KINDS)} | 14 | 7,700 | 210 | nothing |" in lines
    assert f"| training | {4 * len(KINDS)} | 0 |" in kill_phases(tmp_path).split("\n")
    assert f"| renaming | 0 | {6 * len(KINDS)} |" in kill_phases(tmp_path).split("\n")


def test_what_was_lost_is_told(tmp_path: Path) -> None:
    first, *others = KINDS
    rows = [row(first, failed="AssertionError: step 6 is gone\nmore"), *(row(name) for name in others)]
    write(tmp_path, "kills", "2026-01-01", rows)
    text = kills(tmp_path)
    assert "| AssertionError: step 6 is gone |" in text
    assert "| 1 of them |" in text


def test_a_soak_shows_its_second_window_and_its_last(tmp_path: Path) -> None:
    def window(number: int, num_done: int) -> dict[str, Any]:
        sizes = {f"{name}_bytes": number << 20 for name in ("device", "host", "pinned", "rss")}
        return sizes | {"num_done": num_done, "num_threads": 2, "num_descriptors": 7, "median_s": 0.01}

    rows = [
        {"name": "steps", "count": 3000, "windows": [window(number, 1000 * number) for number in (1, 2, 3)]},
        {"name": "sessions", "count": 30, "windows": [window(number, 10 * number) for number in (1, 2, 3)]},
    ]
    write(tmp_path, "soak", "2026-01-01", rows)
    lines = soak(tmp_path).split("\n")
    assert lines[0] == "|  | 2,000 steps | 3,000 steps | 20 sessions | 30 sessions |"
    assert "| device, MiB at most | 2.00 | 3.00 | 2.00 | 3.00 |" in lines
    assert "| median ms of a step, or of a session | 10.0 | 10.0 | 10.0 | 10.0 |" in lines
