from __future__ import annotations

import pytest

from lowtide.lab.record import Outcome, SpeedFigures
from lowtide.lab.report.comparison import make_comparisons
from lowtide.units import GiB
from tests.lab.report.samples import record


def at(samples_per_s: float, steps: int = 20) -> SpeedFigures:
    return SpeedFigures(step_s=(1 / samples_per_s,) * steps, samples_per_step=1)


def test_reductions_are_against_the_control() -> None:
    records = [
        record("x/lean", peak_bytes=2 * GiB),
        record("x/control", peak_bytes=8 * GiB),
        record("x/fat", peak_bytes=9 * GiB),
    ]
    [comparison] = make_comparisons(records)
    assert [row.label for row in comparison.rows] == ["control", "fat", "lean"]
    assert [comparison.reduction(row) for row in comparison.rows] == [None, pytest.approx(-0.125), 0.75]
    assert comparison.control_words == "Reductions are against control."


def test_without_a_control_the_largest_peak_stands_in_and_it_is_said() -> None:
    [comparison] = make_comparisons([record("x/a", peak_bytes=GiB), record("x/b", peak_bytes=4 * GiB)])
    assert [comparison.reduction(row) for row in comparison.rows] == [None, 0.75]
    assert comparison.control_words == (
        "Reductions are against b, the row with the largest peak, because there is no row whose name ends in control."
    )


def test_a_control_that_did_not_finish_is_no_measure() -> None:
    lost = record("x/control", peak_bytes=90 * GiB, outcome=Outcome.OUT_OF_MEMORY)
    [comparison] = make_comparisons([lost, record("x/a", peak_bytes=GiB), record("x/b", peak_bytes=4 * GiB)])
    assert comparison.control_words.endswith("because control did not finish: out of memory.")
    assert [row.label for row in comparison.rows] == ["b", "a", "control"]
    assert [comparison.reduction(row) for row in comparison.rows] == [None, 0.75, None]


def test_a_control_without_a_peak() -> None:
    [comparison] = make_comparisons([record("x/control", peak_bytes=None), record("x/a")])
    assert comparison.control_words.endswith("because control has no peak.")


def test_several_controls() -> None:
    records = [record("x/control", peak_bytes=GiB), record("x/small_control", peak_bytes=2 * GiB)]
    [comparison] = make_comparisons(records)
    assert comparison.control_words == "Reductions are against small_control, the largest of 2 rows of that name."


def test_of_equal_controls_the_longer_run_counts() -> None:
    records = [
        record("x/control", recipe={"steps": 3}, speed=at(1.0, steps=3)),
        record("x/control", speed=at(1.0, steps=100)),
    ]
    [comparison] = make_comparisons(records)
    assert comparison.control is not None
    assert comparison.control.label == "control (steps=100)"


def test_nothing_finished() -> None:
    [comparison] = make_comparisons([record("x/control", outcome=Outcome.FAILED)])
    assert comparison.control is None
    assert comparison.control_words.startswith("No run finished with a peak")
    assert comparison.front == ()


def test_experiments_devices_and_models_are_apart() -> None:
    records = [
        record("x/control"),
        record("y/control", recipe={"model": "gpt-tiny"}),
        record("x/control", device="cpu, emulated"),
        record("x/other", recipe={"model": "gpt-tiny"}),
    ]
    titles = [comparison.title for comparison in make_comparisons(records)]
    assert titles == [
        "x (deep-one) on NVIDIA H200",
        "y on NVIDIA H200",
        "x (deep-one) on cpu, emulated",
        "x (gpt-tiny) on NVIDIA H200",
    ]
    assert [comparison.is_emulated for comparison in make_comparisons(records)] == [False, False, True, False]


def test_the_front_has_finished_rows_only() -> None:
    records = [
        record("x/control", peak_bytes=8 * GiB, speed=at(4.0)),
        record("x/lean", peak_bytes=2 * GiB, speed=at(3.0)),
        record("x/beaten", peak_bytes=4 * GiB, speed=at(2.0)),
        record("x/killed", peak_bytes=GiB, speed=at(9.0), outcome=Outcome.KILLED),
        record("x/no_speed", peak_bytes=GiB),
        record("x/no_peak", peak_bytes=None, speed=at(99.0)),
    ]
    [comparison] = make_comparisons(records)
    assert [row.label for row in comparison.front] == ["lean", "control"]


def test_speeds_are_compared_after_the_warm_up_where_any_run_has_one() -> None:
    slow_start = SpeedFigures(step_s=(10.0, *[1.0] * 19), samples_per_step=1)
    records = [
        record("x/control", peak_bytes=4 * GiB, speed=slow_start),
        record("x/lean", peak_bytes=2 * GiB, speed=at(0.5)),
        # Three steps for its memory: their speed is none to be set beside one after the warm-up.
        record("x/short", peak_bytes=GiB, speed=at(9.0, steps=3)),
    ]
    [comparison] = make_comparisons(records)
    assert comparison.is_warm
    control, lean, short = comparison.rows
    speed = comparison.speed(control)
    assert speed is not None
    assert speed.mean == 1.0
    assert comparison.speed(short) is None
    assert comparison.front == (lean, control)
    assert comparison.reduction(short) == 0.75


def test_without_a_warm_up_all_steps_count() -> None:
    records = [record("x/control", speed=at(4.0, steps=10)), record("x/a", speed=at(2.0, steps=3))]
    [comparison] = make_comparisons(records)
    assert not comparison.is_warm
    assert [speed.mean for row in comparison.rows if (speed := comparison.speed(row))] == [4.0, 2.0]
