from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.report.timeline import (
    MAX_POINTS,
    PhaseRun,
    aligned_positions,
    kept_positions,
    phase_axis,
    phase_runs,
    run_peak,
    timeline_data,
)
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, observed_like, tiny_trace, transformer_trace


def trace_of(*phases: tuple[Phase, int]) -> StepTrace:
    """A step with so many events in each phase, each an allocation of 512 bytes."""
    builder = TraceBuilder()
    for phase, num_events in phases:
        builder.enter(phase)
        for _ in range(num_events):
            builder.allocate(512, Category.TEMPORARIES)
    return builder.build()


PHASES = st.lists(st.tuples(st.sampled_from(Phase), st.integers(1, 30)), min_size=1, max_size=12)


def test_runs_of_a_step_counted_by_hand() -> None:
    runs = phase_runs(tiny_trace())
    assert runs == (
        PhaseRun(phase=Phase.FORWARD, first=0, last=1),
        PhaseRun(phase=Phase.LOSS, first=2, last=3),
        PhaseRun(phase=Phase.BACKWARD, first=4, last=5),
        PhaseRun(phase=Phase.UPDATE, first=6, last=6),
    )
    assert [run_peak(tiny_trace(), run) for run in runs] == [1, 2, 4, 6]


def test_a_step_without_events_is_one_run() -> None:
    assert phase_runs(TraceBuilder().build()) == (PhaseRun(phase=Phase.FORWARD, first=0, last=0),)


@given(PHASES)
def test_runs_cover_every_position_and_never_repeat_a_phase(phases: list[tuple[Phase, int]]) -> None:
    trace = trace_of(*phases)
    runs = phase_runs(trace)
    assert [p for run in runs for p in range(run.first, run.last + 1)] == list(range(len(trace.events) + 1))
    assert all(a.phase is not b.phase for a, b in pairwise(runs))
    assert all(trace.events[p - 1].phase is run.phase for run in runs for p in range(max(run.first, 1), run.last + 1))


def test_a_trace_aligned_onto_itself_stays_where_it_is() -> None:
    trace = transformer_trace(layers=2)
    assert np.allclose(aligned_positions(trace, trace), np.arange(len(trace.events) + 1))


def test_each_phase_lands_inside_the_same_phase() -> None:
    predicted = transformer_trace(layers=4)
    observed = observed_like(predicted)
    assert len(observed.events) < len(predicted.events)
    places = aligned_positions(observed, predicted)
    for mine, theirs in zip(phase_runs(observed), phase_runs(predicted), strict=True):
        assert places[mine.first] >= theirs.first - 0.5
        assert places[mine.last] <= theirs.last + 0.5


def test_accumulation_matches_the_second_forward_with_the_second() -> None:
    f, b = Phase.FORWARD, Phase.BACKWARD
    short, long = trace_of((f, 2), (b, 2), (f, 2), (b, 2)), trace_of((f, 20), (b, 20), (f, 20), (b, 20))
    places = aligned_positions(short, long)
    for mine, theirs in zip(phase_runs(short), phase_runs(long), strict=True):
        assert theirs.first - 0.5 <= places[mine.first] <= places[mine.last] <= theirs.last + 0.5


def test_a_phase_the_other_lacks_collapses_between_its_neighbours() -> None:
    mine = trace_of((Phase.FORWARD, 4), (Phase.LOSS, 3), (Phase.BACKWARD, 4))
    places = aligned_positions(mine, trace_of((Phase.FORWARD, 10), (Phase.BACKWARD, 10)))
    assert places[5:8] == pytest.approx([10.5, 10.5, 10.5])  # the loss, at the edge of forward and backward


@settings(max_examples=60)
@given(PHASES, PHASES)
def test_alignment_never_runs_backwards_or_off_the_axis(
    mine: list[tuple[Phase, int]], theirs: list[tuple[Phase, int]]
) -> None:
    trace, onto = trace_of(*mine), trace_of(*theirs)
    places = aligned_positions(trace, onto)
    assert len(places) == len(trace.events) + 1
    assert (np.diff(places) >= 0).all()
    assert places[0] >= 0
    assert places[-1] <= len(onto.events)


