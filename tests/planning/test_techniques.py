"""What-if's techniques, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowtide.models import resolve_model
from lowtide.planning.techniques import (
    ACCUMULATE,
    BFLOAT16,
    CHUNKED_LOSS,
    FUSED_STEP,
    LOOP_STEP,
    TECHNIQUES,
    UPDATE_IN_BACKWARD,
    Problem,
    Technique,
    activation_policy,
    attention_backend,
    batch_size,
    half_of,
)
from lowtide.planning.what_if import WhatIf, what_if
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder

MODEL_RECOMPUTES = activation_policy("recompute", "recompute")


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
        (BFLOAT16, {}, trace_with(), None),
        (BFLOAT16, {}, trace_with(dtype="bfloat16"), "no weight is in float32"),
        (MODEL_RECOMPUTES, {}, trace_with(), None),
        (MODEL_RECOMPUTES, {"activations": "recompute"}, trace_with(), "it is on already"),
        (MODEL_RECOMPUTES, {}, trace_with(recomputed=True), "it is on already"),
        (attention_backend(to_math=True), {}, trace_with(CUDNN), None),
        (attention_backend(to_math=False), {}, trace_with(CUDNN), "it is on already"),
        (
            attention_backend(to_math=True),
            {},
            trace_with("aten.mm"),
            "the model does not call scaled_dot_product_attention",
        ),
        (attention_backend(to_math=True), {"attention": "math"}, trace_with(MATH), "it is on already"),
        (attention_backend(to_math=False), {"attention": "math"}, trace_with(MATH), None),
        (
            attention_backend(to_math=False),
            {},
            trace_with(MATH, note=FALLBACK),
            "no fused backend takes these calls (flash: it takes no mask)",
        ),
        (FUSED_STEP, {}, trace_with("aten._foreach_mul_"), None),
        (FUSED_STEP, {}, trace_with("aten._fused_adamw_"), "it is on already"),
        # The norm's kernel is not an update's.
        (FUSED_STEP, {}, trace_with("aten._fused_rms_norm"), None),
        (LOOP_STEP, {}, trace_with("aten._foreach_mul_"), None),
        (LOOP_STEP, {}, trace_with("aten._fused_adamw_"), "the update does not use foreach"),
        (UPDATE_IN_BACKWARD, {}, trace_with(), None),
        (UPDATE_IN_BACKWARD, IN_BACKWARD, trace_with(), "it is on already"),
        (
            UPDATE_IN_BACKWARD,
            {"accumulate": 2},
            trace_with(),
            "accumulation needs the gradients until the last backward",
        ),
        (
            UPDATE_IN_BACKWARD,
            {"max_grad_norm": 1.0},
            trace_with(),
            "clipping needs all gradients before the first update",
        ),
        (ACCUMULATE, {}, trace_with(), None),
        (
            ACCUMULATE,
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
        (BFLOAT16, {"precision": "bfloat16"}),
        (MODEL_RECOMPUTES, {"activations": "recompute"}),
        (attention_backend(to_math=True), {"attention": "math"}),
        (FUSED_STEP, {"implementation": Implementation.FUSED}),
        (LOOP_STEP, {"implementation": Implementation.LOOP}),
        (UPDATE_IN_BACKWARD, IN_BACKWARD),
    ],
)
def test_a_technique_changes_one_setting_on_top_of_the_others(technique: Technique, changed: dict[str, object]) -> None:
    before = problem(autocast="bfloat16")
    after = technique.apply(before)
    assert after.settings == StepSettings(autocast="bfloat16", **changed)  # type: ignore[arg-type]
    assert after.batch is before.batch
    assert before.settings == StepSettings(autocast="bfloat16")


def test_fused_attention_leaves_the_choice_to_torch() -> None:
    assert attention_backend(to_math=False).apply(problem(attention="math")).settings.attention is None


def test_accumulation_keeps_the_samples_of_an_update() -> None:
    before = problem(accumulate=3)
    after = ACCUMULATE.apply(before)
    assert after.settings.accumulate == 6
    assert after.batch["input_ids"].shape == (2, 16)
    assert before.batch["input_ids"].shape == (4, 16)


def test_accumulation_needs_a_batch_that_can_be_halved() -> None:
    odd = replace(problem(), batch={"x": torch.zeros(3, 2)})
    assert ACCUMULATE.why_not(odd, trace_with()) == "the batch size 3 cannot be halved"
    ragged = replace(problem(), batch={"x": torch.zeros(4), "y": torch.zeros(6)})
    assert ACCUMULATE.why_not(ragged, trace_with()) == "the tensors of the batch share no first dimension to halve"


@pytest.mark.parametrize("technique", [FUSED_STEP, LOOP_STEP, UPDATE_IN_BACKWARD])
def test_techniques_of_the_update_need_an_optimizer(technique: Technique) -> None:
    assert technique.why_not(replace(problem(), optimizer=None), trace_with()) == "the step has no optimizer"


def test_an_optimizer_without_a_fused_step() -> None:
    by_class = replace(problem(), optimizer=torch.optim.RMSprop)
    assert FUSED_STEP.why_not(by_class, trace_with()) == "RMSprop has no fused implementation"
    model = nn.Linear(2, 2)
    by_instance = replace(problem(), model=model, optimizer=torch.optim.RMSprop(model.parameters()))
    assert FUSED_STEP.why_not(by_instance, trace_with()) == "RMSprop has no fused implementation"
    by_function = replace(problem(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    assert FUSED_STEP.why_not(by_function, trace_with()) is None


def test_recompute_needs_repeated_blocks() -> None:
    plain = replace(problem(), model=nn.Linear(2, 2))
    assert MODEL_RECOMPUTES.why_not(plain, trace_with()) == "Linear has no repeated blocks"


def test_names_are_unique() -> None:
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)


COMPILED, SELECTIVE, RECOMPUTE, SEGMENTS, OFFLOAD, OFFLOAD_ALL, CHUNKED = ACTIVATION_TECHNIQUES = TECHNIQUES[1:8]
POLICIES = {
    "compile-budget/0.5": COMPILED,
    "selective": SELECTIVE,
    "recompute": RECOMPUTE,
    "recompute/": SEGMENTS,
    "offload": OFFLOAD,
    "offload/all": OFFLOAD_ALL,
}


def activation_problem(**settings: object) -> Problem:
    source = resolve_model("gpt-tiny")
    return Problem(
        model=source.build(None),
        batch=source.make_batch("4x16"),
        settings=StepSettings(**settings),  # type: ignore[arg-type]
    )


def stack(num_blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(num_blocks)))


def activation_trace_with(*, recomputed: bool = False, logits: bool = False) -> StepTrace:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    if logits:
        builder.op("aten._log_softmax")
        builder.allocate(MiB, Category.ACTIVATIONS, shape=(64, 4096))
    if recomputed:
        builder.enter(Phase.BACKWARD)
        builder.op("aten.mm")
        builder.allocate(MiB, Category.ACTIVATIONS)
    return builder.build()


# Which policies are tried where one is on: those that hold less.
TRIED = {
    None: {"compile-budget/0.5", "selective", "recompute", "recompute/", "offload", "offload/all"},
    "keep": {"compile-budget/0.5", "selective", "recompute", "recompute/", "offload", "offload/all"},
    "selective": {"compile-budget/0.5", "recompute", "recompute/", "offload"},
    "recompute": {"recompute/", "offload"},
    "recompute/2": set(),
    "offload": set(),
    "offload/all": set(),
    "compile-budget/0.5": set(),
}


@pytest.mark.parametrize("word", TRIED)
def test_which_policies_are_tried_on_top_of_another(word: str | None) -> None:
    given = activation_problem(activations=word)
    trace = activation_trace_with()
    tried = {name for name, technique in POLICIES.items() if technique.why_not(given, trace) is None}
    assert tried == TRIED[word]


@pytest.mark.parametrize(
    ("word", "technique", "refusal"),
    [
        ("recompute", RECOMPUTE, "it is on already"),
        ("recompute/2", SEGMENTS, "it is on already"),
        ("offload/all", OFFLOAD_ALL, "it is on already"),
        ("offload", RECOMPUTE, "offload is on in its place"),
        ("compile-budget/0.5", COMPILED, "it is on already"),
        ("compile-budget/0.3", RECOMPUTE, "compile-budget/0.3 is on in its place"),
    ],
)
def test_why_one_is_not(word: str, technique: Technique, refusal: str) -> None:
    assert technique.why_not(activation_problem(activations=word), activation_trace_with()) == refusal


def test_a_model_that_recomputes_by_itself() -> None:
    trace = activation_trace_with(recomputed=True)
    assert RECOMPUTE.why_not(activation_problem(), trace) == "it is on already"
    assert "recomputes its layers itself" in str(OFFLOAD.why_not(activation_problem(), trace))


def test_too_few_blocks() -> None:
    none = replace(activation_problem(), model=nn.Linear(2, 2))
    assert RECOMPUTE.why_not(none, activation_trace_with()) == "Linear has no repeated blocks"
    two = replace(activation_problem(), model=stack(2))
    assert RECOMPUTE.why_not(two, activation_trace_with()) is None
    assert SEGMENTS.why_not(two, activation_trace_with()) == "2 blocks are too few for segments"


@pytest.mark.parametrize(("num_blocks", "word"), [(4, "recompute/2"), (12, "recompute/3"), (32, "recompute/6")])
def test_segments_are_about_the_square_root_of_the_blocks(num_blocks: int, word: str) -> None:
    given = replace(activation_problem(), model=stack(num_blocks))
    assert SEGMENTS.apply(given).settings.activations == word


def test_when_a_chunked_loss_applies() -> None:
    class Headed(nn.Linear):
        def get_output_embeddings(self) -> nn.Module:
            return self

    given = replace(activation_problem(), model=Headed(2, 2))
    assert CHUNKED.why_not(given, activation_trace_with(logits=True)) is None
    assert CHUNKED.apply(given).settings == StepSettings(chunked_loss=True)
    assert CHUNKED.why_not(given, activation_trace_with()) == "the step has no cross entropy over logits"
    assert "no Hugging Face model" in str(CHUNKED.why_not(activation_problem(), activation_trace_with(logits=True)))
    outside = replace(given, loss=lambda model, batch: model(batch))
    assert "linear_cross_entropy" in str(CHUNKED.why_not(outside, activation_trace_with(logits=True)))
    on = replace(given, settings=StepSettings(chunked_loss=True))
    assert CHUNKED.why_not(on, activation_trace_with(logits=True)) == "it is on already"


def test_the_logits_are_the_subject_of_a_chunked_loss() -> None:
    trace = activation_trace_with(logits=True)
    assert CHUNKED_LOSS.subject(trace).bytes_at(trace, trace.peak_event) == MiB


@pytest.fixture(scope="module")
def rows() -> WhatIf:
    """What would lower the peak of a Llama with a large vocabulary and many tokens, on its own activation techniques."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(8, 2048, dtype=torch.int64)
    ids = torch.zeros_like(ids, device="cpu")
    given = Problem(model=model, batch={"input_ids": ids, "labels": ids}, optimizer=torch.optim.AdamW)
    return what_if(given, given.trace(), techniques=ACTIVATION_TECHNIQUES)


