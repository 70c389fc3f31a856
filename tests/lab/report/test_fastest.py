from __future__ import annotations

from lowtide.lab.record import Outcome, SpeedFigures
from lowtide.lab.report.comparison import make_comparisons
from lowtide.lab.report.fastest import fastest_words
from lowtide.lab.report.html import render_html
from lowtide.lab.report.markdown import render_markdown
from lowtide.units import GiB
from tests.lab.report.samples import record


def at(samples_per_s: float) -> SpeedFigures:
    return SpeedFigures(step_s=(1 / samples_per_s,) * 4, samples_per_step=1)


def test_every_budget_has_its_fastest() -> None:
    records = [
        record("x/control", peak_bytes=8 * GiB, speed=at(4.0)),
        record("x/slow", peak_bytes=6 * GiB, speed=at(1.0)),
        record("x/recomputed", peak_bytes=3 * GiB, speed=at(3.0)),
        record("x/streamed", peak_bytes=GiB, speed=at(2.0)),
    ]
    (comparison,) = make_comparisons(records)
    words = (
        "Fastest within a budget, by peak: from 1.000 GiB streamed (2.000 samples/s); from 3.000 GiB recomputed (3.000 "
        "samples/s); from 8.000 GiB control (4.000 samples/s)."
    )
    assert fastest_words(comparison) == words
    assert words in render_markdown([comparison], records, title="x")
    assert words in render_html([comparison], records, title="x")


def test_rows_without_such_a_speed_are_named() -> None:
    long = SpeedFigures(step_s=(1.0,) * 12, samples_per_step=1)
    records = [
        record("x/control", peak_bytes=8 * GiB, speed=long),
        record("x/short", peak_bytes=GiB, speed=at(9.0)),
        record("x/lost", peak_bytes=None, outcome=Outcome.KILLED),
    ]
    (comparison,) = make_comparisons(records)
    assert fastest_words(comparison) == (
        "Fastest within a budget, by peak: from 8.000 GiB control (1.000 samples/s). Not among them, for want of a speed "
        "after warm-up: short."
    )
    assert "control, of 1 with a speed after warm-up" in render_html([comparison], records, title="x")


def test_an_emulated_device_is_no_judge_of_speed() -> None:
    (comparison,) = make_comparisons([record(speed=at(1.0), device="cpu, emulated")])
    assert fastest_words(comparison).endswith("so that the order may be another on a card.")


def test_without_speeds_there_is_nothing_to_say() -> None:
    (comparison,) = make_comparisons([record()])
    assert fastest_words(comparison) == ""