def test_the_axis_widens_a_short_phase_and_keeps_the_ends() -> None:
    trace = trace_of((Phase.FORWARD, 480), (Phase.LOSS, 20), (Phase.BACKWARD, 500))
    axis = phase_axis(trace, least_share=0.1)
    assert axis.widened
    # 10% of 1000 for the loss; the other two share 900 as 480.5 to 499.5.
    assert axis.place([0, 480.5, 500.5, 1000]) == pytest.approx([0, 900 * 480.5 / 980, 900 * 480.5 / 980 + 100, 1000])


def test_the_axis_is_true_to_scale_when_no_phase_is_short_or_runs_are_many() -> None:
    even = trace_of((Phase.FORWARD, 10), (Phase.LOSS, 10), (Phase.BACKWARD, 10))
    assert not phase_axis(even).widened
    many = trace_of(*[(Phase.FORWARD, 1), (Phase.BACKWARD, 99)] * 5)
    assert not phase_axis(many).widened


@given(PHASES)
def test_the_axis_is_monotone(phases: list[tuple[Phase, int]]) -> None:
    trace = trace_of(*phases)
    axis = phase_axis(trace)
    places = axis.place(np.arange(len(trace.events) + 1))
    assert (np.diff(places) > 0).all()
    assert (places[0], places[-1]) == pytest.approx((0, len(trace.events)))


def random_step(seed: int, num_events: int) -> StepTrace:
    """A step that allocates and frees at random through the four phases."""
    random = np.random.default_rng(seed)
    builder = TraceBuilder()
    builder.allocate(4096, Category.WEIGHTS)
    alive: list[int] = []
    for index in range(num_events):
        phase = list(Phase)[4 * index // num_events]
        builder.enter(phase)
        if alive and random.random() < 0.5:
            builder.free(alive.pop(int(random.integers(len(alive)))))
        else:
            alive.append(builder.allocate(512 * int(random.integers(1, 2000)), Category.ACTIVATIONS))
    return builder.build()


def test_few_points_are_all_kept() -> None:
    trace = transformer_trace(layers=2)
    assert kept_positions(trace).tolist() == list(range(len(trace.events) + 1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), num_events=st.integers(50, 1500), limit=st.integers(40, 300))
def test_the_bound_holds_and_every_summit_survives(seed: int, num_events: int, limit: int) -> None:
    trace = random_step(seed, num_events)
    kept = kept_positions(trace, limit=limit)
    assert len(kept) <= limit
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(trace.events))
    assert trace.peak_event + 1 in kept
    assert trace.curve[kept].max() == trace.peak_bytes
    for run in phase_runs(trace):
        inside = kept[(kept >= run.first) & (kept <= run.last)]
        assert trace.curve[inside].max() == trace.curve[run.first : run.last + 1].max()


def test_a_spike_of_one_event_in_a_hundred_thousand_survives() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    for index in range(50_000):
        size = 512 * (10_000 if index == 31_234 else 1 + index % 3)
        builder.free(builder.allocate(size, Category.TEMPORARIES))
    trace = builder.build()
    kept = kept_positions(trace)
    assert len(kept) <= MAX_POINTS
    assert trace.peak_event == 2 * 31_234
    assert trace.peak_event + 1 in kept
    assert np.diff(kept).max() < 150


