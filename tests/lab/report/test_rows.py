from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lowtide.lab.record import MemoryFigures, Outcome, PredictedFigures, RunRecord, SpeedFigures, perplexity
from lowtide.lab.report.rows import make_rows, spread_of
from lowtide.units import GiB, MiB
from tests.lab.report.samples import SURROUNDINGS, record


def test_seeds_share_a_row() -> None:
    records = [
        record(seed=0, peak_bytes=3 * GiB, evaluation_loss=math.log(150.0)),
        record(seed=2, peak_bytes=5 * GiB, evaluation_loss=math.log(154.0)),
        record(seed=1, peak_bytes=4 * GiB),
    ]
    [row] = make_rows(records)
    assert row.seeds == (0, 1, 2)
    assert row.peak_bytes == 5 * GiB
    assert row.perplexity is not None
    assert (row.perplexity.mean, row.perplexity.count) == (pytest.approx(152.0), 2)
    assert (row.perplexity.least, row.perplexity.largest) == pytest.approx((150.0, 154.0))
    assert row.perplexity.deviation == pytest.approx(math.sqrt(8.0))
    assert row.label == "control"
    assert row.is_finished


def test_speed_with_compilation_and_after_warm_up() -> None:
    slow_start = SpeedFigures(step_s=(11.0, *[1.0] * 9, *[0.5] * 90), samples_per_step=4)
    even = SpeedFigures(step_s=(1.0,) * 100, samples_per_step=4)
    [row] = make_rows([record(seed=0, speed=slow_start), record(seed=1, speed=even)])
    assert row.samples_per_s is not None
    assert row.warm_samples_per_s is not None
    assert row.steps_10_to_100_s is not None
    # 400 samples in 65 s and in 100 s; without the first ten 360 in 45 s and in 90 s.
    assert row.samples_per_s.mean == pytest.approx((400 / 65 + 4.0) / 2)
    assert row.warm_samples_per_s.mean == pytest.approx((8.0 + 4.0) / 2)
    assert row.steps_10_to_100_s.mean == pytest.approx((45.0 + 90.0) / 2)


def test_a_short_run_has_no_warm_speed() -> None:
    [row] = make_rows([record(speed=SpeedFigures(step_s=(2.0, 1.0), samples_per_step=3))])
    assert row.samples_per_s is not None
    assert row.samples_per_s.mean == 2.0
    assert row.warm_samples_per_s is None
    assert row.steps_10_to_100_s is None


def test_runs_beside_other_work_have_perplexities_and_no_speeds() -> None:
    alone = SpeedFigures(step_s=(1.0,) * 100, samples_per_step=4)
    beside = replace(alone, step_s=(3.0,) * 100, is_alone=False)
    runs = [
        record(seed=seed, speed=speed, evaluation_loss=math.log(150.0 + seed))
        for seed, speed in enumerate((alone, beside, beside))
    ]
    [row] = make_rows(runs)
    assert row.warm_samples_per_s is not None
    assert (row.warm_samples_per_s.mean, row.warm_samples_per_s.count) == (4.0, 1)
    assert row.perplexity is not None
    assert row.perplexity.count == 3
    assert row.remarks == ("Of seeds 1, 2 there are no speeds: other work was on the device.",)
    [row] = make_rows(runs[1:])
    assert (row.samples_per_s, row.warm_samples_per_s, row.steps_10_to_100_s) == (None, None, None)
    # It is as long as any other: its perplexity can be set beside a published one.
    assert (row.steps, row.samples_per_step) == (100, 4)


def test_a_run_that_made_no_step_has_no_speed() -> None:
    [row] = make_rows([record(speed=SpeedFigures(step_s=(), samples_per_step=4))])
    assert row.samples_per_s is None


def test_nothing_but_an_ending() -> None:
    [row] = make_rows([record(peak_bytes=None, outcome=Outcome.KILLED, message="ended by signal 9")])
    assert (row.peak_bytes, row.peak_phase, row.samples_per_s, row.perplexity) == (None, None, None, None)
    assert (row.outcome, row.by_category, row.prediction_error) == (Outcome.KILLED, {}, None)
    [ending] = row.unfinished
    assert (ending.seed, ending.message) == (0, "ended by signal 9")


def test_a_row_of_which_one_seed_ran_out_of_memory_did_not_finish() -> None:
    speed = SpeedFigures(step_s=(1.0,) * 20, samples_per_step=4)
    lost = record(seed=1, peak_bytes=9 * GiB, outcome=Outcome.OUT_OF_MEMORY, speed=replace(speed, step_s=(9.0,) * 20))
    [row] = make_rows([record(seed=0, speed=speed), lost])
    assert not row.is_finished
    assert row.outcome is Outcome.OUT_OF_MEMORY
    assert row.peak_bytes == 9 * GiB
    # Speeds are those of finished runs.
    assert row.samples_per_s is not None
    assert row.samples_per_s.mean == 4.0


