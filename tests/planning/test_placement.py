"""Placement: the device bytes of a plan's chunks and windows, never less than any moment of a step needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.activations.policy import Policy, Recompute
from lowtide.errors import ConfigError
from lowtide.memory.chunk import Layout
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.placement import (
    by_first_use,
    group_sizes,
    largest_window,
    most_that_fit,
    window_bytes,
    window_bytes_needed,
)
from lowtide.planning.plan import Schedule
from tests.memory.small_layouts import group, layout, random_layouts
from tests.planning.chunk_bytes import ChunkBytes, chunk_bytes_on_device

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
            group("embedding.weight", [2048], modules=("embedding", "head")), group("a", [1024]), group("b", [1024])
        )
        plan = make_plan(tied, update="paged", schedule=Schedule.IN_BACKWARD)
        found = chunk_bytes_on_device(tied, plan, state_bytes_per_parameter_byte=3)
        assert found.visitor_bytes == 3 * (2048 + 1024)


KB = 1024
WINDOWS_MODEL = layout(
    group("embedding", [4 * KB]),
    group("layers.0", [KB]),
    group("layers.1", [2 * KB]),
    group("layers.2", [KB]),
    group("head", [3 * KB]),
    group("", [512]),
)


def test_the_largest_neighbours_around_the_end() -> None:
    streamed = [spec.name for spec in WINDOWS_MODEL.groups if spec.name]
    assert window_bytes(WINDOWS_MODEL, streamed, 0) == 4 * KB
    assert window_bytes(WINDOWS_MODEL, streamed, 1) == 7 * KB, "the head, and the embedding of the next forward"
    assert window_bytes(WINDOWS_MODEL, streamed, 2) == 8 * KB
    assert window_bytes(WINDOWS_MODEL, streamed, 99) == 11 * KB


def test_resident_groups_take_no_window() -> None:
    assert window_bytes(WINDOWS_MODEL, ["layers.0", "layers.2"], 1) == 2 * KB
    assert window_bytes(WINDOWS_MODEL, [], 1) == 0
    assert largest_window(WINDOWS_MODEL, []) == ("", 0)


def test_a_streamed_rest_is_open_beside_everything() -> None:
    assert window_bytes(WINDOWS_MODEL, ["layers.1", ""], 0) == 2 * KB + 512


def test_of_a_plan() -> None:
    assert window_bytes_needed(WINDOWS_MODEL, make_plan(WINDOWS_MODEL, prefetch_depth=0)) == 4 * KB
    assert window_bytes_needed(WINDOWS_MODEL, make_plan(WINDOWS_MODEL, weights="resident")) == 0


def test_a_tied_group_is_open_beside_any_other() -> None:
    tied = layout(
        group("embedding.weight", [4 * KB], modules=("embedding", "head")),
        group("layers.0", [KB]),
        group("layers.1", [2 * KB]),
    )
    streamed = [spec.name for spec in tied.groups]
    assert window_bytes(tied, streamed, 0) == 4 * KB
    assert window_bytes(tied, streamed, 1) == 6 * KB
    assert largest_window(tied, streamed)[1] == 4 * KB


def test_one_window_at_a_time_without_prefetch() -> None:
    tied = layout(group("x", [KB], modules=("a", "b")), group("y", [2 * KB], modules=("c", "d")))
    assert window_bytes(tied, ["x", "y"], 0) == largest_window(tied, ["x", "y"])[1] == 2 * KB
    assert window_bytes(tied, ["x", "y"], 1) == 3 * KB


def test_a_tied_group_counts_with_the_window_it_shares() -> None:
    tied = layout(group("shared", [4 * KB], modules=("a", "b")), group("a", [KB]), group("b", [2 * KB]))
    assert window_bytes(tied, ["shared", "a", "b"], 0) == 6 * KB
    assert largest_window(tied, ["shared", "a", "b"]) == ("b", 6 * KB)


def test_modules_around_a_window_stay_open() -> None:
    nested = layout(group("layers.1", [KB]), group("layers.10", [KB]), group("layers.1.mlp", [2 * KB]))
    assert window_bytes(nested, ["layers.1", "layers.10", "layers.1.mlp"], 0) == 3 * KB


def test_a_segment_opens_the_group_that_runs_again_beside_the_one_that_waits() -> None:
    streamed = ["layers.0", "layers.1", "layers.2"]

    def in_segments(*lengths: int) -> dict[str, Policy]:
        return {name: Recompute(segment=length) for name, length in zip(streamed, lengths, strict=True)}

    assert largest_window(WINDOWS_MODEL, streamed, in_segments(1, 1, 1)) == ("layers.1", 2 * KB)
    assert largest_window(WINDOWS_MODEL, streamed, in_segments(2, 2, 2)) == ("layers.1", 3 * KB), (
        "one more, however long it is"
    )
    assert window_bytes(WINDOWS_MODEL, streamed, 0, in_segments(3, 3, 3)) == 3 * KB
    assert window_bytes(WINDOWS_MODEL, ["layers.0", "layers.2"], 0, in_segments(2, 2, 2)) == KB, (
        "not in the same segment"
    )
    assert window_bytes(WINDOWS_MODEL, ["layers.0", "layers.2"], 0, in_segments(3, 3, 3)) == 2 * KB
    assert window_bytes(WINDOWS_MODEL, streamed, 2, in_segments(3, 3, 3)) == 4 * KB, "as many as are copied ahead"


@given(random_layouts(), st.integers(0, 3), st.data())
def test_enough_for_each_moment_of_a_step(made: Layout, depth: int, data: st.DataObject) -> None:
    streamed = {spec.name for spec in made.groups if data.draw(st.booleans())}
    sizes = group_sizes(made)
    windows = dict.fromkeys(window for spec in made.groups for window in spec.modules if spec.name in streamed)
    # Where the tied windows stand in the order of calls is anyone's guess: the others keep their order.
    own = [spec.modules[0] for spec in made.groups if len(spec.modules) == 1 and spec.name in streamed]
    order = list(own)
    for window in [window for window in windows if window not in own]:
        order.insert(data.draw(st.integers(0, len(order))), window)
    need = window_bytes(made, streamed, depth)
    for steps in (order, order[::-1]):
        for start in range(len(steps)):
            ahead = [steps[(start + index) % len(steps)] for index in range(depth + 1)]
            opened = {
                spec.name
                for spec in made.groups
                if spec.name in streamed and any(not outer or outer in ahead for outer in spec.modules)
            }
            assert sum(sizes[name] for name in opened) <= need


@given(random_layouts(), st.integers(0, 3), st.data())
def test_making_a_group_resident_frees_at_most_its_bytes(made: Layout, depth: int, data: st.DataObject) -> None:
    streamed = [spec.name for spec in made.groups]
    name = data.draw(st.sampled_from(streamed))
    fewer = [other for other in streamed if other != name]
    segments = {
        spec.name: Recompute(segment=data.draw(st.integers(1, 3)))
        for spec in made.groups
        if spec.modules == (spec.name,)
    }
    for policies in (None, segments):
        need = window_bytes(made, streamed, depth, policies)
        assert window_bytes(made, fewer, depth, policies) + group_sizes(made)[name] >= need
