"""What a command is asked to trace: in which type the weights are when nobody says, and under which plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lowtide
from lowtide.cli.main import app
from lowtide.cli.trace import TraceRequest, make_request
from lowtide.errors import ConfigError
from lowtide.models import resolve_model

RUN = CliRunner()

FACTORY = """
import torch
from torch import nn

def make():
    return nn.Linear(8, 4), {"input": torch.ones(2, 8)}
"""


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.float32), ("bfloat16", torch.bfloat16)], ids=["as made", "asked"]
)
def test_a_factory_keeps_its_type_unless_one_is_asked_for(
    dtype: str | None, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model_of_a_user.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    problem = TraceRequest(model="own_model_of_a_user:make", batch="2x8", dtype=dtype).problem()
    assert {weight.dtype for weight in problem.model.parameters()} == {expected}
    assert {value.dtype for value in problem.batch.values() if value.is_floating_point()} <= {expected}


@pytest.mark.parametrize("word", ["fp32", "float32", "torch.float32"])
def test_a_type_has_one_name_however_it_is_written(word: str) -> None:
    request = make_request("gpt-tiny", None, "h200", [f"dtype={word}", "step.autocast=torch.bfloat16"])
    assert (request.dtype, request.step.autocast) == ("float32", "bfloat16")
    with pytest.raises(ConfigError, match="dtype is 'fp64'; give float32, bfloat16 or float16"):
        make_request("gpt-tiny", None, "h200", ["dtype=fp64"])


def test_other_models_are_in_bfloat16() -> None:
    problem = TraceRequest(model="gpt-tiny").problem()
    assert {weight.dtype for weight in problem.model.parameters()} == {torch.bfloat16}


def test_a_plan_is_set_in_the_words_of_make_plan() -> None:
    words = ["trace", "gpt-tiny", "--batch", "4x64", "--gpu", "rtx-4090", "--json"]
    set_ = ["plan.weights=streamed", "plan.update=host", "plan.activations=recompute", "precision=bf16 exact"]
    result = RUN.invoke(app, [*words, *(part for each in set_ for part in ("--set", each))])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    source = resolve_model("gpt-tiny")
    model = source.build(torch.bfloat16)
    expected = lowtide.trace(
        model,
        source.make_batch("4x64"),
        optimizer=torch.optim.AdamW,
        plan=lowtide.make_plan(model, weights="streamed", update="host", activations="recompute"),
        precision="bf16 exact",
        hardware="rtx-4090",
    )
    assert found["peak_reserved_bytes"] == expected.peak_reserved_bytes
    assert (found["host_bytes"], found["pinned_bytes"]) == (expected.host_bytes, expected.pinned_bytes)
    assert expected.simulated_s is not None
    assert found["step_s"] == expected.simulated_s["step"]
    plain = json.loads(RUN.invoke(app, words).stdout)
    assert plain["host_bytes"] is None
    assert found["peak_bytes"] < plain["peak_bytes"]


def test_the_terminal_shows_the_host_of_a_step_under_a_plan() -> None:
    result = RUN.invoke(app, ["trace", "gpt-tiny", "--batch", "2x64", "--set", "plan.update=host"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert re.search(r"host [\d.]+ MiB [\d.]+ MiB of it locked", said)
    assert "time of the step about" in said


@pytest.mark.parametrize(
    ("set_", "message"),
    [
        (["plan.weights=everywhere"], "weights"),
        (["plan.update=paged"], "which is not predicted"),
        (["precision=bf16 exact"], "there is no plan"),
        (["plan.update=host", "step.activations=recompute"], "and so does a plan"),
        (["plan.update=host", "optimizer=none"], "a plan places what an optimizer needs"),
    ],
)
def test_a_plan_that_cannot_be_traced_is_one_sentence(set_: list[str], message: str) -> None:
    words = ["trace", "gpt-tiny", "--batch", "2x64", *(part for each in set_ for part in ("--set", each))]
    result = RUN.invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_explain_ends_with_what_fits() -> None:
    result = RUN.invoke(app, ["explain", "gpt-tiny", "--batch", "8x128", "--gpu", "892MiB", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peak_reserved_bytes"] + found["context_bytes"] > found["capacity_bytes"]
    fitting = [row for row in found["what_if"] if row["fits"]]
    assert fitting
    for row in fitting:
        assert row["reserved_bytes"] + found["context_bytes"] <= found["capacity_bytes"]
    least = min(fitting, key=lambda row: (row["technique"].count(" + "), row["step_s"] or 1e9))
    assert f"like this: {least['technique']}." in found["verdict"]
    # What `--set` takes traces that row.
    words = ["trace", "gpt-tiny", "--batch", "8x128", "--gpu", "892MiB", "--json"]
    again = RUN.invoke(app, [*words, *(part for each in least["set_"] for part in ("--set", each))])
    assert json.loads(again.stdout)["peak_reserved_bytes"] == least["reserved_bytes"]
