from __future__ import annotations

import math

from lowtide.lab.record import MemoryFigures, Outcome, PredictedFigures, RunRecord, SpeedFigures
from lowtide.lab.report.comparison import Comparison, make_comparisons
from lowtide.lab.report.tables import breakdown_table, perplexity_table, published_table, result_table
from lowtide.report.table import Table, Value
from lowtide.units import GiB, MiB
from tests.lab.report.samples import experiment, record


def cells(table: Table | None) -> dict[str, list[str | None]]:
    assert table is not None
    figures = [column for column in table.columns[1:] if not column.has_bars]
    return {
        column.head: [value.text if isinstance(value, Value) else None for value in column.values] for column in figures
    }


def names(table: Table) -> list[str]:
    return [value.text for value in table.columns[0].values if isinstance(value, Value)]


def compare(*records: object) -> Comparison:
    [comparison] = make_comparisons(records)
    return comparison


def test_only_columns_with_something_to_say() -> None:
    assert cells(result_table(compare(record()))) == {"peak, GiB": ["1.000"], "at": ["forward"]}


def test_all_columns_by_hand() -> None:
    memory = MemoryFigures(
        peak_bytes=8 * GiB, by_phase={"forward": GiB, "backward": 8 * GiB}, reserved_bytes=9 * GiB, host_bytes=2 * GiB
    )
    predicted = PredictedFigures(peak_bytes=8 * GiB - 8 * MiB, peak_phase="backward", at_peak={})
    speed = SpeedFigures(step_s=(56.0, *[0.5] * 99), samples_per_step=4)
    control = {"memory": memory, "predicted": predicted, "speed": speed}
    comparison = compare(
        record(seed=0, evaluation_loss=math.log(150.0), **control),
        record(seed=1, evaluation_loss=math.log(154.0), **control),
        record("peak_memory/lean", peak_bytes=2 * GiB, evaluation_loss=math.log(12.345)),
    )
    assert cells(result_table(comparison)) == {
        "runs": ["2", "1"],
        "peak, GiB": ["8.000", "2.000"],
        "reduction": [None, "75.0%"],
        "at": ["backward", "forward"],
        # 400 samples in 105.5 s.
        "samples/s": ["3.791", None],
        "warm samples/s": ["8.000", None],
        "steps 10 to 100, s": ["45.0", None],
        "perplexity": ["152.0 ± 2.8", "12.35"],
        "predicted, GiB": ["7.992", None],
        "error": ["-0.10%", None],
        "reserved, GiB": ["9.000", None],
        "host, GiB": ["2.000", None],
    }
    [column] = [column for column in result_table(comparison).columns if column.head == "perplexity"]
    assert column.values[0] is not None
    assert column.values[0].detail == "150.0–154.0"
    assert "mean ± standard deviation" in column.legend


def test_perplexities_on_the_way_are_by_step() -> None:
    def run(name: str, seed: int, last: float, *within: tuple[int, float]) -> RunRecord:
        losses = tuple((step, math.log(value)) for step, value in within)
        return record(name, seed=seed, losses=(5.0,) * 9, evaluation_loss=math.log(last), evaluations=losses)

    comparison = compare(
        run("x/control", 0, 10.0, (2, 40.0), (5, 20.0)),
        run("x/control", 1, 12.0, (2, 44.0), (5, 22.0)),
        run("x/other", 0, 11.0, (3, 30.0)),
        run("x/without", 0, 13.0),
    )
    table = perplexity_table(comparison)
    assert cells(table) == {
        "after 2": ["42.00 ± 2.83", None],
        "after 3": [None, "30.00"],
        "after 5": ["21.00 ± 1.41", None],
        "after 9": ["11.00 ± 1.41", "11.00"],
    }
    assert names(table) == ["control", "other"]
    assert perplexity_table(compare(run("x/without", 0, 13.0))) is None


def test_the_training_peak_stands_beside_one_that_an_evaluation_sets() -> None:
    def run(name: str, training: int, evaluation: int) -> object:
        phases = {"backward": training * GiB, "evaluation": evaluation * GiB}
        return record(name, memory=MemoryFigures(peak_bytes=max(phases.values()), by_phase=phases))

    # The same everywhere: one column is enough.
    assert "training, GiB" not in cells(result_table(compare(run("x/a", 4, 2), run("x/b", 3, 3))))
    table = cells(result_table(compare(run("x/a", 4, 2), run("x/b", 3, 5))))
    assert table["peak, GiB"] == ["5.000", "4.000"]
    assert table["training, GiB"] == ["3.000", "4.000"]
    assert table["at"] == ["evaluation", "backward"]


def test_one_seed_has_no_spread() -> None:
    [column] = [
        column for column in result_table(compare(record(evaluation_loss=1.0))).columns if column.head == "perplexity"
    ]
    assert column.values[0] is not None
    assert (column.values[0].text, column.values[0].detail) == ("2.72", "")
    assert column.legend == "exp of the evaluation loss"


def test_a_loss_beyond_measure() -> None:
    assert cells(result_table(compare(record(evaluation_loss=1e6))))["perplexity"] == ["not finite"]


