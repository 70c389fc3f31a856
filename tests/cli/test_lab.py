"""`lowtide lab` as a user types it: tables, JSON, records and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lowtide.cli import lab
from lowtide.cli.lab import parse_seeds
from lowtide.cli.lab_recipes import Prediction, prediction_table
from lowtide.cli.main import app
from lowtide.errors import ConfigError
from lowtide.hardware import find_hardware
from lowtide.lab.progress import named_surroundings
from lowtide.lab.record import Outcome, PredictedFigures, RunRecord, read_record, write_record
from lowtide.lab.report.comparison import LabReport
from lowtide.report.table import Value
from lowtide.units import GiB
from tests.lab.pretend_runs import DOTTED

RECIPES = {
    "_base.yaml": "model: gpt-tiny\ndevice: cpu\nsteps: 3\nseed: 5\n",
    "finishes.yaml": "extends: _base.yaml\nabout: ends well\npublished: {source: a page, peak_gib: 21.165}\n",
    "kills_itself.yaml": "extends: _base.yaml\nabout: ends badly\ndtype: bfloat16\n",
    "hangs.yaml": "extends: _base.yaml\n",
}

ENDS = ("finishes", "hangs", "kills_itself")


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lab, "EXPERIMENT", DOTTED)
    monkeypatch.chdir(tmp_path)
    return write_recipes(tmp_path)


def write_recipes(folder: Path) -> str:
    for name, text in RECIPES.items():
        path = folder / "recipes" / "pretended" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(folder / "recipes")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["lab", *words], catch_exceptions=False)


class TestList:
    def test_a_line_each(self, recipes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab, "OUT", Console(width=80, force_terminal=True, color_system=None))
        result = run("ls", "--recipes", recipes)
        assert result.exit_code == 0, result.stderr
        lines = [line.rstrip() for line in result.stdout.splitlines()]
        own = lines[lines.index("pretended/ gpt-tiny") :]
        assert [line.split(maxsplit=1) for line in own[1:4]] == [
            ["finishes", "ends well"],
            ["hangs"],
            ["kills_itself", "ends badly"],
        ]
        names = [line.split()[0] for line in lines if line.startswith("  ")]
        assert "control" in names
        assert len(names) == len(set(names)), "the small twins are folded"
        assert (
            f"peak_memory_tiny/ the same {names.index('streamed_3gib') - names.index('bf16_budget_60') + 1}, small: "
            in (result.stdout)
        )
        assert "…" not in result.stdout
        assert len(lines) < 45, "one screen"

    def test_notes_are_cut_to_the_terminal_and_whole_in_a_pipe(
        self, recipes: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        note = "a note that no terminal of eighty columns has the room for, however one may turn it"
        (Path(recipes) / "long.yaml").write_text(f"model: gpt-tiny\nabout: {note}\n", encoding="utf-8")
        words = ("ls", "long", "--recipes", recipes)
        monkeypatch.setattr(lab, "OUT", Console(width=80, force_terminal=True, color_system=None))
        cut, *_ = run(*words).stdout.splitlines()
        assert cut.startswith("long  a note")
        assert (len(cut), cut[-1]) == (80, "…")
        monkeypatch.setattr(lab, "OUT", Console(width=80))
        assert run(*words).stdout.splitlines()[0] == f"long  {note}"

    def test_twins_that_are_asked_for_are_listed(self, recipes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = Path(recipes) / "pretended_tiny"
        folder.mkdir()
        (folder / "hangs.yaml").write_text("model: gpt-tiny\nabout: a twin\n", encoding="utf-8")
        folded = run("ls", "--recipes", recipes).stdout
        assert "pretended_tiny/ the same 1, small: lowtide lab ls 'pretended_tiny/*'" in folded
        assert "a twin" not in folded
        assert "a twin" in run("ls", "pretended_tiny/*", "--recipes", recipes).stdout
        # What the larger folder has not is no twin, and must be seen.
        (folder / "only_here.yaml").write_text("model: gpt-tiny\nabout: an only child\n", encoding="utf-8")
        assert "an only child" in run("ls", "--recipes", recipes).stdout

    def test_a_folder_of_the_package_may_have_more_elsewhere(self, recipes: str) -> None:
        (Path(recipes) / "peak_memory").mkdir()
        (Path(recipes) / "peak_memory" / "mine.yaml").write_text("model: gpt-tiny\nabout: my own\n", encoding="utf-8")
        lines = run("ls", "--recipes", recipes).stdout.splitlines()
        assert sum(line.startswith("peak_memory/") for line in lines) == 1
        assert any(line.split() == ["mine", "my", "own"] for line in lines)
        assert any(line.startswith("  control ") for line in lines)

    def test_json(self, recipes: str) -> None:
        result = run("ls", "--recipes", recipes, "--json")
        plain = json.loads(result.stdout)
        assert plain["schema"] == "lowtide.lab_recipes/1"
        by_name = {row["name"]: row for row in plain["recipes"]}
        assert by_name["pretended/kills_itself"] == {
            "name": "pretended/kills_itself",
            "path": str(Path(recipes) / "pretended" / "kills_itself.yaml"),
            "about": "ends badly",
            "model": "gpt-tiny",
            "differs": ["dtype=bfloat16"],
            "published_peak_gib": None,
        }
        assert by_name["pretended/finishes"]["published_peak_gib"] == 21.165
        assert by_name["peak_memory/control"]["published_peak_gib"] == 21.165

    def test_only_what_a_pattern_finds(self, recipes: str) -> None:
        def listed(*words: str) -> list[str]:
            result = run("ls", *words, "--recipes", recipes, "--json")
            assert result.exit_code == 0, result.stderr
            return [row["name"] for row in json.loads(result.stdout)["recipes"]]

        assert listed("pretended/*s") == ["pretended/finishes", "pretended/hangs"]
        assert listed("hangs", "fin*") == ["pretended/finishes", "pretended/hangs"]
        assert listed("control") == ["peak_memory/control", "peak_memory_tiny/control"]
        assert listed("pretended") == listed("pretended/") == [f"pretended/{end}" for end in ENDS]
        assert len(listed()) > len(listed("peak_memory")) > len(ENDS)

    def test_a_pattern_that_finds_nothing_exits_with_2(self, recipes: str) -> None:
        result = run("ls", "hangs", "pretended/finishs", "--recipes", recipes)
        assert result.exit_code == 2
        assert "did you mean 'pretended/finishes'" in " ".join(result.stderr.split())

    def test_predictions_from_the_smallest_on(self, recipes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab, "OUT", Console(width=200))
        small = Path(recipes) / "small.yaml"
        small.write_text("model: gpt-tiny\nbatch: 1x8\nplan: {device_memory: 4MiB}\n", encoding="utf-8")
        (Path(recipes) / "compiled.yaml").write_text("model: gpt-tiny\ncompile: {}\n", encoding="utf-8")
        (Path(recipes) / "bad.yaml").write_text("model: gpt-tiny\nstpes: 3\n", encoding="utf-8")
        words = ("ls", "finishes", "compiled", "bad", str(small), "--recipes", recipes, "--predict")
        result = run(*words, "--gpu", "rtx-4090")
        assert result.exit_code == 0, result.stderr
        title, heads, first, second, *_ = result.stdout.splitlines()
        assert title.strip() == "predicted on rtx-4090, 23.6 GiB"
        assert heads.split() == ["recipe", "peak", "reserved", "in", "fits"]
        assert (first.split()[0], first.split()[-3:]) == ("small", ["not", "its", "4MiB"])
        assert (second.split()[0], second.split()[-1]) == ("pretended/finishes", "yes")
        assert "compiled: no prediction: compiled code is not predicted" in result.stdout.splitlines()
        assert "unknown key 'stpes'" in result.stdout
        plain = {row["name"]: row for row in json.loads(run(*words, "--json").stdout)["recipes"]}
        assert plain["small"]["predicted"]["peak_bytes"] < plain["pretended/finishes"]["predicted"]["peak_bytes"]
        assert plain["small"]["predicted"]["fits_device_memory"] is False
        assert plain["compiled"]["not_predicted"] == "compiled code is not predicted"

    def test_what_is_too_large_for_the_card_is_said(self) -> None:
        figures = {"peak_phase": "loss", "at_peak": {}}
        card = find_hardware("h200")
        sizes = {
            "fits": (GiB, card.memory_bytes - card.context_bytes),
            "may": (2 * GiB, card.memory_bytes - card.context_bytes + 1),
            "large": (card.memory_bytes - card.context_bytes + 1, 2 * card.memory_bytes),
        }
        predictions = {
            name: Prediction(figures=PredictedFigures(peak_bytes=peak, reserved_bytes=reserved, **figures))
            for name, (peak, reserved) in sizes.items()
        }
        (*_, fits) = prediction_table(predictions, card).columns
        assert [cell.text for cell in fits.values if isinstance(cell, Value)] == ["yes", "hardly", "no"]

    def test_predictions_are_for_cards_that_are_known(self, recipes: str) -> None:
        result = run("ls", "--predict", "--gpu", "rtx-409")
        assert result.exit_code == 2
        assert "did you mean 'rtx-4090'" in " ".join(result.stderr.split())

    def test_one_bad_file_does_not_hide_the_others(self, recipes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab, "OUT", Console(width=200))
        (Path(recipes) / "bad.yaml").write_text("model: gpt-tiny\nstpes: 3\n", encoding="utf-8")
        result = run("ls", "--recipes", recipes, "--json")
        assert result.exit_code == 0
        by_name = {row["name"]: row for row in json.loads(result.stdout)["recipes"]}
        assert "unknown key 'stpes'; did you mean 'steps'" in by_name["bad"]["error"]
        assert "about" in by_name["pretended/finishes"]
        assert "cannot be read" in run("ls", "--recipes", recipes).stdout


class TestRun:
    def test_a_killed_run_is_recorded_and_the_rest_goes_on(self, recipes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab, "OUT", Console(width=200))
        result = run("run", "kills_itself", "finishes", "--recipes", recipes, "--seeds", "2", "--set", "steps=4")
        assert result.exit_code == 1
        words = [line.split() for line in result.stdout.splitlines()]
        assert words[words.index(["pretended/"]) :][:5] == [
            ["pretended/"],
            ["kills_itself", "5", "killed"],
            ["kills_itself", "6", "killed"],
            ["finishes", "5", "finished", "3.000", "GiB", "6", "100"],
            ["finishes", "6", "finished", "3.000", "GiB", "6", "100"],
        ]
        assert "records are in lowtide-lab/records/RECIPE" in result.stdout
        records = sorted(Path("lowtide-lab/records/pretended/finishes").glob("seed-*_*.json"))
        assert [read_record(path).recipe["seed"] for path in records] == [5, 6]
        assert read_record(records[0]).recipe["steps"] == 4
        lines = result.stderr.splitlines()
        assert "[1/4] pretended/kills_itself, seed 5: starting" in lines
        assert "[3/4] pretended/finishes, seed 5: finished, peak 3.000 GiB" in lines
        assert any(
            "[2/4] pretended/kills_itself, seed 6: killed: the run was ended by SIGKILL" in line for line in lines
        )
        assert any("training, step 2 of 3, loss 5.2500, peak 2.000 GiB, 20 samples/s" in line for line in lines)

    def test_a_shared_device_gives_no_speeds(self, recipes: str) -> None:
        [row] = json.loads(run("run", "finishes", "--recipes", recipes, "--shared", "--json").stdout)["runs"]
        assert row["samples_per_s"] is None
        assert (row["perplexity"], row["peak_bytes"]) == (pytest.approx(100.0), 3 * 1024**3)
        speed = read_record(Path(row["record"])).speed
        assert speed is not None
        assert (speed.is_alone, speed.step_s) == (False, (1.0, 0.5, 0.5))

    def test_outcomes_are_whole_on_a_narrow_terminal(self, recipes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab, "OUT", Console(width=80))
        long = Path(recipes) / "pretended" / "a_name_longer_than_compile_per_layer_finishes.yaml"
        long.write_text("extends: _base.yaml\n", encoding="utf-8")
        result = run("run", "*finishes", "--recipes", recipes)
        assert "…" not in result.stdout
        assert " finished " in result.stdout
        assert " failed " in result.stdout  # the pretended experiment knows no such name
        assert max(map(len, result.stdout.splitlines())) <= 80

    def test_json_and_a_folder(self, recipes: str, tmp_path: Path) -> None:
        path = Path(recipes) / "pretended" / "finishes.yaml"
        result = run("run", str(path), "--seeds", "9,", "--out", str(tmp_path / "results"), "--json")
        assert result.exit_code == 0, result.stderr
        plain = json.loads(result.stdout)  # nothing but JSON on the standard output
        assert plain["schema"] == "lowtide.lab_runs/1"
        (row,) = plain["runs"]
        path = Path(row.pop("record"))
        assert path.is_relative_to(tmp_path / "results" / "records" / "finishes")
        speed = read_record(path).speed
        assert speed is not None
        assert (speed.is_alone, speed.step_s) == (True, (1.0, 0.5, 0.5))
        assert row.pop("perplexity") == pytest.approx(100.0)
        assert row == {
            "name": "finishes",
            "seed": 9,
            "outcome": "finished",
            "message": "",
            "peak_bytes": 3 * 1024**3,
            "samples_per_s": 6.0,
        }

    def test_what_is_lacking_is_recorded(self, recipes: str) -> None:
        result = run("run", "pretended/finishes", "--recipes", recipes, "--set", "device=cuda:99", "--json")
        assert result.exit_code == 1
        (row,) = json.loads(result.stdout)["runs"]
        assert row["outcome"] == "failed"
        assert row["message"].startswith("it cannot run here: it needs the device 'cuda:99'")
        assert read_record(Path(row["record"])).message == row["message"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("pretended/finishs",), "there is no recipe named 'pretended/finishs'; did you mean 'pretended/finishes'"),
            (("pretended/finishes", "nothing/*"), "no recipe matches the pattern 'nothing/*'; see lowtide lab ls"),
            (("finishes", "--set", "stpes=2"), "unknown key 'stpes'; did you mean 'steps'"),
            (("finishes", "--set", "device=gpu"), "'gpu' is no device"),
            (("finishes", "--seeds", "some"), "--seeds 'some' is neither a number of seeds nor a list"),
            (("finishes", "--limit", "0"), "the limit of a run is 0.0 s; give more than 0"),
            (("finishes", "--recipes", "no/folder"), "there is no folder of recipes 'no/folder'"),
            (("finishes", "--out", "recipes/pretended/finishes.yaml"), "--out"),
            (
                ("finishes", "kills_itself", "--set", "precision=bf16 exact"),
                "finishes.yaml with precision=bf16 exact: precision is 'bf16 exact', which is for weights in bfloat16",
            ),
            (
                ("kills_itself", "finishes", "--set", "data.kind=stories", "--set", "data.vocab_size=9000"),
                "the recipe 'pretended/kills_itself' cannot run: data.vocab_size is 9000, and the largest embedding",
            ),
            (
                ("finishes", "--set", "model_settings.vocb_size=9000"),
                "the recipe 'pretended/finishes' cannot run: model_settings: unknown key 'vocb_size'; did you mean",
            ),
            (
                ("finishes", "--set", "optimizer.settings.lr=-1"),
                "the recipe 'pretended/finishes' cannot run: optimizer.settings: ValueError: Invalid learning rate",
            ),
        ],
    )
    def test_bad_input_exits_with_2_before_anything_runs(
        self, recipes: str, words: tuple[str, ...], message: str
    ) -> None:
        result = run("run", *words, "--recipes", recipes)
        assert result.exit_code == 2
        # A long path is cut anywhere, by how long the folder's name is.
        assert "".join(message.split()) in "".join(result.stderr.split())
        assert not list(Path().rglob("*.json"))

    @pytest.mark.slow
    def test_ctrl_c_ends_the_worker_and_records_it(self, tmp_path: Path) -> None:
        write_recipes(tmp_path)
        script = f"from lowtide.cli import lab, main; lab.EXPERIMENT = {DOTTED!r}; main.app()"
        words = ["lab", "run", "hangs", "finishes", "--recipes", "recipes"]
        with subprocess.Popen(
            [sys.executable, "-c", script, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever starts the tests in the background has them ignore it, and children with them.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:
            assert process.stderr is not None
            line = ""
            while "step 2 of 3" not in line:
                line = process.stderr.readline()
                assert line, "it ended before it trained"
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in stderr
        assert "killed" in stdout
        (path,) = tmp_path.rglob("records/**/*.json")
        record = read_record(path)
        assert record.outcome is Outcome.KILLED
        assert record.message.startswith("the run was interrupted from the keyboard after ")


class TestSeeds:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [(None, (42,)), ("1", (42,)), ("3", (42, 43, 44)), ("0,1,2", (0, 1, 2)), (" 4, 2 ", (4, 2)), ("0,", (0,))],
    )
    def test_a_number_or_a_list(self, text: str | None, expected: tuple[int, ...]) -> None:
        assert parse_seeds(text, 42) == expected

    @pytest.mark.parametrize("text", ["", ",", "0", "-1", "1.5", "1,1", "1,,2", "1,x", "٣"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text, 42)

    def test_a_number_that_is_a_seed_is_told_from_so_many_runs(self) -> None:
        assert len(parse_seeds("20", 42)) == 20
        with pytest.raises(ConfigError, match="for the seed 43 alone write --seeds 43, with the comma"):
            parse_seeds("43", 42)


class TestReport:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[RunRecord], dict[str, Any]]]:
        """What the report package is asked for, instead of a report."""
        calls: list[tuple[Sequence[RunRecord], dict[str, Any]]] = []

        def write_nothing(records: Sequence[RunRecord], **words: Any) -> LabReport:
            calls.append((records, words))
            return LabReport(comparisons=(), records=())

        monkeypatch.setattr("lowtide.lab.report.write.write_report", write_nothing)
        return calls

    def test_records_reach_the_report_and_bad_ones_are_named(
        self, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("a", "b"):
            record = RunRecord(
                name=name, outcome=Outcome.KILLED, surroundings=named_surroundings("none"), recipe={"seed": 0}
            )
            write_record(record, tmp_path / "lowtide-lab" / "records" / name / "seed-0.json")
        (tmp_path / "lowtide-lab" / "records" / "bad.json").write_text("{", encoding="utf-8")
        result = run("report", "--markdown", "table.md")
        assert result.exit_code == 0, result.stderr
        ((records, words),) = asked
        assert [record.name for record in records] == ["a", "b"]
        assert words["html"] is None  # only what is asked for
        assert words["markdown"] == Path("table.md")
        assert words["png"] is None
        assert len(words["skipped"]) == 1
        assert "records/bad.json: cannot be read as JSON" in words["skipped"][0]
        lines = result.stderr.splitlines()
        assert lines[0].startswith("skipped ")
        assert "records/bad.json" in lines[0]
        assert lines[1:] == ["wrote table.md"]
        assert run("report").stderr.splitlines()[1:] == ["wrote report.html"]
        assert asked[1][1]["html"] == Path("report.html")
        assert run("report", "--out", "a.html", "--png", "a.png").stderr.splitlines()[1:] == [
            "wrote a.html",
            "wrote a.png",
        ]

    def test_older_records_are_left_out_and_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for number, (name, seed) in enumerate([("a", 0), ("a", 0), ("a", 0), ("a", 1), ("b", 0)]):
            around = replace(named_surroundings("none"), date=f"2026-03-0{number + 1}T10:00:00+00:00")
            record = RunRecord(name=name, outcome=Outcome.KILLED, surroundings=around, recipe={"seed": seed})
            write_record(record, tmp_path / "lowtide-lab" / "records" / f"{number}.json")
        result = run("report", "--markdown", "table.md")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines()[0] == "a, b on none"
        assert "left out 2 older records of the same recipe, seed and settings; --all shows them" in result.stderr
        assert "- records: 3; 2 older ones" in Path("table.md").read_text()
        assert "older 1" not in Path("table.md").read_text()
        result = run("report", "--markdown", "table.md", "--all")
        assert "left out" not in result.stderr
        assert "- records: 5\n" in Path("table.md").read_text()
        assert "older 2, 2026-03-01 10:00" in Path("table.md").read_text()

    def test_nothing_to_report_exits_with_2(self, asked: list[Any], tmp_path: Path) -> None:
        result = run("report", str(tmp_path))
        assert result.exit_code == 2
        assert "there are no records and no sweeps in" in " ".join(result.stderr.split())
        assert asked == []
