"""`lowtide plan`: one screen, the same as JSON, and exit code 2 for what was typed wrongly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.planning.plan import plan_from_json

RUN = CliRunner()
WORDS = ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "rtx-4090", "--device-memory", "200MiB"]


def test_one_screen_says_what_the_plan_takes() -> None:
    result = RUN.invoke(app, WORDS)
    assert result.exit_code == 0, result.output
    for words in ("time of the step", "tokens/s", "of 200.0 MiB reserved", "What else fits", "lowtide.prepare("):
        assert words in result.output
    assert len(result.output.splitlines()) <= 40


def test_the_same_for_machines(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [*WORDS, "--json", "--report", str(page), "--set", "schedule=in_backward", "--set", "precision=bf16 exact"]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peak_reserved_bytes"] <= 200 << 20
    plan = plan_from_json(json.dumps(found["plan"]))
    assert plan.schedule.value == "in_backward"
    assert found["step_s"] > 0
    assert page.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory", "60MiB"], "no plan was found whose step stays inside 60.0 MiB"),
        (["--device-memory", "lots"], "device_memory"),
        (["--gpu", "rtx-9999"], "rtx-9999"),
        (["--set", "schedule=never"], "schedule"),
        (["--set", "optimizer=none"], "a plan places what an optimizer needs"),
    ],
)
def test_what_is_wrong_is_told_with_exit_code_2(words: list[str], message: str) -> None:
    result = RUN.invoke(app, ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "rtx-4090", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_memory_against_speed_is_a_table_and_json() -> None:
    words = ["plan", "gpt-tiny", "--batch", "8x128", "--gpu", "rtx-4090", "--pareto"]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Memory against speed" in result.output
    assert "replayed" in result.output
    points = json.loads(RUN.invoke(app, [*words, "--json"]).stdout)["by_budget"]
    assert len(points) >= 3
    assert all(
        later["device_bytes"] > earlier["device_bytes"] and later["step_s"] < earlier["step_s"]
        for earlier, later in itertools.pairwise(points)
    )
    assert json.loads(RUN.invoke(app, [*words[:-1], "--json"]).stdout)["by_budget"] == []