def test_every_spike_survives_not_only_the_highest() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    spikes = range(123, 5000, 250)
    for index in range(5000):
        size = 512 * (100 + index // 100 if index in spikes else 1 + index % 3)
        builder.free(builder.allocate(size, Category.TEMPORARIES))
    kept = set(kept_positions(builder.build(), limit=400).tolist())
    assert {2 * index + 1 for index in spikes} <= kept


def test_phases_that_alternate_by_the_event_leave_room_for_the_curve() -> None:
    builder = TraceBuilder()
    for index in range(5000):
        builder.enter(Phase.FORWARD if index % 2 else Phase.BACKWARD)
        builder.allocate(512, Category.ACTIVATIONS)
    trace = builder.build()
    kept = kept_positions(trace, limit=400)
    assert len(kept) <= 400
    assert np.diff(kept).max() < 100


@pytest.mark.parametrize("limit", [20, 100, 4000])
def test_kept_points_are_states_of_the_step(limit: int) -> None:
    trace = transformer_trace(layers=8)
    kept = kept_positions(trace, limit=limit)
    assert sum(int(values[kept[3]]) for values in trace.stacked.values()) == trace.curve[kept[3]]


def data_of(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """As the page receives it: through JSON."""
    record: dict[str, Any] = json.loads(json.dumps(timeline_data(*args, **kwargs)))
    return record


def test_columns_give_back_the_curve_by_category() -> None:
    trace = transformer_trace(layers=3)
    data = data_of(trace)
    assert np.cumsum(data["x"]).tolist() == list(range(len(trace.events) + 1))
    for name, column in zip(data["categories"], data["stack"], strict=True):
        [category] = [category for category in trace.stacked if category.value == name]
        assert np.cumsum(column).tolist() == trace.stacked[category].tolist()
    reserved = [trace.start_reserved_bytes, *(event.reserved_bytes for event in trace.events)]
    assert np.cumsum(data["reserved"]).tolist() == reserved


def test_the_peak_is_named_and_among_the_points() -> None:
    trace = transformer_trace(layers=60)
    data = data_of(trace, max_points=200)
    assert data["peak"] == {
        "position": trace.peak_event + 1,
        "bytes": trace.peak_bytes,
        "phase": "loss",
        "place": "(outside the model) aten._log_softmax",
        "source": "loss.py:13",
    }
    positions = np.cumsum(data["x"])
    assert len(positions) <= 200
    index = positions.tolist().index(trace.peak_event + 1)
    assert sum(int(np.cumsum(column)[index]) for column in data["stack"]) == trace.peak_bytes


def test_each_point_knows_its_op_and_its_tensor() -> None:
    trace = tiny_trace()
    data = data_of(trace)
    assert data["change"] == [change * MiB for change in (0, 3, 4, -4, 3, -3, -3)]
    assert [data["categories"][index] for index in data["category"][1:4]] == [
        "activations",
        "temporaries",
        "temporaries",
    ]
    assert data["instants"][data["instant"][2]] == ["aten._log_softmax", "", "tiny.py:20"]
    assert data["tensors"][data["tensor"][5]] == ["head aten.mm", "[768, 1024] float32"]  # freed in the backward


def test_the_observed_line_keeps_its_values_and_lands_by_phase() -> None:
    trace = transformer_trace(layers=3)
    observed = observed_like(trace)
    line = data_of(trace, observed=observed)["observed"]
    assert np.cumsum(line["bytes"]).tolist() == observed.curve.tolist()
    assert np.allclose(line["x"], aligned_positions(observed, trace), atol=0.006)
    assert line["peak"]["bytes"] == observed.peak_bytes
    assert data_of(trace)["observed"] is None


def test_observed_points_are_bounded_and_keep_the_peak() -> None:
    trace = transformer_trace(layers=60)
    observed = observed_like(trace)
    line = data_of(trace, observed=observed, max_points=150)["observed"]
    assert len(line["x"]) == len(line["bytes"]) <= 150
    assert np.cumsum(line["bytes"]).max() == observed.peak_bytes


def test_a_large_step_stays_small() -> None:
    trace = transformer_trace(layers=620)
    text = json.dumps(timeline_data(trace, observed=replace(trace, origin="observed")), separators=(",", ":"))
    assert len(text) < 700_000
