"""Titles of reports over one folder, over none, and over several."""

from __future__ import annotations

import pytest

from lowtide.lab.record import Outcome, SpeedFigures
from lowtide.lab.report.comparison import fastest_words, make_comparisons, make_report
from lowtide.lab.report.html import render_html
from lowtide.lab.report.write import render_markdown
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
    assert words in render_markdown(make_report(records))
    assert words in render_html(make_report(records))


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
    assert "control, of 1 with a speed after warm-up" in render_html(make_report(records))


def test_an_emulated_device_is_no_judge_of_speed() -> None:
    (comparison,) = make_comparisons([record(speed=at(1.0), device="cpu, emulated")])
    assert fastest_words(comparison).endswith("so that the order may be another on a GPU.")


def test_without_speeds_there_is_nothing_to_say() -> None:
    (comparison,) = make_comparisons([record()])
    assert fastest_words(comparison) == ""


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (("peak_memory/a", "peak_memory/b"), "peak_memory"),
        (("mine",), "mine"),
        (("mine", "own", "third"), "mine, own, third"),
        (("mine", "own", "third", "fourth"), "mine, own and 2 other recipes"),
        (("peak_memory/a", "mine", "peak_memory/b"), "peak_memory, mine"),
        (("x/a", "mine", "y/a", "own", "x/b", "z/a"), "x, mine and 3 other groups"),
    ],
)
def test_reports(names: tuple[str, ...], title: str) -> None:
    assert make_report([record(name) for name in names]).title == f"Lab report: {title}"


def test_recipes_without_a_folder_are_named() -> None:
    records = [record("x/control"), record("mine"), record("own", recipe={"model": "gpt-tiny"}), record("more")]
    titles = [comparison.title for comparison in make_comparisons(records)]
    assert titles == ["x on NVIDIA H200", "mine, more (deep-one) on NVIDIA H200", "own (gpt-tiny) on NVIDIA H200"]
