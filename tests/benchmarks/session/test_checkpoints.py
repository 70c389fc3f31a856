"""The benchmark of saves, run with its tiny row: what it reports follows from what was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.session.checkpoints import SUITES, disk_bytes_per_s, run
from benchmarks.session.row import build

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


def test_no_row_takes_more_disk_than_there_is() -> None:
    for row in SUITES["saves"]:
        parameters = {"3.14b": 3.14e9, "1b": 1.3e9, "tiny": 2e5}[row["model"]]
        num_together = 2 if "keep" in row else 1
        assert num_together * 12 * parameters < 42 * 2**30
