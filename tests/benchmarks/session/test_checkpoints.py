"""The benchmark of saves, run with its tiny row: what it reports follows from what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.session.checkpoints import SCHEMA, SUITES, disk_bytes_per_s, run
from benchmarks.session.row import build
from benchmarks.session.tables import saves as table_of_saves
from lowtide.errors import BadRecordError

pytest.importorskip("transformers")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the row is for the CPU")
def test_the_tiny_row(tmp_path: Path) -> None:
    (row,) = [row for row in SUITES["saves"] if row["name"] == "tiny"]
    result = run({**row, "steps": 2, "warm_up": 1, "disk": str(tmp_path)})
    num_parameters = sum(parameter.numel() for parameter in build("tiny", on="cpu").parameters())
    first, second = result["saves"]
    # Beside the state: the states of random number generators.
    assert 12 * num_parameters == result["state_bytes"] <= first["num_bytes"] < 12 * num_parameters + 50_000
    assert first["staging_bytes"] <= 64 * 1024
    assert (first["checkpoints_left"], second["checkpoints_left"]) == ([first["checkpoint"]], [second["checkpoint"]])
    assert result["load"]["to_first_step_s"] >= result["load"]["load_s"] > 0
    assert json.loads(json.dumps(result))["stall_share_of_write"] == result["stall_share_of_write"]
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_measured_with_files_that_go(tmp_path: Path) -> None:
    assert disk_bytes_per_s(tmp_path, 1 << 16, 2) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_saves(tmp_path: Path) -> None:
    saves = [
        {"allowance": "36GiB", "num_bytes": 35 << 30, "write_s": 20.0, "stall_s": 1.0, "staging_bytes": 30 << 30},
        {"allowance": "4GiB", "num_bytes": 35 << 30, "write_s": 10.0, "stall_s": 4.0, "staging_bytes": 4 << 30},
    ]
    measured = {"median_s": 1.5, "disk_bytes_per_s": 2 << 30, "saves": saves, "load": {"to_first_step_s": 54.6}}

    def write(row: dict[str, Any]) -> None:
        record = {"schema": SCHEMA, "commit": "abc", "hardware": "none", "torch": "2.8", "date": "2026-01-01"}
        (tmp_path / "checkpoints" / "a.json").write_text(json.dumps({**record, "rows": [row]}))

    (tmp_path / "checkpoints").mkdir()
    write({"name": "3.14B, two saves", **measured})
    text = table_of_saves(tmp_path)
    assert "| 36 GiB | 35.0 | 20.0 | 1.0 | 5% | 30.0 |" in text.split("\n")
    assert "| 4 GiB | 35.0 | 10.0 | 4.0 | 40% | 4.0 |" in text.split("\n")
    assert "1.50 s undisturbed, and the disk took 2.00 GiB/s" in " ".join(text.split())
    assert "took 55 s" in " ".join(text.split())
    write({"name": "3.14B, two saves", "failed": "no room"})
    with pytest.raises(BadRecordError, match="no row of the 3.14B model that did not fail; run it again"):
        table_of_saves(tmp_path)


def test_no_row_takes_more_disk_than_there_is() -> None:
    for row in SUITES["saves"]:
        parameters = {"3.14b": 3.14e9, "1b": 1.3e9, "tiny": 2e5}[row["model"]]
        num_together = 2 if "keep" in row else 1
        assert num_together * 12 * parameters < 42 * 2**30
