from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.models import resolve_model
from lowtide.tracing.explain import explain
from lowtide.tracing.place import Place
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
    assert explanation.headline.startswith("The peak of 362.8 MiB is in the backward of the loss (GPT, losses.py:")
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
    states = [group for group in lowtide.tracing.idle.idle_tensors(gpt, 100) if group.category is Category.OPTIMIZER]
    assert states
    assert all(group.idle_s >= total_s - update_s for group in states)
