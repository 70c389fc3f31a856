from __future__ import annotations

import copy
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadRecordError
from lowtide.tracing.step_trace import Allocation, Category, Event, Op, Phase, StepTrace, Target
from lowtide.tracing.trace_json import load_trace, save_trace, trace_from_dict, trace_to_dict
from tests.tracing.samples import tiny_trace, transformer_trace

TEXT = st.text(max_size=6)
SIZE = st.integers(0, 2**62)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def _targets() -> st.SearchStrategy[Target]:
    sizes = {"context_bytes": SIZE, "capacity_bytes": SIZE}
    return st.builds(Target, card=TEXT, torch_version=TEXT, **sizes, is_context_assumed=st.booleans())


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    """Any trace whose indices exist; nothing in it has to make sense otherwise."""
    ops = draw(
        st.lists(
            st.builds(
                Op,
                name=TEXT,
                module=TEXT,
                source=TEXT,
                phase=st.sampled_from(Phase),
                seconds=st.floats(allow_nan=False, allow_infinity=False),
            ),
            max_size=4,
        )
    )
    num_allocations, num_events = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    op = st.integers(0, len(ops) - 1) if ops else st.nothing()
    moment = st.none() | (st.integers(0, num_events - 1) if num_events else st.none())
    allocation = st.builds(
        Allocation,
        requested_bytes=SIZE,
        bytes=SIZE,
        category=st.sampled_from(Category),
        module=TEXT,
        op=TEXT,
        source=TEXT,
        shape=st.lists(SIZE, max_size=3).map(tuple),
        dtype=TEXT,
        phase=st.none() | st.sampled_from(Phase),
        born=moment,
        died=moment,
        uses=st.lists(op, max_size=3).map(tuple) if ops else st.just(()),
    )
    allocations = draw(st.lists(allocation, min_size=num_allocations, max_size=num_allocations))
    event = st.builds(
        Event,
        allocation=st.integers(0, num_allocations - 1) if num_allocations else st.nothing(),
        is_free=st.booleans(),
        op=st.integers(-1, len(ops) - 1),
        phase=st.sampled_from(Phase),
        allocated_bytes=SIZE,
        reserved_bytes=SIZE,
    )
    events = draw(st.lists(event, min_size=num_events, max_size=num_events)) if num_allocations else []
    if not events:
        allocations = [replace(item, born=None, died=None) for item in allocations]
    return StepTrace(
        model=draw(TEXT),
        origin=draw(st.sampled_from(["predicted", "observed"])),
        target=draw(_targets()),
        settings=draw(st.dictionaries(TEXT, JSON_VALUES, max_size=3)),
        num_parameters=draw(SIZE),
        start_allocated_bytes=draw(SIZE),
        start_reserved_bytes=draw(SIZE),
        ops=tuple(ops),
        allocations=tuple(allocations),
        events=tuple(events),
        notes=tuple(draw(st.lists(TEXT, max_size=2))),
    )


@settings(max_examples=80, deadline=None)
@given(trace=traces())
def test_any_trace_survives_json_unchanged(trace: StepTrace) -> None:
    # `==` lets -0.0 pass for 0.0; repr does not, and it also tells a tuple from a list and an enum from its text.
    back = trace_from_dict(json.loads(json.dumps(trace_to_dict(trace))))
    assert back == trace
    assert repr(back) == repr(trace)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "new/folder/trace.json"])
def test_files_give_back_the_trace(tmp_path: Path, name: str) -> None:
    trace = transformer_trace(layers=3)
    path = save_trace(trace, tmp_path / name)
    assert path == tmp_path / name
    assert load_trace(str(path)) == trace
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_trace_of_an_older_version_says_less_about_itself(tmp_path: Path) -> None:
    trace = replace(tiny_trace(), about={"batch": "2x64 int64", "optimizer": "AdamW"})
    record = trace_to_dict(trace)
    assert trace_from_dict(record).about == trace.about
    del record["about"]
    assert trace_from_dict(record) == replace(trace, about={})
    del record["target"]["is_context_assumed"]
    assert trace_from_dict(record) == replace(trace, about={})


def test_gz_is_compressed_and_the_same_each_time(tmp_path: Path) -> None:
    trace = tiny_trace()
    first, second = (save_trace(trace, tmp_path / f"{name}.json.gz").read_bytes() for name in "ab")
    assert first[:2] == b"\x1f\x8b"
    assert first == second
    assert json.loads(gzip.decompress(first))["model"] == "tiny"


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = save_trace(tiny_trace(), tmp_path / "trace.json")
    broken = replace(tiny_trace(), settings={"dtype": object()})
    with pytest.raises(
        BadRecordError, match=r"trace\.json: <object object .* no form in JSON; keep its numbers finite"
    ):
        save_trace(broken, path)
    assert load_trace(path) == tiny_trace()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_killed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_trace(tiny_trace(), tmp_path / "trace.json")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_trace(transformer_trace(layers=1), path)
    assert load_trace(path) == tiny_trace()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    trace = replace(tiny_trace(), settings={"learning_rate": float("nan")})
    with pytest.raises(BadRecordError, match=r"cannot be written to .*trace\.json"):
        save_trace(trace, tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_numpy_sizes_are_saved_as_numbers(tmp_path: Path) -> None:
    trace = replace(tiny_trace(), num_parameters=np.int64(7))  # type: ignore[arg-type]
    assert load_trace(save_trace(trace, tmp_path / "trace.json")).num_parameters == 7


def test_ten_thousand_ops_stay_small_and_quick(tmp_path: Path) -> None:
    trace = transformer_trace(layers=620)
    assert len(trace.ops) > 10_000
    assert len(trace.events) > 20_000
    start = time.perf_counter()
    path = save_trace(trace, tmp_path / "trace.json")
    back = load_trace(path)
    # About a second is promised; the allowance is for a machine that is busy with other tests.
    assert time.perf_counter() - start < 6.0
    assert path.stat().st_size < 3_000_000
    assert save_trace(trace, tmp_path / "trace.json.gz").stat().st_size < 500_000
    assert back == trace


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, keep: float) -> None:
    path = save_trace(tiny_trace(), tmp_path / name)
    payload = path.read_bytes()
    path.write_bytes(payload[: int(len(payload) * keep)])
    with pytest.raises(
        BadRecordError, match=rf"{name} (is not whole JSON|cannot be decompressed).*save the trace again"
    ):
        load_trace(path)


