from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.planning.what_if_row import WhatIfRow
from lowtide.report.facts import Fit, differences, fit_of, saving
from lowtide.tracing.compare import Difference
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import GiB, MiB
from tests.tracing.samples import TARGET, observed_like, tiny_trace, transformer_trace


def test_fit_counts_reserved_memory_and_the_context() -> None:
    trace = tiny_trace()  # 20 MiB reserved
    for capacity, fits, spare in ((540 * MiB, True, 0), (540 * MiB - 1, False, -1)):
        fit = fit_of(replace(trace, target=replace(TARGET, context_bytes=520 * MiB, capacity_bytes=capacity)))
        assert fit == Fit(needed_bytes=540 * MiB, capacity_bytes=capacity)
        assert (fit.fits, fit.spare_bytes) == (fits, spare)
    assert fit_of(replace(trace, target=replace(TARGET, capacity_bytes=0))) is None


def test_differences_are_relative_to_the_observation() -> None:
    predicted = transformer_trace(layers=2)
    observed = observed_like(predicted, scale=1.25)
    rows = {row.what: row for row in differences(predicted, observed)}
    assert rows["peak allocated"].predicted_bytes == predicted.peak_bytes
    assert rows["peak allocated"].observed_bytes == observed.peak_bytes
    assert rows["peak allocated"].error == pytest.approx(1 / 1.25 - 1, abs=1e-4)
    assert rows["highest in backward"].observed_bytes == observed.phase_peaks()[Phase.BACKWARD]
    assert rows["activations at the peak"].predicted_bytes == predicted.at_peak[Category.ACTIVATIONS]
    assert "gradients at the peak" not in rows  # none in either


def test_an_error_against_nothing_is_no_number() -> None:
    assert Difference(what="x", predicted_bytes=5, observed_bytes=0).error is None


@pytest.mark.parametrize(
    ("after", "text"), [(GiB, "2.0 GiB"), (3 * GiB, "nothing"), (4 * GiB, "costs 1.0 GiB"), (3 * GiB - 512, "512 B")]
)
def test_savings_in_words(after: int, text: str) -> None:
    assert saving(WhatIfRow(technique="x", before_bytes=3 * GiB, after_bytes=after, reason="")) == text
