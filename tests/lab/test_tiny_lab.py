"""Every recipe of the Peak Memory experiment on a small model, from the corpus to the record, and the report over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.lab.experiment import run_experiment
from lowtide.lab.recipe_file import find_recipe, known_recipes, read_recipe
from lowtide.lab.recipe_parts import EvaluationRecipe, Stories
from lowtide.lab.record import Outcome, RunRecord
from lowtide.lab.records import collect
from lowtide.models import resolve_model

pytestmark = pytest.mark.slow

NAMES = [name for name in known_recipes() if name.startswith("peak_memory_tiny/")]
SAME_NUMBERS = ("fused", "checkpoint", "fused_checkpoint", "selective", "math_attention")
"""These differ from control in memory and time alone."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def run(name: str) -> RunRecord:
    recipe = read_recipe(find_recipe(name))
    assert isinstance(recipe.data, Stories)
    recipe = replace(recipe, steps=4, evaluation=EvaluationRecipe(samples=8, batch=8))
    return run_experiment(recipe, name=name, on_progress=lambda progress: None)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it
@pytest.mark.parametrize("name", NAMES)
def test_each_runs_and_learns(name: str) -> None:
    record = run(name)
    assert record.outcome is Outcome.FINISHED
    assert record.losses[-1] < record.losses[0]
    assert record.evaluation_loss is not None
    assert record.memory is not None
    assert record.memory.peak_bytes > 0
    assert (record.session is not None) == (record.recipe["plan"] is not None)


def test_techniques_change_memory_and_no_number() -> None:
    control = run("peak_memory_tiny/control")
    assert control.memory is not None
    num_gradients = len(list(resolve_model("deep-one-tiny").build(torch.float32).parameters()))
    for name in SAME_NUMBERS:
        record = run(f"peak_memory_tiny/{name}")
        assert record.losses == control.losses
        assert record.evaluation_loss == control.evaluation_loss
        assert record.memory is not None
        # A session has the norms of its gradients on the device until the next backward, one by one and together.
        assert record.memory.peak_bytes <= control.memory.peak_bytes + 2 * 4 * num_gradients
    streamed = run("peak_memory_tiny/streamed")
    assert streamed.memory is not None
    assert streamed.memory.peak_bytes < control.memory.peak_bytes / 3


def test_from_the_command_line_to_the_report(tmp_path: Path) -> None:
    words = ["peak_memory_tiny/control", "peak_memory_tiny/fused_checkpoint", "--set", "steps=2", "--seeds", "2"]
    result = CliRunner().invoke(app, ["lab", "run", *words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.stdout + result.stderr
    found = collect([tmp_path / "out"])
    assert [(record.name, record.outcome) for record in found.records] == [
        ("peak_memory_tiny/control", Outcome.FINISHED),
        ("peak_memory_tiny/control", Outcome.FINISHED),
        ("peak_memory_tiny/fused_checkpoint", Outcome.FINISHED),
        ("peak_memory_tiny/fused_checkpoint", Outcome.FINISHED),
    ]
    page = tmp_path / "lab.html"
    result = CliRunner().invoke(app, ["lab", "report", str(tmp_path / "out"), "--out", str(page)])
    assert result.exit_code == 0, result.stderr
    assert "fused_checkpoint" in page.read_text(encoding="utf-8")
