from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.models import resolve_model
from lowtide.tracing.explanation.explain import explain, foreach_copies, logits_copies, remarks
from lowtide.tracing.explanation.instant import Place
from lowtide.tracing.explanation.over_time import idle_tensors
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, tiny_trace, transformer_trace


@pytest.fixture(scope="module")
def gpt() -> StepTrace:
    source = resolve_model("gpt-tiny")
    return lowtide.trace(
        source.build(None),
        source.make_batch("64x128"),
        optimizer=torch.optim.AdamW,
        torch_version="2.13.0",
        name="gpt-tiny",
    )


def test_headline_names_place_and_main_categories() -> None:
    explanation = explain(tiny_trace())
    assert explanation.headline == (
        "The peak of 19.0 MiB is at the loss (tiny.py:20): 8.0 MiB of optimizer state, 4.0 MiB of weights and 4.0 MiB "
        "of temporaries are alive."
    )
    assert explanation.place is Place.LOSS


def test_headline_names_the_copies_of_the_logits() -> None:
    explanation = explain(transformer_trace(layers=2, width=256, tokens=1024))
    assert (
        ": three copies of the logits [1024, 50257] in bfloat16 and float32 are alive at once (" in explanation.headline
    )


def test_headline_names_the_copies_of_the_update() -> None:
    builder = TraceBuilder()
    builder.allocate(8 * MiB, Category.WEIGHTS)
    builder.enter(Phase.UPDATE)
    builder.op("aten._foreach_sqrt", module="AdamW")
    builder.allocate(8 * MiB, Category.TEMPORARIES)
    assert explain(builder.build()).headline == (
        "The peak of 16.0 MiB is in the update (AdamW): the foreach update holds 8.0 MiB of temporary copies beside "
        "weights, gradients and state."
    )


def test_numbers_agree_with_the_trace() -> None:
    trace = transformer_trace(layers=6)
    explanation = explain(trace)
    assert sum(explanation.at_peak.values()) == explanation.peak_bytes == trace.peak_bytes
    assert [group.bytes for group in explanation.alive] == sorted((g.bytes for g in explanation.alive), reverse=True)
    assert explanation.largest[0].bytes == max(item.bytes for item in trace.alive_at(trace.peak_event))
    assert any(group.module == "layers.*.mlp.up" and group.count == 6 for group in explanation.alive)


def test_text_is_the_sentences_as_paragraphs() -> None:
    explanation = explain(transformer_trace(layers=2))
    assert explanation.text.split("\n\n") == list(explanation.sentences)
    assert explanation.sentences[0] == explanation.headline
    assert explanation.rule.sentence in explanation.sentences
    assert all(sentence.endswith(".") for sentence in explanation.sentences)


def test_a_step_that_does_nothing_is_explained_too() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    builder.enter(Phase.FORWARD)
    explanation = explain(builder.build())
    assert explanation.headline == "The peak of 1.0 MiB is before the step begins: 1.0 MiB of weights are alive."
    assert explanation.idle == ()


def test_a_real_step_peaks_in_the_backward_of_its_loss(gpt: StepTrace) -> None:
    explanation = explain(gpt)
    assert explanation.place is Place.LOSS_BACKWARD
    assert explanation.headline.startswith("The peak of 362.8 MiB is in the backward of the loss (GPT, layers.py:")
    assert explanation.at_peak[Category.GRADIENTS] == 0


def test_activations_of_a_real_step_wait_for_the_backward(gpt: StepTrace) -> None:
    explanation = explain(gpt)
    activations = [group for group in explanation.idle if group.category is Category.ACTIVATIONS]
    assert activations
    assert all(group.next_phase is Phase.BACKWARD for group in activations)
    # The layers' forward comes first and their backward last, so that on average they wait for about half the step.
    assert 0.3 < activations[0].idle_share < 0.7
    # "Most tensors are used only twice": by bytes, nine in ten of what is alive at the peak.
    assert explanation.passes.twice_bytes > 0.9 * explanation.passes.total_bytes
    assert explanation.passes.forward_and_backward >= 10 * 4


