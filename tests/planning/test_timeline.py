from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.planning.timeline import Lane, LaneSpan, Overlap, Reason, ResidencySpan, Timeline
from tests.runtime.session_samples import CHUNK_BYTES, MS, Streaming


def compute(name: str, start_s: float, end_s: float, *, phase: str = "forward", step: int = 0) -> LaneSpan:
    return LaneSpan(step=step, lane=Lane.COMPUTE, name=name, phase=phase, start_s=start_s, end_s=end_s)


def fetch(name: str, start_s: float, end_s: float, *, step: int = 0) -> LaneSpan:
    return LaneSpan(
        step=step,
        lane=Lane.TO_DEVICE,
        name=name,
        phase="forward",
        start_s=start_s,
        end_s=end_s,
        num_bytes=1,
        reason=Reason.FETCH_WEIGHTS,
    )


def timeline(*spans: LaneSpan, residency: tuple[ResidencySpan, ...] = ()) -> Timeline:
    return Timeline(spans=spans, residency=residency, is_emulated=True)


def resident(chunk: str, group: str, start_s: float, end_s: float, num_bytes: int = 1) -> ResidencySpan:
    return ResidencySpan(chunk=chunk, group=group, start_s=start_s, end_s=end_s, num_bytes=num_bytes, state="in use")


def test_a_prefetched_copy_leads_the_end_of_the_computation_before_it() -> None:
    recorded = timeline(compute("a", 0, 4), fetch("b/0", 1, 2), fetch("b/1", 2, 3), compute("b", 4, 8))
    assert recorded.overlaps() == (Overlap("a", "b", 3.0),)
    assert recorded.first_late_copy() is None


def test_a_copy_on_demand_is_late() -> None:
    recorded = timeline(compute("a", 0, 4), fetch("b/0", 4.5, 6), compute("wait:b", 4, 6), compute("b", 6, 8))
    assert recorded.overlaps() == (Overlap("a", "b", -0.5),)
    assert recorded.first_late_copy() == Overlap("a", "b", -0.5)


def test_a_copy_that_begins_inside_the_use_it_serves_is_seen_as_late() -> None:
    recorded = timeline(compute("a", 0, 4), compute("b", 4, 8), fetch("b", 5, 6))
    assert recorded.first_late_copy() == Overlap("a", "b", -1.0)


def test_a_copy_asked_for_inside_an_enclosing_module_is_late() -> None:
    recorded = timeline(compute("", 0, 10), compute("wait:b", 2, 4), fetch("b/0", 2.5, 4), compute("b", 4, 8))
    assert recorded.overlaps() == (Overlap("", "b", -0.5),)


def test_uses_of_what_is_on_the_device_already_have_no_entry() -> None:
    recorded = timeline(
        compute("a", 0, 4), fetch("b/0", 1, 2), compute("b", 4, 8), compute("b", 8, 16, phase="backward")
    )
    assert recorded.overlaps() == (Overlap("a", "b", 3.0),)


def test_the_first_use_of_a_step_says_nothing_about_prefetching() -> None:
    recorded = timeline(compute("b", 0, 4), fetch("a/0", 9, 10, step=1), compute("a", 10, 12, step=1))
    assert recorded.overlaps() == ()


def test_device_updates_are_not_uses() -> None:
    recorded = timeline(
        compute("b", 0, 4, phase="backward"),
        compute("b/0", 4, 6, phase="update"),
        fetch("a/0", 5, 7),
        compute("a", 7, 9, phase="backward"),
    )
    assert recorded.first_late_copy() == Overlap("b", "a", -1.0)


def test_residency_says_which_group_a_chunk_belongs_to() -> None:
    recorded = timeline(
        compute("a", 0, 4),
        fetch("odd/7", 1, 2),
        compute("odd/7", 4, 5),
        residency=(resident("odd/7", "odd/7", 1, 5),),
    )
    assert recorded.overlaps() == (Overlap("a", "odd/7", 3.0),)


def test_a_streamed_model_overlaps_every_copy() -> None:
    recorded = Streaming().timeline()
    found = recorded.overlaps()
    # Forward and backward fetch 12 blocks each; embedding and head are resident.
    assert len(found) == 3 * (12 + 12)
    assert [overlap.group for overlap in found[:3]] == ["embed", "layers.0", "layers.1"]
    assert recorded.first_late_copy() is None


def test_without_prefetch_every_copy_is_late_and_exposed() -> None:
    recorded = Streaming(prefetch=False).timeline()
    assert all(overlap.lead_s <= 0 for overlap in recorded.overlaps())
    assert recorded.first_late_copy() == recorded.overlaps()[0]
    assert recorded.exposed_copy_s() > Streaming().timeline().exposed_copy_s()


def test_exposed_time_is_the_sum_of_the_waits() -> None:
    recorded = timeline(compute("wait:a", 0, 1.5), compute("a", 1.5, 4), compute("wait:", 4, 4.25), compute("", 5, 6))
    assert recorded.exposed_copy_s() == 1.75
    assert [span.waits_for for span in recorded.spans] == ["a", None, "", None]
    assert fetch("wait:a", 0, 1).waits_for is None


def test_the_last_steps_begin_with_their_first_computation() -> None:
    recorded = Streaming(num_steps=4).timeline()
    last = recorded.last_steps(2)
    assert last.steps == (2, 3)
    begins_s = min(span.start_s for span in recorded.spans if span.step == 2 and span.lane is Lane.COMPUTE)
    assert min(span.start_s for span in last.residency) == begins_s
    assert last.end_s == recorded.end_s
    assert recorded.last_steps(9) == recorded
    with pytest.raises(ConfigError, match="a timeline of 0 steps shows nothing"):
        recorded.last_steps(0)


def test_an_empty_timeline_has_no_length() -> None:
    empty = timeline()
    assert (empty.start_s, empty.end_s, empty.steps, empty.overlaps()) == (0.0, 0.0, (), ())
    assert empty.device_chunk_bytes() == ()
    assert empty.last_steps(1) == empty


@pytest.mark.parametrize(("start_s", "end_s"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_impossible_times_are_refused(start_s: float, end_s: float) -> None:
    with pytest.raises(ConfigError, match="the compute span 'a' of step 0 runs from"):
        compute("a", start_s, end_s)
    with pytest.raises(ConfigError, match="the residency of 'a/0' runs from"):
        resident("a/0", "a", start_s, end_s)


def test_a_change_of_state_does_not_change_the_bytes_on_the_device() -> None:
    recorded = timeline(residency=(resident("a/0", "a", 0, 1, 5), resident("a/0", "a", 1, 2, 5)))
    assert recorded.device_chunk_bytes() == ((0, 5), (2, 0))


def test_a_streamed_model_holds_two_blocks_beside_what_is_resident() -> None:
    curve = Streaming(num_steps=1).timeline().device_chunk_bytes()
    assert max(num_bytes for _, num_bytes in curve) == (2 + 2 * 2) * CHUNK_BYTES
    assert curve[-1][1] == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(1, 9)).map(
            lambda item: resident("x/0", "x", item[0] * MS, (item[0] + item[1]) * MS, item[2])
        )
    )
)
def test_the_curve_of_bytes_is_what_the_spans_say_at_every_instant(spans: list[ResidencySpan]) -> None:
    curve = timeline(residency=tuple(spans)).device_chunk_bytes()
    for time_s, num_bytes in curve:
        assert num_bytes == sum(span.num_bytes for span in spans if span.start_s <= time_s < span.end_s)
    assert all(before[1] != after[1] for before, after in pairwise(curve))
