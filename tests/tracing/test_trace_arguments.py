"""Arguments of `trace` that make no sense: told before anything runs, with what to pass instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adamw"}, r"got 'adamw'; for example optimizer=torch.optim.AdamW"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            r"holds 2 parameters, none of them of this Linear",
        ),
        ({"torch_version": "banana"}, r"must look like 2.11.0, got 'banana'"),
        ({"torch_version": "3.1"}, r"made for torch 2.8 to 2.13"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lowtide.trace(nn.Linear(4, 4), torch.randn(2, 4), **arguments)


def test_a_model_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module, got NoneType"):
        lowtide.trace(None, torch.randn(2, 4))  # type: ignore[arg-type]


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match=r"no parameter that requires a gradient"):
        lowtide.trace(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4), optimizer=torch.optim.SGD)


def test_a_trace_prints_in_one_line() -> None:
    trace = lowtide.trace(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())
    assert repr(trace).startswith("StepTrace('Linear', predicted for h200, peak 0.0")
    assert "\n" not in repr(trace)
    assert repr(trace.at_peak).startswith("{'weights': ")
