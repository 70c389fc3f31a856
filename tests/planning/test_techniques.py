from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.models import resolve_model
from lowtide.planning.activation_techniques import ActivationPolicy
from lowtide.planning.problem import Problem
from lowtide.planning.techniques import (
    TECHNIQUES,
    Accumulate,
    AttentionBackend,
    Bfloat16,
    Technique,
    UpdateImplementation,
    UpdateInBackward,
)
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder

FUSED = UpdateImplementation("fused step", Implementation.FUSED)
RECOMPUTE = ActivationPolicy("recompute", "recompute")
LOOP = UpdateImplementation("for-loop step", Implementation.LOOP)


def problem(**settings: object) -> Problem:
    source = resolve_model("gpt-tiny")
    return Problem(
        model=source.build(None),
        batch=source.make_batch("4x16"),
        optimizer=torch.optim.AdamW,
        settings=StepSettings(**settings),  # type: ignore[arg-type]
    )


def trace_with(*ops: str, dtype: str = "float32", note: str = "", recomputed: bool = False) -> StepTrace:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS, dtype=dtype)
    builder.enter(Phase.FORWARD)
    for op in ops:
        builder.op(op, module="layers.0")
    if recomputed:
        builder.enter(Phase.BACKWARD)
        builder.op("aten.mm")
        builder.allocate(MiB, Category.ACTIVATIONS)
    return builder.build(notes=(note,) if note else ())


CUDNN, MATH = "aten._scaled_dot_product_cudnn_attention", "aten._safe_softmax"
FALLBACK = "attention runs on the math backend (flash: it takes no mask)"
IN_BACKWARD = {"update": UpdateSchedule.IN_BACKWARD}


@pytest.mark.parametrize(
    ("technique", "settings", "trace", "refusal"),
    [
        (Bfloat16(), {}, trace_with(), None),
        (Bfloat16(), {}, trace_with(dtype="bfloat16"), "no weight is in float32"),
        (RECOMPUTE, {}, trace_with(), None),
        (RECOMPUTE, {"activations": "recompute"}, trace_with(), "it is on already"),
        (RECOMPUTE, {}, trace_with(recomputed=True), "it is on already"),
        (AttentionBackend(to_math=True), {}, trace_with(CUDNN), None),
        (AttentionBackend(to_math=False), {}, trace_with(CUDNN), "it is on already"),
        (
            AttentionBackend(to_math=True),
            {},
            trace_with("aten.mm"),
            "the model does not call scaled_dot_product_attention",
        ),
        (AttentionBackend(to_math=True), {"attention": "math"}, trace_with(MATH), "it is on already"),
        (AttentionBackend(to_math=False), {"attention": "math"}, trace_with(MATH), None),
        (
            AttentionBackend(to_math=False),
            {},
            trace_with(MATH, note=FALLBACK),
            "no fused backend takes these calls (flash: it takes no mask)",
        ),
        (FUSED, {}, trace_with("aten._foreach_mul_"), None),
        (FUSED, {}, trace_with("aten._fused_adamw_"), "it is on already"),
        # The norm's kernel is not an update's.
        (FUSED, {}, trace_with("aten._fused_rms_norm"), None),
        (LOOP, {}, trace_with("aten._foreach_mul_"), None),
        (LOOP, {}, trace_with("aten._fused_adamw_"), "the update does not use foreach"),
        (UpdateInBackward(), {}, trace_with(), None),
        (UpdateInBackward(), IN_BACKWARD, trace_with(), "it is on already"),
        (
            UpdateInBackward(),
            {"accumulate": 2},
            trace_with(),
            "accumulation needs the gradients until the last backward",
        ),
        (
            UpdateInBackward(),
            {"max_grad_norm": 1.0},
            trace_with(),
            "clipping needs all gradients before the first update",
        ),
        (Accumulate(), {}, trace_with(), None),
        (
            Accumulate(),
            IN_BACKWARD,
            trace_with(),
            "the update in the backward needs each gradient complete after one backward",
        ),
    ],
)
def test_when_a_technique_applies(
    technique: Technique, settings: dict[str, object], trace: StepTrace, refusal: str | None
) -> None:
    assert technique.why_not(problem(**settings), trace) == refusal


@pytest.mark.parametrize(
    ("technique", "changed"),
    [
        (Bfloat16(), {"precision": "bfloat16"}),
        (RECOMPUTE, {"activations": "recompute"}),
        (AttentionBackend(to_math=True), {"attention": "math"}),
        (FUSED, {"implementation": Implementation.FUSED}),
        (LOOP, {"implementation": Implementation.LOOP}),
        (UpdateInBackward(), IN_BACKWARD),
    ],
)
def test_a_technique_changes_one_setting_on_top_of_the_others(technique: Technique, changed: dict[str, object]) -> None:
    before = problem(autocast="bfloat16")
    after = technique.apply(before)
    assert after.settings == StepSettings(autocast="bfloat16", **changed)  # type: ignore[arg-type]
    assert after.batch is before.batch
    assert before.settings == StepSettings(autocast="bfloat16")


def test_fused_attention_leaves_the_choice_to_torch() -> None:
    assert AttentionBackend(to_math=False).apply(problem(attention="math")).settings.attention is None


def test_accumulation_keeps_the_samples_of_an_update() -> None:
    before = problem(accumulate=3)
    after = Accumulate().apply(before)
    assert after.settings.accumulate == 6
    assert after.batch["input_ids"].shape == (2, 16)
    assert before.batch["input_ids"].shape == (4, 16)


def test_accumulation_needs_a_batch_that_can_be_halved() -> None:
    odd = replace(problem(), batch={"x": torch.zeros(3, 2)})
    assert Accumulate().why_not(odd, trace_with()) == "the batch size 3 cannot be halved"
    ragged = replace(problem(), batch={"x": torch.zeros(4), "y": torch.zeros(6)})
    assert Accumulate().why_not(ragged, trace_with()) == "the tensors of the batch share no first dimension to halve"


@pytest.mark.parametrize("technique", [FUSED, LOOP, UpdateInBackward()])
def test_techniques_of_the_update_need_an_optimizer(technique: Technique) -> None:
    assert technique.why_not(replace(problem(), optimizer=None), trace_with()) == "the step has no optimizer"


def test_an_optimizer_without_a_fused_step() -> None:
    by_class = replace(problem(), optimizer=torch.optim.RMSprop)
    assert FUSED.why_not(by_class, trace_with()) == "RMSprop has no fused implementation"
    model = nn.Linear(2, 2)
    by_instance = replace(problem(), model=model, optimizer=torch.optim.RMSprop(model.parameters()))
    assert FUSED.why_not(by_instance, trace_with()) == "RMSprop has no fused implementation"
    by_function = replace(problem(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    assert FUSED.why_not(by_function, trace_with()) is None


def test_recompute_needs_repeated_blocks() -> None:
    plain = replace(problem(), model=nn.Linear(2, 2))
    assert RECOMPUTE.why_not(plain, trace_with()) == "Linear has no repeated blocks"


def test_names_are_unique() -> None:
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)
