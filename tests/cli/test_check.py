"""`lowtide check` as a user types it: tables, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli.check import shown_steps
from lowtide.cli.main import app
from lowtide.lab import check

RECIPE = """
model: gpt-tiny
batch: 2x16
device: cpu
steps: 3
plan: {device_memory: 8MiB}
"""
RANK_MODELS = "tests.lab.rank_models"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "small.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return str(file)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["check", *words], catch_exceptions=False)


@pytest.fixture
def wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managed runs start from another weight than plain ones."""
    real = check.manage

    def wrong(model: torch.nn.Module, *arguments: Any, **settings: Any) -> Any:
        with torch.no_grad():
            model.get_parameter("layers.2.mlp.up.weight")[0, 0] += 0.25
        return real(model, *arguments, **settings)

    monkeypatch.setattr(check, "manage", wrong)


def test_the_same_run_passes(recipe: str) -> None:
    result = run(recipe)
    assert result.exit_code == 0, result.stderr
    for words in ("gpt-tiny, float32, emulated device", "plain loss", "managed loss", "budget", "8.0 MiB"):
        assert words in result.stdout
    assert "passed: 3 losses and all weights are the same, bit for bit" in " ".join(result.stdout.split())


def test_json_holds_the_resolved_recipe(recipe: str) -> None:
    result = run(recipe, "--json", "--set", "steps=2", "--set", "plan.weights=resident")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)  # nothing but JSON on the standard output
    assert record["schema"] == "lowtide.check/1"
    assert record["passed"] is True
    assert len(record["plain_losses"]) == 2
    assert record["recipe"]["plan"]["weights"] == "resident"
    assert record["stats"]["num_steps"] == 2


@pytest.mark.usefixtures("wrong_weight")
def test_a_difference_exits_with_1(recipe: str) -> None:
    result = run(recipe)
    assert result.exit_code == 1
    assert "failed: beyond the tolerance of 0: losses differ by at most" in " ".join(result.stdout.split())
    assert json.loads(run(recipe, "--json").stdout)["passed"] is False


@pytest.mark.usefixtures("wrong_weight")
def test_a_difference_within_the_tolerance_passes(recipe: str) -> None:
    result = run(recipe, "--set", "tolerance=0.5")
    assert result.exit_code == 0
    assert "passed: within the tolerance of 0.5" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "stpes=2"], "unknown key 'stpes'; did you mean 'steps'"),
        (["--set", "model=gpt-tini"], "no model named 'gpt-tini'; did you mean 'gpt-tiny'"),
        (["--set", "batch=2x9999"], "128 positions"),
        (["--set", "plan.weights.hed=resident"], "has no settings of its own"),
        (["--set", "device=gpu"], "'gpu' is no device"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_is_wrong(recipe: str, words: list[str], message: str) -> None:
    result = run(recipe, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_missing_recipe_exits_with_2(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "cannot read the recipe file" in " ".join(result.stderr.split())


def test_ranks_train_as_one_process(recipe: str) -> None:
    result = run(recipe, "--ranks", "2")
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    for words in (
        "gpt-tiny, float32, 2 ranks, emulated",
        "loss of the ranks",
        "Rank 0's memory",
        "allowed",
    ):
        assert words in text
    assert "passed: 3 losses and all weights of 2 ranks and of one process are the same, bit for bit" in text


def test_json_of_ranks_that_differ(recipe: str) -> None:
    result = run(recipe, "--ranks", "2", "--json", "--set", f"model={RANK_MODELS}:wrong", "--set", "batch=null")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert (record["schema"], record["passed"], record["num_ranks"]) == ("lowtide.check-ranks/1", False, 2)


def test_ranks_that_differ_exit_with_1(recipe: str) -> None:
    result = run(recipe, "--ranks", "2", "--set", f"model={RANK_MODELS}:wrong", "--set", "batch=null")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert (
        "failed: 3 losses and all weights of 2 ranks and of one process differ beyond the tolerance of 1e-05 of" in text
    )
    assert "first the loss of step 1" in text


def test_a_rank_that_fails_exits_with_1_and_is_named(recipe: str) -> None:
    result = run(recipe, "--ranks", "2", "--set", f"model={RANK_MODELS}:raising", "--set", "batch=null")
    assert result.exit_code == 1
    assert result.stderr.strip() == "RankFailedError: rank 1 of 2: ValueError: on purpose"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "the number of ranks is 0; give 1 or more"),
        (["--ranks", "3"], "2 samples cannot be divided among 3 ranks"),
        (["--ranks", "2", "--set", "plan.kind=warm-up"], "plan is a warm-up"),
    ],
)
def test_ranks_that_cannot_be_exit_with_2(recipe: str, words: list[str], message: str) -> None:
    result = run(recipe, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_long_runs_show_both_ends_and_the_first_difference() -> None:
    assert list(shown_steps(3, None, limit=4)) == [0, 1, 2]
    assert list(shown_steps(10, None, limit=4)) == [0, 1, None, 8, 9]
    assert list(shown_steps(10, 5, limit=4)) == [0, 1, None, 5, None, 8, 9]
    assert list(shown_steps(10, 2, limit=4)) == [0, 1, 2, None, 8, 9]
