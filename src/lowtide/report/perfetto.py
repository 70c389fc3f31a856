"""A session's timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Two processes: the lanes of the session with its steps above them, and the chunks on the device, one track each, with
their bytes as a counter. Times are microseconds, as the format wants them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from lowtide.plain_text import Plain
from lowtide.planning.timeline import Lane, LaneSpan, Timeline, lanes_that_work

_SESSION, _CHUNKS = 1, 2
_STEPS_TRACK = 1
_LANE_TRACKS = {lane: track for track, lane in enumerate(Lane, start=_STEPS_TRACK + 1)}

Event = dict[str, Plain]


def to_perfetto(timeline: Timeline) -> dict[str, Plain]:
    """The timeline in the JSON object form of the Chrome trace format; `json.dumps` makes a file of it."""
    device = "emulated device" if timeline.is_emulated else "device"
    events: list[Plain] = [
        *_named(
            _SESSION,
            f"session ({device})",
            {_STEPS_TRACK: "steps"} | {_LANE_TRACKS[lane]: lane for lane in lanes_that_work(timeline.lanes)},
        ),
        *_step_events(timeline),
        *map(_lane_event, timeline.spans),
        *_chunk_events(timeline, f"chunks on the {device}"),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "lowtide", "is_emulated": timeline.is_emulated},
    }


def write_perfetto(timeline: Timeline, path: str | os.PathLike[str]) -> Path:
    """Write `to_perfetto` to a file and return its path; folders that do not exist are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_perfetto(timeline), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    target.write_text(text, encoding="utf-8")
    return target


def _lane_event(span: LaneSpan) -> Event:
    arguments: Event = {"step": span.step, "phase": span.phase}
    if span.num_bytes:
        arguments["bytes"] = span.num_bytes
    if span.reason is not None:
        arguments["reason"] = span.reason.value
    category = "wait" if span.waits_for is not None else str(span.reason or span.phase)
    return _complete(_SESSION, _LANE_TRACKS[span.lane], span.name, category, span.start_s, span.end_s, arguments)


def _step_events(timeline: Timeline) -> Iterator[Event]:
    """One event for each step, as long as its computation: copies of neighbouring steps overlap, computation does not."""
    for step in timeline.steps:
        compute = [span for span in timeline.spans if span.step == step and span.lane is Lane.COMPUTE]
        if compute:
            start_s, end_s = min(span.start_s for span in compute), max(span.end_s for span in compute)
            yield _complete(_SESSION, _STEPS_TRACK, f"step {step}", "step", start_s, end_s, {})


def _chunk_events(timeline: Timeline, process: str) -> Iterator[Event]:
    tracks: dict[str, int] = {}
    for span in timeline.residency:
        tracks.setdefault(span.chunk, len(tracks) + 1)
    yield from _named(_CHUNKS, process, {track: chunk for chunk, track in tracks.items()})
    for span in timeline.residency:
        arguments: Event = {"chunk": span.chunk, "group": span.group, "bytes": span.num_bytes}
        yield _complete(_CHUNKS, tracks[span.chunk], span.state, span.state, span.start_s, span.end_s, arguments)
    for time_s, held_bytes in timeline.device_chunk_bytes():
        yield {
            "ph": "C",
            "pid": _CHUNKS,
            "name": "device chunk bytes",
            "ts": _microseconds(time_s),
            "args": {"bytes": held_bytes},
        }


def _complete(
    process: int, track: int, name: str, category: str, start_s: float, end_s: float, arguments: Event
) -> Event:
    start = _microseconds(start_s)
    # The end is rounded, not the length: spans that touch must still touch, or viewers nest one in the other.
    length = round(_microseconds(end_s) - start, 3)
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        # Viewers show an empty name as nothing at all; the group of what lies outside all blocks has one.
        "name": name or "(rest of the model)",
        "cat": category,
        "ts": start,
        "dur": length,
        "args": arguments,
    }


def _named(process: int, name: str, tracks: dict[int, str]) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for track, track_name in tracks.items():
        yield _metadata("thread_name", process, track, {"name": str(track_name)})
        yield _metadata("thread_sort_index", process, track, {"sort_index": track})


def _metadata(kind: str, process: int, track: int, arguments: Event) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": arguments}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
