from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.report.phase_runs import PhaseRun, aligned_positions, phase_axis, phase_runs, run_peak
from lowtide.tracing.step_trace import Category, Phase, StepTrace
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
