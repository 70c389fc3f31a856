from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lowtide.lab.record import Outcome, SpeedFigures
from lowtide.lab.report.published import Beside, beside_published, published_speed
from lowtide.lab.report.rows import make_rows
from lowtide.units import GiB
from tests.lab.report.samples import record

PUBLISHED = {"source": "a page", "peak_gib": 20.0, "samples_per_s": 2.5, "steps_10_to_100_s": 100.0}
SPEED = SpeedFigures(step_s=(0.5,) * 100, samples_per_step=4)


def test_differences() -> None:
    [row] = make_rows([record(peak_bytes=21 * GiB, speed=SPEED, recipe={"published": PUBLISHED})])
    beside = beside_published(row)
    assert beside is not None
    assert beside.peak_bytes.difference == pytest.approx(0.05)
    assert beside.samples_per_s.difference == pytest.approx(8.0 / 2.5 - 1)
    assert beside.steps_10_to_100_s.difference == pytest.approx(45.0 / 100.0 - 1)
    assert beside.perplexity.difference is None


def test_their_samples_per_second_count_the_evaluation_and_all_steps() -> None:
    published = {**PUBLISHED, "perplexity": 150.0}
    evaluated = replace(SPEED, evaluation_s=30.0)
    loss = math.log(150.0)

    def ours(speed: SpeedFigures, published: dict[str, object], **changes: object) -> float | None:
        [row] = make_rows([record(speed=speed, recipe={"published": published}, **changes)])
        beside = beside_published(row)
        assert beside is not None
        return beside.samples_per_s.ours

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
        beside = beside_published(row)
        assert beside is not None
        return beside.perplexity.ours

    assert ours(100, published) == pytest.approx(200.0)
    assert ours(3, published) is None
    # How many steps theirs had, nobody says.
    assert ours(3, {"source": "a page", "perplexity": 150.0}) == pytest.approx(200.0)


def test_what_did_not_finish_has_no_difference() -> None:
    [row] = make_rows([record(outcome=Outcome.KILLED, speed=SPEED, recipe={"published": PUBLISHED})])
    beside = beside_published(row)
    assert beside is not None
    assert (beside.peak_bytes.ours, beside.samples_per_s.ours) == (None, None)
    assert beside.peak_bytes.published == 20 * GiB


def test_nothing_published() -> None:
    [row] = make_rows([record()])
    assert beside_published(row) is None
    assert published_speed(row, is_warm=True) is None
    assert Beside(ours=1.0, published=0.0).difference is None
    assert Beside(ours=float("nan"), published=1.0).difference is None


def test_their_speed_is_of_the_kind_of_ours() -> None:
    [row] = make_rows([record(speed=SPEED, recipe={"published": PUBLISHED})])
    assert published_speed(row, is_warm=False) == 2.5
    # 90 steps of 4 samples in 100 s.
    assert published_speed(row, is_warm=True) == pytest.approx(3.6)
    without = {key: value for key, value in PUBLISHED.items() if key != "steps_10_to_100_s"}
    [row] = make_rows([record(speed=SPEED, recipe={"published": without})])
    assert published_speed(row, is_warm=True) is None
