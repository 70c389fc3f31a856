from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from lowtide.report.phase_runs import aligned_positions
from lowtide.report.timeline_data import timeline_data
from lowtide.units import MiB
from tests.tracing.samples import observed_like, tiny_trace, transformer_trace


def data_of(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """As the page receives it: through JSON."""
    record: dict[str, Any] = json.loads(json.dumps(timeline_data(*args, **kwargs)))
    return record


def test_columns_give_back_the_curve_by_category() -> None:
    trace = transformer_trace(layers=3)
    data = data_of(trace)
    assert np.cumsum(data["x"]).tolist() == list(range(len(trace.events) + 1))
    for name, column in zip(data["categories"], data["stack"], strict=True):
        [category] = [category for category in trace.stacked if category.value == name]
        assert np.cumsum(column).tolist() == trace.stacked[category].tolist()
    reserved = [trace.start_reserved_bytes, *(event.reserved_bytes for event in trace.events)]
    assert np.cumsum(data["reserved"]).tolist() == reserved


def test_the_peak_is_named_and_among_the_points() -> None:
    trace = transformer_trace(layers=60)
    data = data_of(trace, max_points=200)
    assert data["peak"] == {
        "position": trace.peak_event + 1,
        "bytes": trace.peak_bytes,
        "phase": "loss",
        "place": "(outside the model) aten._log_softmax",
        "source": "loss.py:13",
    }
    positions = np.cumsum(data["x"])
    assert len(positions) <= 200
    index = positions.tolist().index(trace.peak_event + 1)
    assert sum(int(np.cumsum(column)[index]) for column in data["stack"]) == trace.peak_bytes


def test_each_point_knows_its_op_and_its_tensor() -> None:
    trace = tiny_trace()
    data = data_of(trace)
    assert data["change"] == [change * MiB for change in (0, 3, 4, -4, 3, -3, -3)]
    assert [data["categories"][index] for index in data["category"][1:4]] == [
        "activations",
        "temporaries",
        "temporaries",
    ]
    assert data["moments"][data["moment"][2]] == ["aten._log_softmax", "", "tiny.py:20"]
    assert data["tensors"][data["tensor"][5]] == ["head aten.mm", "[768, 1024] float32"]  # freed in the backward


def test_the_observed_line_keeps_its_values_and_lands_by_phase() -> None:
    trace = transformer_trace(layers=3)
    observed = observed_like(trace)
    line = data_of(trace, observed=observed)["observed"]
    assert np.cumsum(line["bytes"]).tolist() == observed.curve.tolist()
    assert np.allclose(line["x"], aligned_positions(observed, trace), atol=0.006)
    assert line["peak"]["bytes"] == observed.peak_bytes
    assert data_of(trace)["observed"] is None


def test_observed_points_are_bounded_and_keep_the_peak() -> None:
    trace = transformer_trace(layers=60)
    observed = observed_like(trace)
    line = data_of(trace, observed=observed, max_points=150)["observed"]
    assert len(line["x"]) == len(line["bytes"]) <= 150
    assert np.cumsum(line["bytes"]).max() == observed.peak_bytes


def test_a_large_step_stays_small() -> None:
    trace = transformer_trace(layers=620)
    text = json.dumps(timeline_data(trace, observed=replace(trace, origin="observed")), separators=(",", ":"))
    assert len(text) < 700_000
