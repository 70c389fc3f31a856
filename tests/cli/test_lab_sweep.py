"""`lowtide lab sweep` as a user types it, and its points in the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli.lab_sweep import parse_budgets
from lowtide.cli.main import app
from lowtide.errors import ConfigError
from lowtide.lab.budget import read_sweep, write_sweep
from lowtide.lab.progress import named_surroundings
from lowtide.lab.record import Outcome, RunRecord, write_record
from lowtide.lab.records import collect

SMALL = ("lab", "sweep", "peak_memory_tiny/compile", "--budgets", "1,0.5", "--set", "batch=2x32")


def test_points_are_shown_written_and_found_by_the_report(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SMALL, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.stderr
    points = json.loads(result.stdout)["points"]
    assert [point["budget"] for point in points] == [0.5, 1.0]
    assert points[0]["saved_bytes"] < points[1]["saved_bytes"]
    path = tmp_path / "sweeps" / "deep-one-tiny_float32_2x32.json"
    assert [point.saved_bytes for point in read_sweep(path).points] == [point["saved_bytes"] for point in points]

    surroundings = named_surroundings("none")
    record = RunRecord(name="a", outcome=Outcome.FAILED, surroundings=surroundings, recipe={"seed": 0})
    write_record(record, tmp_path / "records" / "a" / "seed-0.json")
    (tmp_path / "sweeps" / "bad.json").write_text("{}", encoding="utf-8")
    # Of the right kind, and with nothing that could be drawn.
    write_sweep(replace(read_sweep(path), points=()), tmp_path / "sweeps" / "empty.json")
    found = collect([tmp_path])
    assert found.sweeps == (read_sweep(path),)
    assert len(found.skipped) == 2
    assert "bad.json" in found.skipped[0]
    assert "empty.json: the sweep has no points" in found.skipped[1]
    page = tmp_path / "lab.md"
    result = CliRunner().invoke(app, ["lab", "report", str(tmp_path), "--markdown", str(page)])
    assert result.exit_code == 0, result.stderr
    assert "empty.json" in page.read_text(encoding="utf-8")


def test_a_report_of_a_sweep_alone(tmp_path: Path) -> None:
    out = tmp_path / "lab"
    assert CliRunner().invoke(app, [*SMALL, "--out", str(out)]).exit_code == 0
    page, text = tmp_path / "lab.html", tmp_path / "lab.md"
    words = ["lab", "report", str(out), "--out", str(page), "--markdown", str(text)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert "deep-one-tiny, 2x32, float32, torch" in result.stdout
    for file in (page, text):
        assert "deep-one-tiny, 2x32, float32, torch" in file.read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["lab", "report", str(out), "--png", str(tmp_path / "lab.png")])
    assert result.exit_code == 2
    assert "a picture shows runs" in " ".join(result.stderr.split())


def test_the_table_is_for_people(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SMALL, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    assert "deep-one-tiny, 2x32, float32" in result.stdout
    assert "0.5 │" in result.stdout


@pytest.mark.parametrize("text", ["", "a", "0.5;1"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of numbers"):
        parse_budgets(text)


def test_beyond_one_exits_with_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SMALL[:4], "1.5", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "not within 0 and 1" in " ".join(result.stderr.split())
