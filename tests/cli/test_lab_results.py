"""What `lowtide lab report` says on the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lowtide.cli.lab_results import parse_budgets, summary_of
from lowtide.cli.main import app
from lowtide.errors import ConfigError
from lowtide.lab.budget import read_sweep, write_sweep
from lowtide.lab.progress import named_surroundings
from lowtide.lab.record import MemoryFigures, Outcome, RunRecord, SpeedFigures, write_record
from lowtide.lab.records import collect
from lowtide.lab.report.comparison import make_comparisons
from lowtide.units import GiB
from tests.lab.report.samples import experiment, record


def said(records: Sequence[RunRecord]) -> list[str]:
    (comparison,) = make_comparisons(records)
    console = Console(width=80, file=io.StringIO())
    console.print(*summary_of(comparison), sep="\n")
    return console.file.getvalue().splitlines()


def test_peaks_speeds_and_the_fastest_within_a_budget() -> None:
    speed = SpeedFigures(step_s=(0.5,) * 4, samples_per_step=1)
    lines = said(
        [
            record("x/control", peak_bytes=8 * GiB, speed=speed, evaluation_loss=0.0),
            record("x/large", peak_bytes=None, outcome=Outcome.OUT_OF_MEMORY),
            record("x/half", peak_bytes=4 * GiB, speed=speed, evaluation_loss=0.0),
        ]
    )
    assert lines[0] == "x on NVIDIA H200"
    assert lines[2].split() == ["configuration", "GiB", "reduction", "at", "samples/s", "perplexity"]
    assert lines[3].split() == ["control", "8.000", "forward", "2.000", "1.00"]
    assert lines[4].split() == ["half", "4.000", "50.0%", "forward", "2.000", "1.00"]
    assert [line.strip() for line in lines[5:7]] == ["large", str(Outcome.OUT_OF_MEMORY)]
    assert lines[7] == "Fastest within a budget, by peak: from 4.000 GiB half (2.000 samples/s)."


def test_different_numbers_of_steps_and_remarks_are_said() -> None:
    def made(name: str, num_steps: int, *remarks: str) -> RunRecord:
        speed = SpeedFigures(step_s=(0.5,) * num_steps, samples_per_step=1)
        return record(name, speed=speed, evaluation_loss=0.0, remarks=remarks)

    assert "steps" not in said([made("x/control", 4), made("x/other", 4)])[2]
    lines = said([made("x/control", 4), made("x/other", 3, "evaluated on 3 samples")])
    assert lines[2].split()[-3:] == ["steps", "samples/s", "perplexity"]
    assert [line.split()[-3] for line in lines[3:5]] == ["4", "3"]
    assert lines[-2] == "Note: other: evaluated on 3 samples"


def test_perplexities_on_the_way_are_a_sentence() -> None:
    run = record("x/control", losses=(5.0,) * 4, evaluation_loss=0.0, evaluations=((1, 5.0), (2, 1.0)))
    assert "control: perplexity 148.4, 2.72, 1.00 after 1, 2, 4 steps" in said([run])


def test_why_a_run_did_not_finish_is_said_once_for_all_seeds() -> None:
    message = 'KeyError: 3\nlast heard: training\n  File "a.py", line 3, in run'
    failed = [record("x/own", seed=seed, peak_bytes=None, outcome=Outcome.FAILED, message=message) for seed in (1, 2)]
    lines = said(
        [*failed, record("x/large", peak_bytes=None, outcome=Outcome.OUT_OF_MEMORY, message="needs " + "x" * 999)]
    )
    assert lines.count("own: KeyError: 3") == 1
    assert not any("a.py" in line for line in lines)
    assert "large: needs …" in lines


def test_long_settings_are_letters_beside_the_names() -> None:
    def made(name: str, steps: int) -> RunRecord:
        speed = SpeedFigures(step_s=(0.5,) * steps, samples_per_step=1)
        settings = {"steps": steps, "data": {"kind": f"a-long-name-of-data-{steps}"}}
        return record(name, recipe=settings, speed=speed, evaluation_loss=0.0)

    lines = said([made("x/a_name_of_some_length", steps) for steps in (3, 4)] + [made("x/control", 4)])
    names = [line.split()[:2] for line in lines[3:6]]
    assert names[0][0] == "control"
    assert names[1:] == [["a_name_of_some_length", "[a]"], ["a_name_of_some_length", "[b]"]]
    assert "[b] steps=4, data.kind=a-long-name-of-data-4" in lines


def test_columns_make_room_for_names() -> None:
    def made(name: str) -> RunRecord:
        memory = MemoryFigures(peak_bytes=GiB, by_phase={"forward": GiB}, reserved_bytes=2 * GiB)
        return record(name, memory=memory, evaluation_loss=0.0)

    assert "reserved" in " ".join(said([made("x/control"), made("x/short")]))
    lines = said([made("x/control"), made(f"x/{'long_name_' * 4}")])
    assert "reserved" not in " ".join(lines)
    assert any(line.startswith("long_name_" * 4) for line in lines)


def test_a_whole_experiment_fits_a_terminal() -> None:
    lines = said([*experiment(), *experiment(seed=1)])
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


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
    # A file of the right kind, and with nothing that could be drawn.
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


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a sweep, and what was said meanwhile."""
    out = tmp_path_factory.mktemp("lab")
    result = CliRunner().invoke(app, [*SMALL, "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    return out, result.stdout


def test_a_report_of_a_sweep_alone(swept: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = swept
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


def test_the_table_is_for_people(swept: tuple[Path, str]) -> None:
    _, said = swept
    assert "deep-one-tiny, 2x32, float32" in said
    assert "   0.5  " in said


@pytest.mark.parametrize("text", ["", "a", "0.5;1"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of numbers"):
        parse_budgets(text)


def test_beyond_one_exits_with_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*SMALL[:4], "1.5", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "not within 0 and 1" in " ".join(result.stderr.split())