def test_state_of_a_real_step_is_idle_outside_the_update(gpt: StepTrace) -> None:
    update_s = sum(op.seconds for op in gpt.ops if op.phase is Phase.UPDATE)
    total_s = sum(op.seconds for op in gpt.ops)
    states = [group for group in idle_tensors(gpt, 100) if group.category is Category.OPTIMIZER]
    assert states
    assert all(group.idle_s >= total_s - update_s for group in states)


def test_copies_of_the_logits_are_counted_at_the_peak() -> None:
    trace = transformer_trace(layers=2, width=256, tokens=1024, vocab=50257)
    copies = logits_copies(trace, trace.peak_event)
    # The bf16 logits, the fp32 log-softmax, and the gradient that its backward makes.
    assert copies is not None
    assert (copies.count, copies.number, copies.shape) == (3, "three", (1024, 50257))
    assert abs(copies.bytes - 1024 * 50257 * (2 + 4 + 4)) < 3 * 512
    assert copies.dtypes == ("bfloat16", "float32")
    assert remarks(trace)[0].startswith("Three tensors have the size of the logits [1024, 50257] at the peak")


def test_slightly_shorter_copies_count_and_other_tensors_do_not() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS, shape=(128, 1000))
    builder.enter(Phase.LOSS)
    builder.op("aten.mm")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(4, 32, 1000))
    builder.op("aten.clone")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(4, 31, 1000))
    builder.op("aten._log_softmax")
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(124, 1000))
    builder.allocate(MiB, Category.ACTIVATIONS, shape=(1, 1000))
    trace = builder.build()
    copies = logits_copies(trace, trace.peak_event)
    assert copies is not None
    assert copies.count == 3


def test_a_step_without_a_log_softmax_has_no_logits() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.LOSS)
    builder.op("aten.mse_loss")
    builder.allocate(MiB, Category.ACTIVATIONS)
    assert logits_copies(builder.build(), 0) is None


def test_foreach_temporaries_are_named_with_their_bytes() -> None:
    builder = TraceBuilder()
    builder.allocate(8 * MiB, Category.WEIGHTS)
    builder.enter(Phase.UPDATE)
    builder.op("aten._foreach_sqrt", module="AdamW")
    for _ in range(2):
        builder.allocate(4 * MiB, Category.TEMPORARIES)
    trace = builder.build()
    copies = foreach_copies(trace, trace.peak_event)
    assert copies is not None
    assert (copies.count, copies.bytes) == (2, 8 * MiB)
    [sentence] = remarks(trace)
    assert sentence.startswith("The foreach update holds two temporary tensors at the peak (8.0 MiB, 50% of the peak)")


def test_the_math_backend_is_named_with_what_it_stores() -> None:
    builder = TraceBuilder()
    builder.allocate(12 * MiB, Category.WEIGHTS)
    builder.enter(Phase.FORWARD)
    builder.op("aten._safe_softmax", module="attention")
    builder.allocate(4 * MiB, Category.ACTIVATIONS, shape=(1, 4, 512, 512))
    trace = builder.build(notes=("attention runs on the math backend (flash: it takes no mask)",))
    [sentence] = remarks(trace)
    assert sentence == (
        "Attention runs on the math backend (flash: it takes no mask), which stores the scores of each query with each "
        "key: 4.0 MiB, 25% of the peak."
    )


def test_reserved_memory_that_is_never_used_is_told() -> None:
    trace = tiny_trace()
    assert remarks(trace) == ()
    fragmented = replace(trace, start_reserved_bytes=38 * MiB)
    [sentence] = remarks(fragmented)
    assert sentence.startswith("The allocator reserves 38.0 MiB, 19.0 MiB more than is ever in use: blocks cached")
