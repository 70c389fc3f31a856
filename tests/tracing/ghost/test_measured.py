"""The prediction against an H200, for cases of the accuracy suite that trace in a few seconds: nothing may get worse.

The tolerance is the suite's own aim, not the error of the day. `benchmarks/accuracy` runs all cases.
"""

from __future__ import annotations

import pytest

from benchmarks.accuracy.cases import OPTIMIZERS, Case, suite
from benchmarks.records import RESULTS, newest
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace

pytest.importorskip("transformers")
import torch

NAMES = (
    "llama-bf16-small-batch",
    "gpt2-fp32-recompute",
    "bert-bf16-loop",
    "mixtral-bf16",
    "resnet-bf16",
    "unet-fp32",
    "nn-transformer-bf16",
    "llama-bf16-adafactor",
)


def predict(case: Case) -> StepTrace:
    with torch.device("meta"):
        model = case.make_model()
    return trace(
        model,
        case.make_batch(),
        optimizer=OPTIMIZERS[case.optimizer],
        autocast="bfloat16" if case.precision == "autocast" else None,
        settings=StepSettings(accumulate=case.accumulate),
        hardware="h200",
        torch_version="2.11.0",
    )


@pytest.mark.parametrize("name", NAMES)
def test_within_tolerance_of_the_card(name: str) -> None:
    record = newest(RESULTS / "accuracy", "lowtide.accuracy/1")
    assert record.text("torch").startswith("2.11")
    measured = next(row for row in record.rows("cases", ["name"]) if row["name"] == name)
    case = next(case for case in suite() if case.name == name)
    result = predict(case)
    allocated, reserved = measured["measured_allocated_bytes"], measured["measured_reserved_bytes"]
    assert isinstance(allocated, int)
    assert isinstance(reserved, int)
    assert result.peak_bytes == pytest.approx(allocated, rel=0.01)
    assert result.peak_reserved_bytes == pytest.approx(reserved, rel=0.05)
    # Most of the peak has a name, and the whole of it a category.
    named = sum(a.bytes for a in result.alive_at(result.peak_event) if a.module and a.op)
    assert named >= 0.98 * result.peak_bytes
    assert sum(result.at_peak.values()) == result.peak_bytes