def test_bad_ends_stay_with_their_reasons() -> None:
    comparison = compare(
        record(),
        record("peak_memory/big", outcome=Outcome.OUT_OF_MEMORY, message="no\nroom", peak_bytes=3 * GiB),
        record("peak_memory/mixed", seed=0),
        record("peak_memory/mixed", seed=1, outcome=Outcome.KILLED, peak_bytes=None),
    )
    table = result_table(comparison)
    assert names(table) == ["control", "big", "mixed"]
    assert cells(table)["outcome"] == ["finished", "out of memory", "killed (1 of 2 finished)"]
    assert cells(table)["peak, GiB"] == ["1.000", "≥ 3.000", "≥ 1.000"]
    assert table.columns[1].values[1] is not None
    assert table.columns[1].values[1].detail == "no room"


def test_long_reasons_are_cut_between_words() -> None:
    comparison = compare(record(outcome=Outcome.FAILED, message="word " * 100))
    value = result_table(comparison).columns[1].values[0]
    assert value is not None
    assert len(value.detail) <= 120
    assert value.detail.endswith("word …")


def test_what_the_peak_is_made_of() -> None:
    memory = MemoryFigures(
        peak_bytes=4 * GiB, by_phase={}, at_peak={"weights": 3 * GiB, "odd": GiB // 2, "gradients": 0}
    )
    predicted = PredictedFigures(peak_bytes=GiB, peak_phase="loss", at_peak={"weights": GiB})
    comparison = compare(
        record(memory=memory), record("peak_memory/a", predicted=predicted), record("peak_memory/b", peak_bytes=GiB)
    )
    table = breakdown_table(comparison)
    assert cells(table) == {
        "weights, GiB": ["3.000", "1.000"],
        "odd, GiB": ["0.500", None],
        "sum, GiB": ["3.500", "1.000"],
        "from": ["run", "trace"],
    }
    assert breakdown_table(compare(record())) is None


def test_beside_the_published_figures() -> None:
    published = {"source": "a page", "peak_gib": 1.001, "perplexity": 100.0}
    comparison = compare(
        record(recipe={"published": published}, evaluation_loss=math.log(99.0)), record("peak_memory/a")
    )
    table = published_table(comparison)
    assert table is not None
    assert names(table) == ["control"]
    texts = [(column.head, value and value.text) for column in table.columns[1:] for value in column.values]
    assert texts == [
        ("peak, GiB", "1.000"),
        ("published", "1.001"),
        ("differs", "-0.10%"),
        ("perplexity", "99.00"),
        ("published", "100.0"),
        ("differs", "-1.0%"),
    ]
    assert published_table(compare(record())) is None


def test_a_trifle_is_not_less_than_nothing() -> None:
    published = {"source": "a page", "peak_gib": 1.00001}
    table = published_table(compare(record(recipe={"published": published})))
    assert table is not None
    assert table.columns[3].values[0] is not None
    assert table.columns[3].values[0].text == "+0.00%"
    comparison = compare(record(peak_bytes=GiB), record("peak_memory/fused", peak_bytes=GiB + 512))
    assert cells(result_table(comparison))["reduction"] == [None, "0.0%"]


def test_speeds_over_seeds_have_their_range() -> None:
    slow, fast = (SpeedFigures(step_s=(seconds,) * 3, samples_per_step=4) for seconds in (2.0, 1.0))
    comparison = compare(
        record(seed=0, speed=slow),
        record(seed=1, speed=fast),
        record(seed=2, outcome=Outcome.KILLED, peak_bytes=None),
        record("peak_memory/lean", speed=slow),
    )
    columns = {column.head: column for column in result_table(comparison).columns}
    assert [(value.text, value.detail) for value in columns["samples/s"].values if value] == [
        ("2.000", ""),
        ("3.000", "2.000–4.000"),
    ]
    assert columns["samples/s"].legend == "over all steps; over several seeds: mean (least–largest)"
    assert columns["runs"].legend.endswith("means over those that finished")


def test_every_column_has_a_value_for_each_row() -> None:
    comparison = compare(*experiment())
    for table in (result_table(comparison), breakdown_table(comparison), published_table(comparison)):
        assert table is not None
        assert all(len(column.values) == len(table.rows) for column in table.columns)


def test_steps_are_said_where_they_differ() -> None:
    short, long = (SpeedFigures(step_s=(0.5,) * steps, samples_per_step=4) for steps in (3, 100))
    comparison = compare(
        record(speed=long), record("peak_memory/lean", recipe={"steps": 3}, speed=short), record("peak_memory/killed")
    )
    assert cells(result_table(comparison))["steps"] == ["100", "3", None]
    assert "steps" not in cells(result_table(compare(record(speed=long), record("peak_memory/lean", speed=long))))


def test_what_was_published_keeps_its_head_where_no_run_has_the_like() -> None:
    published = {"source": "a page", "peak_gib": 1.0, "steps_10_to_100_s": 100.0}
    table = published_table(compare(record(recipe={"published": published})))
    assert table is not None
    assert [(column.head, [value and value.text for value in column.values]) for column in table.columns[1:]] == [
        ("peak, GiB", ["1.000"]),
        ("published", ["1.000"]),
        ("differs", ["+0.00%"]),
        ("steps 10 to 100, s", [None]),
        ("published", ["100.0"]),
    ]
