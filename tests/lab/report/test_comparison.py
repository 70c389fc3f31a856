from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.record import Outcome, SpeedFigures
from lowtide.lab.report.comparison import (
    PublishedPair,
    make_comparisons,
    pairs_with_published,
    pareto_front,
    published_speed,
)
from lowtide.lab.report.rows import make_rows
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


# Few values, so that ties in one and in both are common.
POINTS = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float)), max_size=12)


def is_beaten(point: tuple[float, float], by: tuple[float, float]) -> bool:
    return by[0] <= point[0] and by[1] >= point[1] and by != point


@given(POINTS)
def test_brute_force_agrees(points: list[tuple[float, float]]) -> None:
    expected = {index for index, point in enumerate(points) if not any(is_beaten(point, other) for other in points)}
    front = pareto_front(points)
    assert set(front) == expected
    assert len(front) == len(expected)
    assert [points[index][0] for index in front] == sorted(points[index][0] for index in front)


def test_by_hand() -> None:
    # Memory, speed: the second has less memory than the first and is slower; the third is beaten by both.
    assert pareto_front([(21.0, 5.6), (0.56, 5.0), (22.0, 4.0), (21.0, 5.5)]) == (1, 0)
    assert pareto_front([]) == ()
    assert pareto_front([(1.0, 1.0), (1.0, 1.0)]) == (0, 1)


PUBLISHED = {"source": "a page", "peak_gib": 20.0, "samples_per_s": 2.5, "steps_10_to_100_s": 100.0}
SPEED = SpeedFigures(step_s=(0.5,) * 100, samples_per_step=4)


def test_differences() -> None:
    [row] = make_rows([record(peak_bytes=21 * GiB, speed=SPEED, recipe={"published": PUBLISHED})])
    beside = pairs_with_published(row)
    assert beside["peak"].difference == pytest.approx(0.05)
    assert beside["samples/s"].difference == pytest.approx(8.0 / 2.5 - 1)
    assert beside["steps 10 to 100, s"].difference == pytest.approx(45.0 / 100.0 - 1)
    assert beside["perplexity"].difference is None


def test_their_samples_per_second_count_the_evaluation_and_all_steps() -> None:
    published = {**PUBLISHED, "perplexity": 150.0}
    evaluated = replace(SPEED, evaluation_s=30.0)
    loss = math.log(150.0)

    def ours(speed: SpeedFigures, published: dict[str, object], **changes: object) -> float | None:
        [row] = make_rows([record(speed=speed, recipe={"published": published}, **changes)])
        return pairs_with_published(row)["samples/s"].ours

    # 400 samples in 50 s of steps and 30 s of evaluation.
    assert ours(evaluated, published, evaluation_loss=loss) == pytest.approx(5.0)
    # Without one on their side, without one on ours.
    assert ours(evaluated, PUBLISHED, evaluation_loss=loss) == pytest.approx(8.0)
    # Nobody knows how long it took, there was none, or the run has fewer steps than theirs.
    assert ours(SPEED, published, evaluation_loss=loss) is None
    assert ours(SPEED, published) is None
    short = SpeedFigures(step_s=(0.5,) * 3, samples_per_step=4, evaluation_s=30.0)
    assert ours(short, published, evaluation_loss=loss) is None
    assert ours(short, {"source": "a page", "samples_per_s": 2.5}) == pytest.approx(8.0)


def test_a_perplexity_of_fewer_steps_is_not_set_beside_theirs() -> None:
    published = {**PUBLISHED, "perplexity": 150.0}

    def ours(num_steps: int, published: dict[str, object]) -> float | None:
        speed = SpeedFigures(step_s=(0.5,) * num_steps, samples_per_step=4)
        [row] = make_rows([record(speed=speed, evaluation_loss=math.log(200.0), recipe={"published": published})])
        return pairs_with_published(row)["perplexity"].ours

    assert ours(100, published) == pytest.approx(200.0)
    assert ours(3, published) is None
    # How many steps theirs had, nobody says.
    assert ours(3, {"source": "a page", "perplexity": 150.0}) == pytest.approx(200.0)


def test_what_did_not_finish_has_no_difference() -> None:
    [row] = make_rows([record(outcome=Outcome.KILLED, speed=SPEED, recipe={"published": PUBLISHED})])
    beside = pairs_with_published(row)
    assert (beside["peak"].ours, beside["samples/s"].ours) == (None, None)
    assert beside["peak"].published == 20 * GiB


def test_nothing_published() -> None:
    [row] = make_rows([record()])
    assert pairs_with_published(row) == {}
    assert published_speed(row, is_warm=True) is None
    assert PublishedPair(ours=1.0, published=0.0).difference is None
    assert PublishedPair(ours=float("nan"), published=1.0).difference is None


def test_their_speed_is_of_the_kind_of_ours() -> None:
    [row] = make_rows([record(speed=SPEED, recipe={"published": PUBLISHED})])
    assert published_speed(row, is_warm=False) == 2.5
    # 90 steps of 4 samples in 100 s.
    assert published_speed(row, is_warm=True) == pytest.approx(3.6)
    without = {key: value for key, value in PUBLISHED.items() if key != "steps_10_to_100_s"}
    [row] = make_rows([record(speed=SPEED, recipe={"published": without})])
    assert published_speed(row, is_warm=True) is None
