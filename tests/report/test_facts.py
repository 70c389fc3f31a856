from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.planning.what_if import WhatIfRow
from lowtide.report.facts import Fit, circumstances, differences, fit_of, saving
from lowtide.tracing.explanation.compare import Difference
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import GiB, MiB
from tests.tracing.samples import TARGET, observed_like, tiny_trace, transformer_trace


def test_fit_counts_reserved_memory_and_the_context() -> None:
    trace = tiny_trace()  # 20 MiB reserved
    context, least = 520 * MiB, tiny_trace().peak_bytes + 520 * MiB
    assert least < 540 * MiB
    for capacity, fits, tightly, spare in (
        (540 * MiB, True, False, 0),
        (
            540 * MiB - 1,
            False,
            True,
            540 * MiB - 1 - least,
        ),  # with cached blocks given back, only what is in use counts
        (least, False, True, 0),
        (least - 1, False, False, least - 1 - 540 * MiB),
    ):
        fit = fit_of(replace(trace, target=replace(TARGET, context_bytes=context, capacity_bytes=capacity)))
        expected = Fit(needed_bytes=540 * MiB, least_bytes=least, capacity_bytes=capacity, is_context_known=True)
        assert fit == expected
        assert (fit.fits, fit.fits_tightly, fit.spare_bytes) == (fits, tightly, spare)
    assert fit_of(replace(trace, target=replace(TARGET, capacity_bytes=0))) is None


def test_the_verdict_says_how_much_and_what_is_not_known() -> None:
    fit = Fit(needed_bytes=30 * GiB, least_bytes=20 * GiB, capacity_bytes=24 * GiB, is_context_known=False)
    assert fit.verdict == (
        "fits only if cached blocks are given back, 4.0 GiB to spare then (CUDA context not known, not counted)"
    )
    assert replace(fit, capacity_bytes=10 * GiB, is_context_known=True).verdict == "does not fit, 10.0 GiB too much"
    assert replace(fit, capacity_bytes=32 * GiB, is_context_known=True).verdict == "fits, 2.0 GiB to spare"


def test_circumstances_are_what_a_trace_knows_of_itself() -> None:
    trace = replace(tiny_trace(), target=replace(TARGET, card="h200", torch_version="2.11.0", capacity_bytes=140 * GiB))
    assert circumstances(trace) == [("hardware", "h200, 140.0 GiB"), ("versions", "torch 2.11.0")]
    about = {"batch": "ids 2x64 int64", "optimizer": "AdamW", "dtype": "float32", "torch": "2.11.0+cu130"}
    made = {"lowtide": "0.1.0", "python": "3.11.7", "commit": "0123456789abcdef+changes"}
    trace = replace(trace, about={**about, **made}, settings={"autocast": "bfloat16"})
    assert circumstances(trace) == [
        ("batch", "ids 2x64 int64"),
        ("optimizer", "AdamW"),
        ("weights", "float32 under autocast to bfloat16"),
        ("hardware", "h200, 140.0 GiB"),
        ("versions", "torch 2.11.0, lowtide 0.1.0, Python 3.11.7, commit 0123456789ab with changes"),
    ]
    elsewhere = replace(trace, about={"torch": "2.13.0+cpu"}, settings={})
    assert dict(circumstances(elsewhere))["versions"] == "torch 2.11.0 (traced with 2.13.0+cpu)"


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
    ("after", "text"), [(GiB, "2.0 GiB"), (3 * GiB, "nothing"), (4 * GiB, "costs 1.0 GiB"), (3 * GiB - 512, "nothing")]
)
def test_savings_in_words(after: int, text: str) -> None:
    assert saving(WhatIfRow(technique="x", before_bytes=3 * GiB, after_bytes=after, reason="")) == text
