from __future__ import annotations

from lowtide.lab.record import MemoryFigures, Outcome, PredictedFigures, SpeedFigures
from lowtide.lab.report.charts import scatter_of as scatter_and_rows
from lowtide.lab.report.charts import step_curves
from lowtide.lab.report.comparison import Comparison, make_comparisons
from lowtide.lab.report.tables import result_table
from lowtide.report.charts import Scatter
from lowtide.units import GiB, KiB, MiB
from tests.lab.report.samples import experiment, record


def scatter_of(comparison: Comparison) -> Scatter | None:
    found = scatter_and_rows(comparison)
    return None if found is None else found[0]


def named(scatter: Scatter, *kinds: str) -> list[str]:
    return [mark.name for mark in scatter.marks if mark.kind in kinds]


def at(samples_per_s: float) -> SpeedFigures:
    return SpeedFigures(step_s=(1 / samples_per_s,) * 20, samples_per_step=1)


def test_the_front_is_a_staircase_of_what_can_be_had() -> None:
    records = [
        record("x/control", peak_bytes=8 * GiB, speed=at(4.0)),
        record("x/lean", peak_bytes=2 * GiB, speed=at(1.0)),
        record("x/middle", peak_bytes=4 * GiB, speed=at(2.0)),
        record("x/beaten", peak_bytes=9 * GiB, speed=at(2.0)),
    ]
    [comparison] = make_comparisons(records)
    scatter = scatter_of(comparison)
    assert scatter is not None
    assert scatter.front == ((1.0, 2.0), (1.0, 4.0), (2.0, 4.0), (2.0, 8.0), (4.0, 8.0))
    assert named(scatter, "ours") == ["beaten"]
    assert scatter.y_name == "peak, GiB"
    assert not scatter.y.is_log


def test_small_models_are_drawn_in_small_units() -> None:
    [comparison] = make_comparisons([record(peak_bytes=3 * MiB, speed=at(1.0))])
    scatter = scatter_of(comparison)
    assert scatter is not None
    assert (scatter.y_name, scatter.marks[0].y) == ("peak, MiB", 3.0)


def test_the_axis_speaks_of_compilation_only_where_something_is_compiled() -> None:
    short = SpeedFigures(step_s=(1.0,) * 2, samples_per_step=1)
    for recipe, words in (({}, "over all steps"), ({"compile": {"scope": "model"}}, "with compilation")):
        [comparison] = make_comparisons([record("x/a", speed=short), record("x/b", speed=short, recipe=recipe)])
        scatter = scatter_of(comparison)
        assert scatter is not None
        assert scatter.x_name == f"samples/s {words}"
        legends = [column.legend for column in result_table(comparison).columns if column.head == "samples/s"]
        assert legends == ["over all steps" + (", compilation included" if recipe else "")]


def test_no_speed_no_chart() -> None:
    [comparison] = make_comparisons([record()])
    assert scatter_of(comparison) is None


def test_the_whole_experiment() -> None:
    [comparison] = make_comparisons(experiment())
    scatter = scatter_of(comparison)
    assert scatter is not None
    assert (len(named(scatter, "ours", "on-front")), len(named(scatter, "published"))) == (14, 11)
    assert scatter.y.is_log
    left_out = "Not on the chart, since not every run of theirs finished: "
    assert f"{left_out}control_batch_64 out of memory, streamed_from_disk killed." in scatter.notes


def test_what_is_not_drawn_has_its_own_reason() -> None:
    few = SpeedFigures(step_s=(0.1,) * 3, samples_per_step=1)
    [comparison] = make_comparisons(
        [
            record("x/long", speed=at(1.0)),
            record("x/short", speed=few),
            record("x/half", speed=at(1.0)),
            record("x/half", seed=1, peak_bytes=None, outcome=Outcome.KILLED),
        ]
    )
    scatter = scatter_of(comparison)
    assert scatter is not None
    assert scatter.notes == (
        "Not on the chart, since not every run of theirs finished: half killed (1 of 2 finished).",
        "Not on the chart, for want of a peak or a speed after warm-up: short.",
    )


def test_published_rows_without_a_speed_are_said() -> None:
    published = {"source": "a page", "peak_gib": 2.0, "samples_per_s": 3.0}
    [comparison] = make_comparisons([record(speed=at(1.0), recipe={"published": published})])
    scatter = scatter_of(comparison)
    assert scatter is not None
    assert named(scatter, "published") == []
    assert scatter.notes == ("No published speed after warm-up to draw for control.",)


def test_short_runs_beside_long_ones_of_the_same_recipe() -> None:
    published = {"source": "a page", "peak_gib": 9.0, "samples_per_s": 3.0, "steps_10_to_100_s": 100.0}
    short = SpeedFigures(step_s=(0.1,) * 3, samples_per_step=1)
    records = [
        record("x/control", recipe={"published": published}, speed=at(1.0)),
        record("x/control", recipe={"published": published, "steps": 3}, speed=short),
        record("x/fused", recipe={"published": published, "steps": 3}, speed=short),
    ]
    [comparison] = make_comparisons(records)
    scatter = scatter_of(comparison)
    assert scatter is not None
    assert named(scatter, "ours", "on-front") == ["control (steps=100)"]
    # What was published for a recipe is one mark, however many rows are of it.
    assert named(scatter, "published") == ["control (steps=100)", "fused"]
    assert [mark.belongs_to for mark in scatter.marks] == [None, 0, None]
    assert scatter.notes[-1] == (
        "Not on the chart, for want of a peak or a speed after warm-up: control (steps=3), fused."
    )


def test_spans_and_peak() -> None:
    held = (("forward", 4), ("forward", 8), ("backward", 9), ("backward", 3), ("backward", 2), ("update", 5))
    points = tuple((phase, size * KiB) for phase, size in held)
    memory = MemoryFigures(peak_bytes=10 * KiB, by_phase={"backward": 10 * KiB}, timeline=points)
    predicted = PredictedFigures(peak_bytes=12 * KiB, peak_phase="backward", at_peak={})
    [comparison] = make_comparisons([record(memory=memory, predicted=predicted)])
    [curve] = step_curves(comparison)
    assert curve.points == (4, 8, 9, 3, 2, 5)
    assert curve.spans == (("forward", 0.0, 2 / 6), ("backward", 2 / 6, 5 / 6), ("update", 5 / 6, 1.0))
    assert (curve.peak, curve.predicted, curve.top) == (2, 12, 12)
    assert curve.words == "9.0 KiB in backward, predicted 12.0"


def test_a_step_that_was_not_watched() -> None:
    [comparison] = make_comparisons([record()])
    assert step_curves(comparison) == ()