def test_memory_is_told_by_the_run_that_needed_most() -> None:
    small = MemoryFigures(
        peak_bytes=GiB, by_phase={"forward": GiB, "update": 5}, at_peak={"weights": 7}, timeline=(("forward", 1),)
    )
    large = MemoryFigures(peak_bytes=2 * GiB, by_phase={"forward": 1, "backward": 2 * GiB}, reserved_bytes=3 * GiB)
    [row] = make_rows([record(seed=0, memory=small), record(seed=1, memory=large)])
    assert (row.peak_bytes, row.peak_phase, row.reserved_bytes) == (2 * GiB, "backward", 3 * GiB)
    # It was not watched, so that the next one says what it is made of.
    assert (row.by_category, row.is_breakdown_predicted) == ({"weights": 7}, False)
    assert row.timeline == (("forward", 1),)


def test_a_prediction_and_its_error() -> None:
    predicted = PredictedFigures(peak_bytes=99 * MiB, peak_phase="loss", at_peak={"weights": 99 * MiB})
    [row] = make_rows([record(peak_bytes=100 * MiB, predicted=predicted)])
    assert row.prediction_error == pytest.approx(-0.01)
    assert row.by_category
    assert row.is_breakdown_predicted
    [row] = make_rows([record(peak_bytes=50 * MiB, predicted=predicted, outcome=Outcome.KILLED)])
    assert row.prediction_error is None


def test_other_settings_make_another_row_that_says_so() -> None:
    records = [
        record(recipe={"steps": 100, "plan": {"weights": "resident"}}),
        record(recipe={"steps": 3, "plan": None}),
        record("peak_memory/fused", recipe={"steps": 3}),
    ]
    labels = [row.label for row in make_rows(records)]
    assert labels == ["control (steps=100, plan.weights=resident)", "control (steps=3, plan=none)", "fused"]


def test_every_setting_is_named_in_which_namesakes_differ() -> None:
    recipes = [{"a": 1, "b": True}, {"a": 1, "b": False}, {"a": 2, "b": True}, {"a": 1, "b": True, "c": "x" * 99}]
    labels = [row.label for row in make_rows([record(recipe=recipe) for recipe in recipes])]
    assert labels == [
        "control (a=1, b=true, c=none)",
        "control (a=1, b=false, c=none)",
        "control (a=2, b=true, c=none)",
        f"control (a=1, b=true, c={'x' * 23}…)",
    ]


def test_another_model_is_no_namesake() -> None:
    recipes = [{"steps": 2}, {"steps": 3}, {"model": "gpt-tiny", "steps": 2}]
    labels = [row.label for row in make_rows([record(recipe=recipe) for recipe in recipes])]
    assert labels == ["control (steps=2)", "control (steps=3)", "control"]


def test_left_out_and_none_are_the_same() -> None:
    assert len(make_rows([record(seed=0, recipe={"plan": None}), record(seed=1)])) == 1


def test_words_about_a_run_make_no_other_row() -> None:
    records = [
        record(seed=0, recipe={"about": "then", "published": None}),
        record(seed=1, recipe={"about": "now", "published": {"source": "a page", "peak_gib": 2.0}}),
    ]
    [row] = make_rows(records)
    assert row.published is not None
    assert (row.published.source, row.published.peak_gib) == ("a page", 2.0)


def test_published_figures_that_cannot_be_read_are_said() -> None:
    [row] = make_rows([record(recipe={"published": {"source": "a page", "peek_gib": 2.0}})])
    assert row.published is None
    assert "Its published figures cannot be read" in row.remarks[0]
    assert "peek_gib" in row.remarks[0]


def test_devices_are_not_mixed() -> None:
    rows = make_rows([record(), record(device="cpu, emulated"), record(seed=1)])
    assert [(row.device, row.seeds) for row in rows] == [("NVIDIA H200", (0, 1)), ("cpu, emulated", (0,))]


def test_a_run_that_never_had_a_device_stands_with_the_others() -> None:
    killed = record("peak_memory/fused", device="unknown", peak_bytes=None, outcome=Outcome.KILLED)
    assert [row.device for row in make_rows([record(), killed])] == ["NVIDIA H200", "NVIDIA H200"]
    several = [record(), record(device="cpu, emulated"), killed]
    assert [row.device for row in make_rows(several)] == ["NVIDIA H200", "cpu, emulated", "unknown"]


