"""The watch on a real step: the rules of a card are asked with calls made on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.tracing.attention.use import (
    AttentionChoices,
    AttentionWatch,
    attention_use,
    attention_watch,
    fallbacks,
    is_on_attention,
)
from lowtide.tracing.explanation.explain import explain
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, Phase
from lowtide.tracing.training_step import TrainingStep
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder


class Grouped(nn.Module):
    """Two layers of attention with four query heads to a key head, as Llama's."""

    def __init__(self, gqa: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(gqa) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class _Layer(nn.Module):
    def __init__(self, gqa: bool) -> None:
        super().__init__()
        self.gqa = gqa
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 16 if gqa else 64)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (8, 8)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=self.gqa)
        return mixed.transpose(1, 2).flatten(2)


BATCH = (torch.randn(2, 32, 64),)


def test_the_backend_and_its_calls() -> None:
    [use] = attention_use(lowtide.trace(Grouped(), BATCH, autocast="bfloat16"))
    assert (use.backend, use.num_calls, use.reason, use.text) == ("cudnn", 2, "", "cudnn (2 calls)")


def test_recomputed_calls_are_not_counted_twice() -> None:
    result = lowtide.trace(Grouped(gqa=False), BATCH, settings=lowtide.StepSettings(activations="recompute"))
    assert [use.text for use in attention_use(result)] == ["efficient (2 calls)"]


def test_a_silent_fall_back_to_math_is_told_with_its_way_out() -> None:
    result = lowtide.trace(Grouped(), BATCH)
    [use] = attention_use(result)
    assert (use.backend, use.num_calls) == ("math", 2)
    assert "efficient does not take it: it does not take grouped key and value heads" in use.reason
    [warning] = fallbacks(result)
    assert warning == (
        "the attention in 'layers.0' (query [2, 8, 32, 8] float32, 2 key heads) falls back to the math backend: in "
        "bfloat16 (autocast, or the model's own type) it runs on cudnn; with key and value repeated to 8 heads it runs "
        "on efficient"
    )
    sentences = explain(result).sentences
    assert any(
        "stores the scores of each query with each key" in text and text.endswith("on efficient.") for text in sentences
    )
    assert "Attention: math (2 calls)." in sentences


def test_math_that_was_asked_for_is_no_fall_back() -> None:
    result = lowtide.trace(Grouped(), BATCH, settings=lowtide.StepSettings(attention="math"))
    assert [use.text for use in attention_use(result)] == ["math (2 calls)"]
    assert fallbacks(result) == ()


def test_on_the_host_the_backend_is_counted() -> None:
    [use] = attention_use(lowtide.observe(Grouped(gqa=False), BATCH[0]))
    assert (use.backend, use.num_calls) == ("flash", 2)
    [use] = attention_use(
        lowtide.observe(Grouped(gqa=False), BATCH[0], settings=lowtide.StepSettings(attention="math"))
    )
    assert (use.backend, use.num_calls) == ("math", 2)


def test_attention_that_a_model_writes_out() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.op("aten._softmax", module="attention")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(1, 4, 64, 64))
    builder.op("aten._softmax", module="router")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(64, 8))
    assert [use.text for use in attention_use(builder.build())] == ["written out (1 call)"]


@pytest.mark.parametrize(
    ("note", "is_one"),
    [
        ("attention runs on the math backend (flash: it takes no mask)", True),
        ("the attention in 'x' (query [1] float32) falls back to the math backend: no", True),
        ("the batch was moved from cpu to cuda:0", False),
    ],
)
def test_notes_on_attention(note: str, is_one: bool) -> None:
    assert is_on_attention(note) is is_one


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
