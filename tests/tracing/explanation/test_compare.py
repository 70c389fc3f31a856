from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.tracing.explanation.compare import Difference, compare_traces
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import KiB, MiB
from tests.tracing.samples import TARGET, TraceBuilder, tiny_trace


def small_trace(*, hidden: int, logits: int, origin: str) -> StepTrace:
    """1 MiB of weights, then an activation in `layers.0.mlp.up` and a temporary in the head."""
    builder = TraceBuilder(model="toy", origin=origin)
    builder.allocate(MiB, Category.WEIGHTS, module="layers.0.mlp.up")
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="layers.0.mlp.up", source="toy.py:1")
    kept = builder.allocate(hidden, Category.ACTIVATIONS)
    builder.enter(Phase.LOSS)
    builder.op("aten.mm", module="head", source="toy.py:2")
    builder.free(builder.allocate(logits, Category.TEMPORARIES))
    builder.enter(Phase.BACKWARD)
    builder.op("aten.mm", module="layers.0.mlp.up", source="toy.py:1")
    gradient = builder.allocate(MiB, Category.GRADIENTS)
    builder.free(kept)
    builder.free(gradient)
    return builder.build(num_parameters=2**18)


def test_a_trace_does_not_differ_from_itself() -> None:
    result = compare_traces(tiny_trace(), tiny_trace(origin="observed"))
    assert {row.bytes for row in result.differences} == {0}
    assert {row.error for row in result.differences} <= {0.0}
    assert (result.by_module, result.cautions) == ((), ())
    assert result.predicted_place == result.observed_place
    assert result.observed_place.phase is Phase.LOSS


def test_each_error_by_arithmetic() -> None:
    # Predicted: peak in the loss, 1 + 2 + 4 MiB. Observed: peak in the backward, 1 + 5 + 1 MiB (the loss has 6.5).
    result = compare_traces(
        small_trace(hidden=2 * MiB, logits=4 * MiB, origin="predicted"),
        small_trace(hidden=5 * MiB, logits=512 * KiB, origin="observed"),
    )
    assert (result.peak.predicted_bytes, result.peak.observed_bytes, result.peak.error) == (7 * MiB, 7 * MiB, 0.0)
    assert result.reserved.bytes == 0
    assert {row.what: (row.predicted_bytes // KiB, row.observed_bytes // KiB) for row in result.by_phase} == {
        "forward": (3072, 6144),
        "loss": (7168, 6656),
        "backward": (4096, 7168),
    }
    assert {row.what: row.bytes // MiB for row in result.by_category} == {
        "weights": 0,
        "gradients": -1,
        "activations": -3,
        "temporaries": 4,
    }
    assert sum(row.bytes for row in result.by_category) == result.peak.bytes
    # Two levels of the path, the larger difference first; both categories of layers.0 together.
    assert [(row.what, row.bytes // MiB) for row in result.by_module] == [("head", 4), ("layers.0", -4)]
    assert str(result.predicted_place) == "loss, head aten.mm"
    assert str(result.observed_place) == "backward, layers.0.mlp.up aten.mm"


def test_the_summary_in_lines() -> None:
    lines = compare_traces(
        small_trace(hidden=2 * MiB, logits=4 * MiB, origin="predicted"),
        small_trace(hidden=5 * MiB, logits=512 * KiB, origin="observed"),
    ).summary()
    assert lines[0] == "toy, predicted against observed"
    assert "peak allocated: 7.0 MiB against 7.0 MiB (+0.00%)" in lines
    assert "highest in forward: 3.0 MiB against 6.0 MiB (-50.00%)" in lines
    assert "temporaries at the peak: 4.0 MiB against 0 B (none observed)" in lines
    assert "the peaks are in different phases" in lines
    assert "head: +4.0 MiB at the peak" in lines
    assert "layers.0: -4.0 MiB at the peak" in lines


def test_cautions_say_why_the_two_may_not_be_one_step() -> None:
    predicted = replace(tiny_trace(), settings={"accumulate": 1, "precision": "bfloat16"})
    observed = replace(
        tiny_trace(origin="observed"),
        num_parameters=5,
        target=replace(TARGET, card="cpu", torch_version="2.11.0"),
        settings={"accumulate": 4, "precision": None, "batch": "8"},
    )
    cautions = compare_traces(predicted, observed).cautions
    assert len(cautions) == 4  # precision is converted by one and found by the other
    assert "1.05M parameters were predicted, 5 observed" in cautions[0]
    assert "for h200, the observation is from cpu" in cautions[1]
    assert "torch 2.13.0, the observation is from torch 2.11.0" in cautions[2]
    assert cautions[3] == "accumulate was 1 in the prediction, 4 in the observation"


def test_a_step_that_never_exceeds_its_start() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    trace = builder.build()
    result = compare_traces(trace, trace)
    assert str(result.observed_place) == "before the step begins"
    assert "both peak in the state before the step" in result.summary()


@pytest.mark.parametrize(("predicted", "observed", "error"), [(5, 0, None), (5, 4, 0.25), (3, 4, -0.25)])
def test_an_error_is_relative_to_the_observation(predicted: int, observed: int, error: float | None) -> None:
    assert Difference("x", predicted, observed).error == error