def test_the_newest_run_of_a_seed_counts() -> None:
    def made(date: str, peak_bytes: int, **changes: object) -> object:
        return replace(record(peak_bytes=peak_bytes, **changes), surroundings=replace(SURROUNDINGS, date=date))

    # The first is the newest: eight in the evening in New York is one in the morning in Greenwich.
    newest = made("2026-03-01T20:00:00-05:00", GiB)
    failed = made("2026-03-02T00:30:00+00:00", 9 * GiB, outcome=Outcome.OUT_OF_MEMORY)
    [row] = make_rows([newest, failed, made("no date", 8 * GiB)])
    assert (row.peak_bytes, row.num_older, row.seeds, row.is_finished) == (GiB, 2, (0,), True)


def test_older_runs_have_rows_when_asked_for() -> None:
    def made(date: str, seed: int, peak_bytes: int, steps: int = 100) -> RunRecord:
        run = record(seed=seed, peak_bytes=peak_bytes, recipe={"steps": steps})
        return replace(run, surroundings=replace(SURROUNDINGS, date=f"2026-03-0{date}T10:00:00+00:00"))

    records = [
        made("1", 0, 1),
        made("3", 0, 2),
        made("2", 0, 3),
        made("1", 1, 4),
        made("2", 1, 5),
        made("1", 2, 6),
        made("1", 0, 7, steps=3),
    ]
    newest, other = make_rows(records)
    assert (newest.label, newest.seeds, newest.peak_bytes, newest.num_older) == ("control (steps=100)", (0, 1, 2), 6, 3)
    assert (other.label, other.num_older) == ("control (steps=3)", 0)
    rows = make_rows(records, with_older=True)
    assert [(row.label, row.seeds, row.peak_bytes, row.is_older) for row in rows] == [
        ("control (steps=100)", (0, 1, 2), 6, False),
        ("control (steps=100, older 1, 2026-03-02 10:00)", (0, 1), 4, True),
        ("control (steps=100, older 2, 2026-03-01 10:00)", (0,), 1, True),
        ("control (steps=3)", (0,), 7, False),
    ]
    assert [row.num_older for row in rows] == [0, 0, 0, 0]
    assert [row.is_control for row in rows] == [True, False, False, True]


def test_training_is_told_from_the_evaluation() -> None:
    def memory(training: int, evaluation: int) -> MemoryFigures:
        phases = {"forward": training - 1, "backward": training, "evaluation": evaluation}
        return MemoryFigures(peak_bytes=max(phases.values()), by_phase=phases)

    predicted = PredictedFigures(peak_bytes=99, peak_phase="backward", at_peak={})
    # The largest of each, whichever seed it is of.
    [row] = make_rows(
        [record(seed=0, memory=memory(100, 40), predicted=predicted), record(seed=1, memory=memory(90, 300))]
    )
    assert (row.peak_bytes, row.peak_phase, row.training_peak_bytes) == (300, "evaluation", 100)
    assert row.prediction_error == pytest.approx(-0.01)
    [row] = make_rows([record(memory=MemoryFigures(peak_bytes=5, by_phase={}), predicted=predicted)])
    assert row.training_peak_bytes is None
    assert row.prediction_error == pytest.approx(99 / 5 - 1)


def test_a_plain_user_error_is_one_line() -> None:
    trail = '\nlast heard: preparing\n  File "a.py", line 3, in run\n    raise it'
    failed = [
        record("x/a", peak_bytes=None, outcome=Outcome.FAILED, message=f"ConfigError: no such\n  thing{trail}"),
        record("x/b", peak_bytes=None, outcome=Outcome.FAILED, message=f"ChunkStateError: a fault{trail}"),
    ]
    plain, fault = make_rows(failed)
    assert plain.unfinished[0].message == "ConfigError: no such thing"
    assert fault.unfinished[0].message == failed[1].message


def test_several_values() -> None:
    spread = spread_of([2.0, 4.0, None, 9.0])
    assert spread is not None
    assert (spread.mean, spread.least, spread.largest, spread.count) == (5.0, 2.0, 9.0, 3)
    # Squares of -3, -1 and 4 sum to 26, over two.
    assert spread.deviation == pytest.approx(math.sqrt(13))


def test_one_value_has_no_deviation() -> None:
    spread = spread_of([3.0])
    assert spread is not None
    assert (spread.mean, spread.deviation) == (3.0, None)


def test_nothing() -> None:
    assert spread_of([]) is None
    assert spread_of([None]) is None


def test_a_value_that_is_not_finite() -> None:
    spread = spread_of([1.0, math.inf])
    assert spread is not None
    assert (spread.mean, spread.deviation) == (math.inf, None)


def test_perplexity() -> None:
    assert perplexity(math.log(152.0)) == pytest.approx(152.0)
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
