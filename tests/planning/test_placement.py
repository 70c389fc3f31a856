"""Placement: the device bytes of a plan's chunks, and the search for what fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.placement import ChunkBytes, by_first_use, chunk_bytes_on_device, most_that_fit
from lowtide.planning.plan import Schedule
from tests.memory.small_layouts import group, layout

MODEL = layout(
    group("a", [1024, 1024]),
    group("b", [1024, 512], frozen=(1,)),
    group("c", [3072]),
    group("", [512]),
    chunk_bytes=1024,
)


def test_bytes_of_each_kind() -> None:
    plan = make_plan(MODEL, weights={"a": "resident"}, update={"*": "device", "c": "host"}, prefetch_depth=0)
    found = chunk_bytes_on_device(MODEL, plan, state_bytes_per_parameter_byte=2)
    assert found == ChunkBytes(resident_bytes=2560, window_bytes=3072, gradient_bytes=3584, state_bytes=7168)
    assert found.total_bytes == 2560 + 3072 + 3584 + 7168


def test_in_backward_no_gradient_outlives_its_group() -> None:
    plan = make_plan(MODEL, update={"*": "device", "c": "host"}, schedule=Schedule.IN_BACKWARD)
    assert chunk_bytes_on_device(MODEL, plan, state_bytes_per_parameter_byte=0).gradient_bytes == 2048


def test_a_budget_for_windows_counts_as_a_whole() -> None:
    plan = make_plan(MODEL, window_memory=9999)
    assert chunk_bytes_on_device(MODEL, plan, state_bytes_per_parameter_byte=0).window_bytes == 9999


def test_no_negative_state() -> None:
    with pytest.raises(ConfigError, match="state_bytes_per_parameter_byte is -1; give 0 or more"):
        chunk_bytes_on_device(MODEL, make_plan(MODEL), state_bytes_per_parameter_byte=-1)


def test_the_rest_is_used_first() -> None:
    assert by_first_use(MODEL) == ["", "a", "b", "c"]


@given(st.lists(st.integers(0, 10), max_size=8), st.integers(-1, 50))
def test_the_longest_beginning_that_fits(sizes: list[int], room: int) -> None:
    names = [str(index) for index in range(len(sizes))]
    found = most_that_fit(names, lambda chosen: sum(sizes[int(name)] for name in chosen), room)
    lengths = [length for length in range(len(sizes) + 1) if sum(sizes[:length]) <= room]
    assert found == (frozenset(names[: lengths[-1]]) if lengths else None)


class TestStateThatVisits:
    """`a` has two chunks of 1024, `b` one of 1024 that is trained, `c` one of 3072, the rest one of 512."""

    def visitors(self, schedule: Schedule, update: object = "paged", **weights: str) -> int:
        placed = {"*": "streamed", "": "streamed", **weights}
        plan = make_plan(MODEL, weights=placed, update=update, schedule=schedule)  # type: ignore[arg-type]  # word or mapping
        found = chunk_bytes_on_device(MODEL, plan, state_bytes_per_parameter_byte=2)
        assert found.state_bytes == 0
        assert found.total_bytes == found.resident_bytes + found.window_bytes + found.gradient_bytes + (
            found.visitor_bytes
        )
        return found.visitor_bytes

    def test_deferred_one_chunk_after_the_other(self) -> None:
        assert self.visitors(Schedule.DEFERRED) == 2 * 3072
        assert self.visitors(Schedule.DEFERRED, {"*": "paged", "c": "host"}) == 2 * 1024

    def test_in_backward_a_group_at_a_time_beside_what_is_always_open(self) -> None:
        assert self.visitors(Schedule.IN_BACKWARD) == 2 * (3072 + 512)
        assert self.visitors(Schedule.IN_BACKWARD, {"*": "paged", "c": "host"}) == 2 * (2048 + 512)
        assert self.visitors(Schedule.IN_BACKWARD, {"a": "paged", "b": "paged"}) == 2 * 2048
        assert self.visitors(Schedule.IN_BACKWARD, "host") == 0

    def test_in_backward_resident_chunks_come_one_by_one(self) -> None:
        assert self.visitors(Schedule.IN_BACKWARD, a="resident", c="resident") == 2 * (3072 + 1024 + 512)
        assert self.visitors(Schedule.IN_BACKWARD, {"a": "paged"}, a="resident") == 2 * 1024

    def test_in_backward_those_of_tied_groups_stay(self) -> None:
        tied = layout(
            group("embedding.weight", [2048], windows=("embedding", "head")), group("a", [1024]), group("b", [1024])
        )
        plan = make_plan(tied, update="paged", schedule=Schedule.IN_BACKWARD)
        found = chunk_bytes_on_device(tied, plan, state_bytes_per_parameter_byte=3)
        assert found.visitor_bytes == 3 * (2048 + 1024)
