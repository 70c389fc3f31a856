from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.models import resolve_model
from lowtide.planning.activation_techniques import ACTIVATION_TECHNIQUES, ActivationPolicy, ChunkedLoss
from lowtide.planning.problem import Problem
from lowtide.planning.what_if import WhatIf, what_if
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder

COMPILED, SELECTIVE, RECOMPUTE, SEGMENTS, OFFLOAD, OFFLOAD_ALL, CHUNKED = ACTIVATION_TECHNIQUES
POLICIES = (COMPILED, SELECTIVE, RECOMPUTE, SEGMENTS, OFFLOAD, OFFLOAD_ALL)


def problem(**settings: object) -> Problem:
    source = resolve_model("gpt-tiny")
    return Problem(
        model=source.build(None),
        batch=source.make_batch("4x16"),
        settings=StepSettings(**settings),  # type: ignore[arg-type]
    )


def stack(num_blocks: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(num_blocks)))


def trace_with(*, recomputed: bool = False, logits: bool = False) -> StepTrace:
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
    given = problem(activations=word)
    tried = {technique.word for technique in POLICIES if technique.why_not(given, trace_with()) is None}
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
def test_why_one_is_not(word: str, technique: ActivationPolicy, refusal: str) -> None:
    assert technique.why_not(problem(activations=word), trace_with()) == refusal


def test_a_model_that_recomputes_by_itself() -> None:
    trace = trace_with(recomputed=True)
    assert RECOMPUTE.why_not(problem(), trace) == "it is on already"
    assert "recomputes its layers itself" in str(OFFLOAD.why_not(problem(), trace))


def test_too_few_blocks() -> None:
    none = replace(problem(), model=nn.Linear(2, 2))
    assert RECOMPUTE.why_not(none, trace_with()) == "Linear has no repeated blocks"
    two = replace(problem(), model=stack(2))
    assert RECOMPUTE.why_not(two, trace_with()) is None
    assert SEGMENTS.why_not(two, trace_with()) == "2 blocks are too few for segments"


@pytest.mark.parametrize(("num_blocks", "word"), [(4, "recompute/2"), (12, "recompute/3"), (32, "recompute/6")])
def test_segments_are_about_the_square_root_of_the_blocks(num_blocks: int, word: str) -> None:
    given = replace(problem(), model=stack(num_blocks))
    assert SEGMENTS.apply(given).settings.activations == word


def test_when_a_chunked_loss_applies() -> None:
    class Headed(nn.Linear):
        def get_output_embeddings(self) -> nn.Module:
            return self

    given = replace(problem(), model=Headed(2, 2))
    assert CHUNKED.why_not(given, trace_with(logits=True)) is None
    assert CHUNKED.apply(given).settings == StepSettings(chunked_loss=True)
    assert CHUNKED.why_not(given, trace_with()) == "the step has no cross entropy over logits"
    assert "no Hugging Face model" in str(CHUNKED.why_not(problem(), trace_with(logits=True)))
    outside = replace(given, loss=lambda model, batch: model(batch))
    assert "linear_cross_entropy" in str(CHUNKED.why_not(outside, trace_with(logits=True)))
    on = replace(given, settings=StepSettings(chunked_loss=True))
    assert CHUNKED.why_not(on, trace_with(logits=True)) == "it is on already"


def test_the_logits_are_the_subject_of_a_chunked_loss() -> None:
    trace = trace_with(logits=True)
    assert ChunkedLoss().subject(trace).bytes_at(trace, trace.peak_event) == MiB


@pytest.fixture(scope="module")
def rows() -> WhatIf:
    """Of a Llama with a large vocabulary and many tokens, on its own activation techniques."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=9,
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
