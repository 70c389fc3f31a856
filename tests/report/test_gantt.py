from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.planning.timeline import Lane, LaneSpan, Reason, ResidencySpan, Timeline
from lowtide.report.charts import gantt_data, kind_of, recent
from tests.runtime.session_samples import Streaming

TIMELINE = Streaming().timeline(is_emulated=True)


def data_of(timeline: Timeline, **options: Any) -> Any:
    return json.loads(json.dumps(gantt_data(timeline, **options), allow_nan=False))


def test_every_span_keeps_its_lane_name_kind_bytes_and_times() -> None:
    data = data_of(TIMELINE)
    assert [lane["lane"] for lane in data["lanes"]] == ["compute", "to device", "to host", "host update"]
    names = data["names"]
    for lane in data["lanes"]:
        mine = sorted((span for span in TIMELINE.spans if span.lane == lane["lane"]), key=lambda span: span.start_s)
        assert [names[name] for name in lane["name"]] == [span.name.removeprefix("wait:") for span in mine]
        assert [names[kind] for kind in lane["kind"]] == [kind_of(span) for span in mine]
        assert [names[phase] for phase in lane["phase"]] == [span.phase for span in mine]
        assert lane["bytes"] == [span.num_bytes for span in mine]
        assert lane["step"] == [span.step for span in mine]
        assert lane["from"] == pytest.approx([span.start_s * 1e6 for span in mine], abs=0.051)
        assert lane["to"] == pytest.approx([span.end_s * 1e6 for span in mine], abs=0.051)


def test_residency_points_at_its_row() -> None:
    data = data_of(TIMELINE)
    residency, names = data["residency"], data["names"]
    spans = sorted(TIMELINE.residency, key=lambda span: span.start_s)
    assert [names[residency["chunk"][row]] for row in residency["row"]] == [span.chunk for span in spans]
    assert [names[residency["group"][row]] for row in residency["row"]] == [span.group for span in spans]
    assert [names[kind] for kind in residency["kind"]] == [span.state for span in spans]
    assert residency["bytes"] == [span.num_bytes for span in spans]


def test_rows_stand_in_the_order_asked_for_and_groups_together() -> None:
    def held(chunk: str, group: str, start_s: float) -> ResidencySpan:
        return ResidencySpan(chunk=chunk, group=group, start_s=start_s, end_s=9, num_bytes=1, state="in use")

    spans = (held("a/0", "a", 0), held("b/0", "b", 1), held("a/1", "a", 2), held("c/0", "c", 3))
    timeline = Timeline(spans=(), residency=spans, is_emulated=False)

    def rows(**options: Any) -> list[str]:
        data = data_of(timeline, **options)
        return [data["names"][chunk] for chunk in data["residency"]["chunk"]]

    assert rows() == ["a/0", "a/1", "b/0", "c/0"]
    assert rows(chunks=["c/0", "b/0"]) == ["c/0", "b/0", "a/0", "a/1"]


def test_the_curve_and_the_end_are_in_microseconds() -> None:
    data = data_of(TIMELINE)
    assert data["end"] == pytest.approx(TIMELINE.end_s * 1e6, abs=0.1)
    assert [size for _, size in data["curve"]] == [size for _, size in TIMELINE.device_chunk_bytes()]
    assert data["steps"][0] == [0, 0]
    assert data["isEmulated"] is True


def test_a_long_timeline_is_cut_to_its_last_whole_steps() -> None:
    long = Streaming(num_steps=8).timeline()
    total = len(long.spans) + len(long.residency)
    part = recent(long, total // 2)
    assert part.steps == (4, 5, 6, 7) or part.steps == (5, 6, 7)
    assert len(part.spans) + len(part.residency) <= total // 2
    more = long.last_steps(len(part.steps) + 1)
    assert len(more.spans) + len(more.residency) > total // 2
    assert recent(long, 1).steps == (7,)
    assert recent(long, total) == long
    data = data_of(long, max_spans=total // 2)
    assert data["numSteps"] == 8
    assert [step for step, _ in data["steps"]] == list(part.steps)
    assert min(time for lane in data["lanes"] for time in lane["from"]) == 0


@given(st.integers(1, 2000))
def test_a_part_is_never_over_its_bound_unless_one_step_is(max_spans: int) -> None:
    long = Streaming(num_blocks=3, num_steps=6).timeline()
    part = recent(long, max_spans)
    assert part.steps == long.steps[-len(part.steps) :]
    assert len(part.spans) + len(part.residency) <= max_spans or len(part.steps) == 1


def test_a_prefetch_for_the_next_step_does_not_move_its_beginning() -> None:
    copy = LaneSpan(step=1, lane=Lane.TO_DEVICE, name="a/0", phase="forward", start_s=1, end_s=2)
    work = replace(copy, lane=Lane.COMPUTE, name="a", start_s=3, end_s=4)
    first = replace(work, step=0, start_s=0, end_s=2.5)
    assert Timeline(spans=(first, copy, work), residency=(), is_emulated=False).step_starts() == ((0, 0), (1, 3))


def test_kinds() -> None:
    span = LaneSpan(step=0, lane=Lane.COMPUTE, name="wait:a", phase="forward", start_s=0, end_s=1)
    assert kind_of(span) == "waiting"
    assert kind_of(replace(span, name="a")) == "forward"
    assert kind_of(replace(span, lane=Lane.TO_HOST, name="a/0", reason=Reason.WRITE_BACK)) == "write back"


def test_an_empty_timeline_is_empty_data() -> None:
    data = data_of(Timeline(spans=(), residency=(), is_emulated=False))
    assert (data["end"], data["steps"], data["curve"], data["names"]) == (0, [], [], [])
