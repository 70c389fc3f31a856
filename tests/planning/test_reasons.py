from __future__ import annotations

import numpy as np

from lowtide.planning.techniques import Subject
from lowtide.planning.what_if import is_nothing, is_same, reason
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, transformer_trace

GRADIENTS = Subject(
    noun="gradients",
    matches=lambda item: item.category is Category.GRADIENTS,
    when_absent=lambda place: "before any gradient exists" if place.is_before_gradients else "where none is alive",
)


def step(*, activations: int, gradients: int, spike: int = 0) -> StepTrace:
    """10 MiB of weights; activations until the backward, gradients from then on, and a spike in the update."""
    builder = TraceBuilder()
    weight = builder.allocate(10 * MiB, Category.WEIGHTS, module="head")
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="head")
    builder.use(weight)
    builder.enter(Phase.LOSS)
    builder.op("aten.sum")
    kept = builder.allocate(activations * MiB, Category.ACTIVATIONS)
    builder.enter(Phase.BACKWARD)
    builder.op("aten.mm", module="head")
    builder.use(weight)
    builder.free(kept)
    gradient = builder.allocate(gradients * MiB, Category.GRADIENTS) if gradients else None
    builder.enter(Phase.UPDATE)
    builder.op("aten._foreach_sqrt", module="AdamW")
    if spike:
        builder.free(builder.allocate(spike * MiB, Category.TEMPORARIES))
    if gradient is not None:
        builder.free(gradient)
    return builder.build()


def test_a_subject_absent_at_the_peak_saves_nothing() -> None:
    before, after = step(activations=30, gradients=8), step(activations=30, gradients=0)
    assert is_nothing(before, after)
    assert reason(GRADIENTS, before, after) == (
        "the peak is at the loss, before any gradient exists; the gradients reach 8.0 MiB in the backward of head, "
        "where only 18.0 MiB are alive in all."
    )


def test_a_subject_that_hardly_exists_is_told() -> None:
    before = step(activations=30, gradients=0, spike=1)
    after = step(activations=30, gradients=0, spike=2)
    assert reason(GRADIENTS, before, after).endswith("and no more than 0 B of gradients exist at any time.")


def test_a_saving_names_what_fell_and_where_the_peak_goes() -> None:
    before, after = step(activations=10, gradients=20), step(activations=10, gradients=0)
    assert reason(GRADIENTS, before, after) == (
        "the gradients alive at the peak fall from 20.0 MiB to 0 B (activations from 0 B to 10.0 MiB); the peak moves "
        "from the backward of head to the loss."
    )


def test_a_cost_says_what_rises() -> None:
    before, after = step(activations=10, gradients=20), step(activations=10, gradients=30)
    assert reason(GRADIENTS, before, after) == (
        "the gradients alive at the peak rise from 20.0 MiB to 30.0 MiB; the peak stays in the backward of head."
    )


def test_a_second_peak_as_high_hides_the_saving() -> None:
    before, after = step(activations=20, gradients=20), step(activations=20, gradients=10, spike=10)
    before_at_gradients = step(activations=19, gradients=20)
    assert is_nothing(before, after)
    assert reason(GRADIENTS, before_at_gradients, after) == (
        "it takes 20.0 MiB of gradients away from the peak, but the peak moves from the backward of head to the loss, "
        "as high as before (activations from 0 B to 20.0 MiB)."
    )


def test_a_technique_without_effect_says_so() -> None:
    trace = step(activations=3, gradients=2)
    assert is_same(trace, trace)
    assert reason(GRADIENTS, trace, trace) == "not one allocation of the step changes."


def test_what_stays_is_told_with_the_saving() -> None:
    subject = Subject(
        noun="tensors",
        matches=lambda item: True,
        what_stays=lambda item: item.category is Category.WEIGHTS,
        why_stays="stay as they are",
    )
    sentence = reason(subject, step(activations=30, gradients=0), step(activations=10, gradients=0))
    assert sentence == (
        "the tensors alive at the peak fall from 40.0 MiB to 20.0 MiB, of which 10.0 MiB stay as they are; the peak "
        "stays at the loss."
    )


def test_the_curve_of_a_subject_is_that_of_its_category() -> None:
    trace = transformer_trace(layers=3)
    assert np.array_equal(GRADIENTS.curve(trace), trace.stacked[Category.GRADIENTS])
    weights = Subject(noun="weights", matches=lambda item: item.category is Category.WEIGHTS)
    assert np.array_equal(weights.curve(trace), trace.stacked[Category.WEIGHTS])
    assert weights.bytes_at(trace, trace.peak_event) == trace.at_peak[Category.WEIGHTS]
