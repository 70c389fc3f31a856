from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.planning.timeline import Lane, LaneSpan, Timeline
from lowtide.report.perfetto import to_perfetto, write_perfetto
from tests.runtime.session_samples import CHUNK_BYTES, Streaming

TIMELINE = Streaming().timeline(is_emulated=True)


def events_of(timeline: Timeline, kind: str) -> list[dict[str, Any]]:
    record: Any = to_perfetto(timeline)
    return [event for event in record["traceEvents"] if event["ph"] == kind]


def track_names(timeline: Timeline) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events_of(timeline, "M")
        if event["name"] == "thread_name"
    }


def test_every_span_is_an_event_on_the_track_of_its_lane_in_microseconds() -> None:
    names = track_names(TIMELINE)
    found = [event for event in events_of(TIMELINE, "X") if names[event["pid"], event["tid"]] in set(Lane)]
    assert len(found) == len(TIMELINE.spans)
    for event, span in zip(found, TIMELINE.spans, strict=True):
        assert names[event["pid"], event["tid"]] == span.lane.value
        assert event["name"] == span.name
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(span.duration_s * 1e6, abs=2e-3)
        assert event["args"]["step"] == span.step
        assert event["args"]["phase"] == span.phase
        assert event["args"].get("bytes", 0) == span.num_bytes
        assert event["args"].get("reason") == (span.reason.value if span.reason else None)


def test_chunks_are_tracks_of_another_process() -> None:
    names = track_names(TIMELINE)
    chunks = {name: place for place, name in names.items() if "/" in name}
    assert set(chunks) == {span.chunk for span in TIMELINE.residency}
    assert {process for process, _ in chunks.values()} == {2}
    held = [event for event in events_of(TIMELINE, "X") if event["pid"] == 2]
    assert len(held) == len(TIMELINE.residency)
    assert {event["name"] for event in held} == {"fetched", "in use", "resident"}
    processes = {
        event["pid"]: event["args"]["name"] for event in events_of(TIMELINE, "M") if event["name"] == "process_name"
    }
    assert processes == {1: "session (emulated device)", 2: "chunks on the emulated device"}
    on_gpu = events_of(replace(TIMELINE, is_emulated=False), "M")
    assert on_gpu[0]["args"] == {"name": "session (device)"}


def test_the_counter_follows_the_bytes_of_chunks() -> None:
    counter = events_of(TIMELINE, "C")
    assert [event["args"]["bytes"] for event in counter] == [size for _, size in TIMELINE.device_chunk_bytes()]
    assert max(event["args"]["bytes"] for event in counter) == 6 * CHUNK_BYTES
    assert all(before["ts"] < after["ts"] for before, after in pairwise(counter))


def test_steps_are_as_long_as_their_computation_and_do_not_overlap() -> None:
    steps = [event for event in events_of(TIMELINE, "X") if event["cat"] == "step"]
    assert [event["name"] for event in steps] == ["step 0", "step 1", "step 2"]
    assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-3 for before, after in pairwise(steps))


def test_waits_have_a_category_of_their_own_and_nothing_is_unnamed() -> None:
    rest = LaneSpan(step=0, lane=Lane.COMPUTE, name="", phase="forward", start_s=0, end_s=1)
    timeline = Timeline(spans=(rest, replace(rest, name="wait:a")), residency=(), is_emulated=False)
    rest_event, wait_event = (event for event in events_of(timeline, "X") if event["cat"] != "step")
    assert rest_event["name"] == "(rest of the model)"
    assert (wait_event["name"], wait_event["cat"]) == ("wait:a", "wait")


@given(st.lists(st.floats(0, 4000), min_size=2, max_size=30, unique=True))
def test_spans_that_touch_still_touch(times: list[float]) -> None:
    spans = tuple(
        LaneSpan(step=0, lane=Lane.TO_HOST, name="a", phase="forward", start_s=start_s, end_s=end_s)
        for start_s, end_s in pairwise(sorted(times))
    )
    events = events_of(Timeline(spans=spans, residency=(), is_emulated=False), "X")
    for before, after in pairwise(events):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-5)


def test_the_file_is_json_and_its_folder_is_made(tmp_path: Path) -> None:
    path = write_perfetto(TIMELINE, tmp_path / "new" / "trace.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record == to_perfetto(TIMELINE)
    assert record["displayTimeUnit"] == "ms"
    assert record["otherData"] == {"producer": "lowtide", "is_emulated": True}
    by_track: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event in record["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 1:
            by_track[event["pid"], event["tid"]].append(event["ts"])
    assert len(by_track) == 5


def test_an_empty_timeline_has_names_and_nothing_else() -> None:
    empty = Timeline(spans=(), residency=(), is_emulated=False)
    record: Any = to_perfetto(empty)
    assert {event["ph"] for event in record["traceEvents"]} == {"M"}