@pytest.mark.parametrize("payload", [b"\xff\xfe\x00", b"[1, 2", b"NaN", b"[" * 100_000])
def test_what_is_not_json_is_named(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(payload)
    with pytest.raises(BadRecordError, match=r"trace\.json is not whole JSON"):
        load_trace(path)


def test_plain_json_named_gz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_text(json.dumps(trace_to_dict(tiny_trace())))
    with pytest.raises(BadRecordError, match=r"trace\.json\.gz cannot be decompressed \(Not a gzipped file"):
        load_trace(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.json")


Record = dict[str, Any]


def _set(*keys: Any, to: Any) -> Callable[[Record], None]:
    def damage(record: Record) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return damage


DAMAGE: list[tuple[Callable[[Record], Any], str]] = [
    (_set("format", to="something.else"), r"does not say that it is of format 'lowtide\.step_trace'"),
    (
        _set("schema_version", to=2),
        r"its schema version is 2 and this version of lowtide reads 1; trace the step again",
    ),
    (_set("schema_version", to=None), r"its schema version is None"),
    (lambda record: record.pop("events"), r"the record lacks events"),
    (_set("extra", to=1), r"the record has unknown parts extra"),
    (lambda record: record["ops"].pop("seconds"), r"ops lacks seconds"),
    (_set("ops", to=[]), r"ops is '\[\]', expected dict"),
    (_set("model", to=3), r"model is '3', expected str"),
    (_set("num_parameters", to=True), r"num_parameters is 'True', expected int"),
    (_set("target", "context_bytes", to=1.5), r"target\.context_bytes is '1\.5', expected int"),
    (_set("target", "is_context_assumed", to=1), r"target\.is_context_assumed is '1', expected bool"),
    (_set("target", "maker", to="x"), r"target has unknown parts maker"),
    (_set("target", to=[]), r"target is '\[\]', expected dict"),
    (_set("settings", to=[]), r"settings is '\[\]', expected dict"),
    (_set("notes", 0, to=3), r"notes\[0\] is 3, expected str"),
    (_set("about", to="AdamW"), r"about is 'AdamW', expected dict"),
    (_set("about", "batch", to=8), r"about\[0\] is 8, expected str"),
    (_set("strings", 1, to=None), r"strings\[1\] is None, expected str"),
    (_set("shapes", 0, to=[1, "2"]), r"shapes\[0\] is \[1, '2'\], expected a list of sizes"),
    (_set("ops", "name", 1, to=9999), r"ops\.name\[1\] is 9999, expected the index of a string"),
    (_set("ops", "name", 1, to=-1), r"ops\.name\[1\] is -1, expected the index of a string"),
    (_set("ops", "phase", 0, to=0), r"ops\.phase\[0\] is 0, expected the index of a phase"),
    (_set("ops", "seconds", 0, to="1"), r"ops\.seconds\[0\] is '1', expected float"),
    (lambda record: record["events"]["op"].pop(), r"the columns of events have different lengths .*'op': 5"),
    (_set("events", "allocation", 0, to=99), r"events\.allocation\[0\] is 99, expected an index from 0 to 4"),
    (_set("events", "is_free", 0, to=2), r"events\.is_free\[0\] is 2, expected an index from 0 to 1"),
    (_set("events", "op", 0, to=-2), r"events\.op\[0\] is -2, expected an index from -1 to 3"),
    (_set("events", "allocated_change", 2, to=0.5), r"events\.allocated_change\[2\] is 0\.5, expected int"),
    (_set("allocations", "born", 2, to=6), r"allocations\.born\[2\] is 6, expected an index from 0 to 5"),
    (_set("allocations", "category", 0, to=0), r"allocations\.category\[0\] is 0, expected the index of a category"),
    (_set("allocations", "shape", 0, to=77), r"allocations\.shape\[0\] is 77, expected the index of a shape"),
    (lambda record: record["uses"].pop(), r"num_uses sums to 4 and there are 3 uses"),
    (_set("uses", 0, to=4), r"uses\[0\] is 4, expected an index from 0 to 3"),
    (_set("uses", to={}), r"uses is '\{\}', expected list"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damage_is_named(tmp_path: Path, damage: Callable[[Record], Any], message: str) -> None:
    record: Record = copy.deepcopy(trace_to_dict(tiny_trace()))
    assert trace_from_dict(record) == tiny_trace()
    damage(record)
    path = tmp_path / "hurt.json"
    path.write_text(json.dumps(record))
    with pytest.raises(BadRecordError, match=rf"hurt\.json cannot be read as a trace: .*{message}"):
        load_trace(path)


def test_the_samples_add_up() -> None:
    tiny = tiny_trace()
    mib = [value // 2**20 for value in tiny.curve.tolist()]
    assert mib == [12, 15, 19, 15, 18, 15, 12]
    for trace in (tiny, transformer_trace(layers=3)):
        assert np.array_equal(sum(trace.stacked.values()), trace.curve)
        assert sum(trace.at_peak.values()) == trace.peak_bytes