def test_each_of_them_has_a_row_with_its_reason(rows: WhatIf) -> None:
    assert rows.skipped == ()
    after = {row.technique: row.after_bytes for row in rows.rows}
    names = [technique.name for technique in ACTIVATION_TECHNIQUES]
    assert [name for name in after if " + " not in name] == names
    assert all(row.saved_bytes > 0 for row in rows.rows)
    by_policy = [after[technique.name] for technique in (SELECTIVE, RECOMPUTE, SEGMENTS)]
    assert by_policy == sorted(by_policy, reverse=True)
    assert after[OFFLOAD.name] < after[RECOMPUTE.name]


def test_the_reason_of_a_chunked_loss_names_the_logits(rows: WhatIf) -> None:
    [row] = [row for row in rows.rows if row.technique == "chunked loss"]
    logits_bytes = 8 * 2048 * 32000 * 4
    assert row.saved_bytes > logits_bytes
    assert row.reason.startswith("the tensors as wide as the logits alive at the peak fall from")


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(6, 3), 6),
        ({"a": torch.zeros(4, 2), "b": torch.zeros(4)}, 4),
        ({"a": torch.zeros(4, 2), "positions": torch.zeros(1, 2)}, 4),
        ([torch.zeros(2), {"x": torch.zeros(2, 2)}], 2),
        ({"a": torch.zeros(1, 2), "b": torch.zeros(1)}, 1),
        ({"a": torch.zeros(4), "b": torch.zeros(6)}, None),
        ({"scale": torch.tensor(1.0), "name": "x"}, None),
    ],
)
def test_batch_size_is_what_the_tensors_share(batch: object, size: int | None) -> None:
    assert batch_size(batch) == size


def test_half_of_a_nested_batch() -> None:
    batch = {
        "ids": torch.arange(8).view(4, 2),
        "positions": torch.arange(2).view(1, 2),
        "scale": torch.tensor(2.0),
        "rest": [Pair(torch.arange(4), torch.ones(4)), "name", (torch.arange(4),)],
    }
    half = half_of(batch)
    assert half["ids"].tolist() == [[0, 1], [2, 3]]
    assert half["positions"].shape == (1, 2)
    assert half["scale"] == 2.0
    assert isinstance(half["rest"][0], Pair)
    assert half["rest"][0].inputs.tolist() == [0, 1]
    assert half["rest"][1:] == ["name", (half["rest"][2][0],)]


def test_a_half_does_not_bring_the_whole_along() -> None:
    half = half_of(torch.zeros(8, 16))
    assert half.untyped_storage().nbytes() == 4 * 16 * 4
