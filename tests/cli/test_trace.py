"""What a command is asked to trace: in which type the weights are when nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.cli.trace import TraceRequest, make_request
from lowtide.errors import ConfigError

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
