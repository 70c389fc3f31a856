"""`lowtide lab show` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.lab.preflight import predict
from lowtide.lab.progress import shown_bytes
from lowtide.lab.recipe_file import find_recipe, read_recipe


def show(*words: str) -> Any:
    return CliRunner().invoke(app, ["lab", "show", *words], catch_exceptions=False)


def test_what_is_shown_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("recipes").mkdir()
    data = "{kind: text-files, path: ../texts, vocab_size: 300}"
    Path("recipes/mine.yaml").write_text(
        f"extends: peak_memory_tiny/control\nmodel_settings: {{vocab_size: 300}}\ndata: {data}\n", encoding="utf-8"
    )
    result = show("recipes/mine.yaml", "--set", "steps=4")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "# mine"
    assert "steps: 4  # --set" in lines
    assert "model: deep-one-tiny  # peak_memory_tiny/_tiny.yaml" in lines
    assert "  vocab_size: 300  # recipes/mine.yaml" in lines
    assert "predicted" not in result.stdout
    # In another folder, where a relative path of data would be another.
    (tmp_path / "elsewhere").mkdir()
    again = tmp_path / "elsewhere" / "again.yaml"
    again.write_text(result.stdout, encoding="utf-8")
    assert read_recipe(again) == read_recipe("recipes/mine.yaml", ["steps=4"])
    assert str(read_recipe(again).data.path) == str(tmp_path / "texts")


def test_the_predicted_peak_is_shown_when_asked_for() -> None:
    result = show("peak_memory_tiny/control", "--predict", "--gpu", "a100-40gb")
    assert result.exit_code == 0, result.stderr
    expected = predict(read_recipe(find_recipe("peak_memory_tiny/control")), hardware="a100-40gb", say=lambda _: None)
    line = result.stdout.splitlines()[1]
    assert line.startswith(
        f"# predicted peak on a100-40gb: {shown_bytes(expected.peak_bytes)} in {expected.peak_phase} ("
    )
    assert "weights" in line


def test_what_is_not_predicted_says_why() -> None:
    result = show("peak_memory_tiny/compile", "--predict")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == "# no prediction: compiled code is not predicted"


def test_what_it_does_differently_is_said() -> None:
    lines = show("peak_memory/checkpoint", "--set", "steps=3").stdout.splitlines()
    assert lines[:2] == ["# peak_memory/checkpoint", "# differs in steps=3, plan.activations=recompute"]
    assert "# differs" not in show("peak_memory/control").stdout


def test_json() -> None:
    plain = json.loads(show("peak_memory_tiny/streamed", "--predict", "--json").stdout)
    assert plain["schema"] == "lowtide.lab_recipe/1"
    assert plain["name"] == "peak_memory_tiny/streamed"
    assert plain["recipe"]["plan"]["weights"] == "streamed"
    assert plain["sources"]["plan.weights"] == str(find_recipe("peak_memory/streamed"))
    assert plain["predicted"]["gpu"] == "h200"
    assert plain["predicted"]["peak_bytes"] >= sum(plain["predicted"]["at_peak"].values()) > 0
    assert plain["not_predicted"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("peak_memory/contrl",), "did you mean 'peak_memory/control'"),
        (("peak_memory/c*",), "'peak_memory/c*' stands for"),
        (("peak_memory/control", "--set", "stpes=3"), "unknown key 'stpes'; did you mean 'steps'"),
        (("peak_memory/control", "--predict", "--gpu", "h20000"), "h20000"),
    ],
)
def test_bad_input_exits_with_2(words: tuple[str, ...], message: str) -> None:
    result = show(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_budget_that_does_not_hold_the_step_is_said() -> None:
    # 6 MiB are enough where memory is counted in bytes of tensors; on a card cuBLAS's workspaces alone take more.
    result = show("peak_memory_tiny/streamed", "--predict")
    assert result.exit_code == 0, result.stderr
    peak, budget, differs, first = result.stdout.splitlines()[1:5]
    assert peak.startswith("# predicted peak on h200: ")
    assert budget.startswith("# its device_memory of 6MiB does not hold that step: it would be out of memory; without")
    assert differs.startswith("# differs in ")
    assert first.startswith("model: ")
    fits = show("peak_memory_tiny/streamed", "--set", "plan.device_memory=1GiB", "--predict", "--json")
    assert json.loads(fits.stdout)["predicted"]["fits_device_memory"] is True
    plain = json.loads(show("peak_memory_tiny/streamed", "--predict", "--json").stdout)
    assert plain["predicted"]["fits_device_memory"] is False


def test_a_budget_that_does_not_even_hold_the_weights_is_no_mistake() -> None:
    result = show("peak_memory_tiny/streamed", "--set", "plan.device_memory=1KiB", "--predict")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].startswith("# no prediction: the device budget of 1.0 KiB cannot hold")
    assert "  device_memory: 1KiB  # --set" in result.stdout.splitlines()
