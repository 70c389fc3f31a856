"""The watch on a real step: the rules of a card are asked with calls made on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.tracing.attention_choices import AttentionChoices
from lowtide.tracing.attention_use import attention_use, fallbacks
from lowtide.tracing.attention_watch import AttentionWatch, attention_watch
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.training_step import TrainingStep
from tests.tracing.test_attention_use import BATCH, Grouped


def watched() -> list[str]:
    model = Grouped()
    choices = AttentionChoices((9, 0), (2, 11))
    step = TrainingStep(model, BATCH[0], None, None, StepSettings(), around_first=AttentionWatch(model, choices))
    step("cpu", lambda phase: None)
    assert step.around_first is None
    seen = choices.notes()
    step("cpu", lambda phase: None)
    assert choices.notes() == seen
    return seen


def test_a_call_that_falls_back_is_told_with_its_module() -> None:
    math, warning = watched()
    assert math.startswith("attention runs on the math backend (cudnn does not take it")
    assert warning.startswith("the attention in 'layers.0' (query [2, 8, 32, 8] float32, 2 key heads) falls back")


def test_under_autocast_the_type_is_the_one_that_it_casts_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    assert watched() == ["attention runs on the cudnn backend"]


def test_reasons_belong_only_to_a_step_that_ran_on_math() -> None:
    model = Grouped()
    watch = AttentionWatch(model, AttentionChoices((9, 0), (2, 11)))
    with watch:
        model(BATCH[0])
    fused = lowtide.trace(Grouped(gqa=False), BATCH)
    assert watch.explained(fused) is fused
    on_math = replace(lowtide.trace(Grouped(), BATCH, settings=StepSettings(attention="math")), notes=())
    assert len(fallbacks(watch.explained(on_math))) == 1
    assert attention_use(watch.explained(on_math))[0].reason.startswith("cudnn does not take it")


def test_the_host_and_compiled_models_are_not_watched() -> None:
    assert attention_watch(Grouped(), torch.device("cpu")) is None
    model = Grouped()
    model.layers[0].compile()
    assert attention_watch(model, torch.device("cuda")) is None
