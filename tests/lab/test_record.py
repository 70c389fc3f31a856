"""Records: what is written is what is read, and what is not a record is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.errors import BadRecordError
from lowtide.lab.record import (
    MemoryFigures,
    Outcome,
    PredictedFigures,
    RunRecord,
    SpeedFigures,
    Surroundings,
    json_text,
    read_record,
    write_record,
)

SURROUNDINGS = Surroundings(
    date="2026-11-15T12:00:00+00:00",
    commit="abc",
    device="a card",
    torch="2.13",
    lowtide="0.1",
    python="3.11",
    platform="linux",
)
WHOLE = RunRecord(
    name="peak_memory/control",
    outcome=Outcome.FINISHED,
    surroundings=SURROUNDINGS,
    recipe={"model": "gpt-tiny", "plan": {"weights": {"*": "resident"}, "list": [1, None, {"deep": True}]}},
    parameters=10,
    losses=(2.0, 1.5),
    evaluation_loss=1.25,
    evaluations=((1, 1.75),),
    memory=MemoryFigures(
        peak_bytes=30,
        by_phase={"forward": 10, "backward": 30, "update": 30},
        reserved_bytes=64,
        timeline=(("forward", 10), ("backward", 30)),
    ),
    predicted=PredictedFigures(peak_bytes=31, peak_phase="backward", at_peak={"weights": 31}),
    speed=SpeedFigures(step_s=(3.0, 1.0, 1.0), samples_per_step=4),
    session={"moved": [{"bytes": 3}]},
    remarks=("one",),
)


@pytest.mark.parametrize(
    "record",
    [WHOLE, RunRecord(name="a", outcome=Outcome.KILLED, surroundings=SURROUNDINGS, recipe={}, message="signal 9")],
    ids=["whole", "killed"],
)
def test_what_is_written_is_read(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "record.json"
    write_record(record, path)
    assert read_record(path) == record
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_the_first_of_equal_phases_is_the_peak() -> None:
    assert WHOLE.memory is not None
    assert WHOLE.memory.peak_phase == "backward"


def test_speeds() -> None:
    speed = SpeedFigures(step_s=(5.0, *[0.5] * 109), samples_per_step=4)
    assert speed.samples_per_s == pytest.approx(4 * 110 / 59.5)
    assert speed.warm_samples_per_s() == pytest.approx(8.0)
    assert speed.between_s() == pytest.approx(45.0)
    assert speed.samples_per_s_with_evaluation is None
    evaluated = SpeedFigures(step_s=(1.0,) * 4, samples_per_step=4, evaluation_s=4.0)
    assert evaluated.samples_per_s_with_evaluation == pytest.approx(2.0)
    short = SpeedFigures(step_s=(5.0, 0.5), samples_per_step=4)
    assert short.warm_samples_per_s() is None
    assert short.between_s() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.pop("name"), "missing key 'name'"),
        (lambda plain: plain.update(outcome="happy"), "outcome"),
        (lambda plain: plain.update(schema="other/1"), "schema is 'other/1'"),
        (lambda plain: plain.update(recipe=[1]), "must be mappings"),
        (lambda plain: plain.update(unknown=1), "unknown key 'unknown'"),
        (lambda plain: plain["memory"].update(peak_bytes="much"), "memory.peak_bytes"),
    ],
)
def test_what_is_no_record_is_named(change: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(WHOLE, path)
    plain = json.loads(path.read_text())
    assert callable(change)
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(BadRecordError) as caught:
        read_record(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": null}'])
def test_no_json_of_ours(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(BadRecordError, match="record.json"):
        read_record(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match="none.json"):
        read_record(tmp_path / "none.json")


def test_a_file_has_a_line_for_each_field_and_row() -> None:
    rows = [{"name": "a", "losses": [1.0, 0.5]}, {"name": "b"}]
    plain = {"schema": "s/1", "about": {"torch": "2.13"}, "none": [], "rows": rows, "by_name": {"a": rows[0], "b": {}}}
    text = json_text(plain)
    assert text.splitlines() == [
        '{"schema":"s/1",',
        '"about":{"torch":"2.13"},',
        '"none":[],',
        '"rows":[',
        '{"name":"a","losses":[1.0,0.5]},',
        '{"name":"b"}',
        "],",
        '"by_name":{',
        '"a":{"name":"a","losses":[1.0,0.5]},',
        '"b":{}',
        "}}",
    ]
    assert json.loads(text) == plain
    assert json.loads(json_text({})) == {}
