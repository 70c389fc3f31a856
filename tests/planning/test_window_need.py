"""The bytes of windows: by hand, and never less than any moment of a step needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.activations.policy import Policy, Recompute
from lowtide.memory.layout_types import Layout
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.window_need import group_sizes, largest_window, window_bytes, window_bytes_needed
from tests.memory.small_layouts import group, layout, random_layouts

KB = 1024
MODEL = layout(
    group("embedding", [4 * KB]),
    group("layers.0", [KB]),
    group("layers.1", [2 * KB]),
    group("layers.2", [KB]),
    group("head", [3 * KB]),
    group("", [512]),
)


def test_the_largest_neighbours_around_the_end() -> None:
    streamed = [spec.name for spec in MODEL.groups if spec.name]
    assert window_bytes(MODEL, streamed, 0) == 4 * KB
    assert window_bytes(MODEL, streamed, 1) == 7 * KB, "the head, and the embedding of the next forward"
    assert window_bytes(MODEL, streamed, 2) == 8 * KB
    assert window_bytes(MODEL, streamed, 99) == 11 * KB


def test_resident_groups_take_no_window() -> None:
    assert window_bytes(MODEL, ["layers.0", "layers.2"], 1) == 2 * KB
    assert window_bytes(MODEL, [], 1) == 0
    assert largest_window(MODEL, []) == ("", 0)


def test_a_streamed_rest_is_open_beside_everything() -> None:
    assert window_bytes(MODEL, ["layers.1", ""], 0) == 2 * KB + 512


def test_of_a_plan() -> None:
    assert window_bytes_needed(MODEL, make_plan(MODEL, prefetch_depth=0)) == 4 * KB
    assert window_bytes_needed(MODEL, make_plan(MODEL, weights="resident")) == 0


def test_a_tied_group_is_open_beside_any_other() -> None:
    tied = layout(
        group("embedding.weight", [4 * KB], windows=("embedding", "head")),
        group("layers.0", [KB]),
        group("layers.1", [2 * KB]),
    )
    streamed = [spec.name for spec in tied.groups]
    assert window_bytes(tied, streamed, 0) == 4 * KB
    assert window_bytes(tied, streamed, 1) == 6 * KB
    assert largest_window(tied, streamed)[1] == 4 * KB


def test_one_window_at_a_time_without_prefetch() -> None:
    tied = layout(group("x", [KB], windows=("a", "b")), group("y", [2 * KB], windows=("c", "d")))
    assert window_bytes(tied, ["x", "y"], 0) == largest_window(tied, ["x", "y"])[1] == 2 * KB
    assert window_bytes(tied, ["x", "y"], 1) == 3 * KB


def test_a_tied_group_counts_with_the_window_it_shares() -> None:
    tied = layout(group("shared", [4 * KB], windows=("a", "b")), group("a", [KB]), group("b", [2 * KB]))
    assert window_bytes(tied, ["shared", "a", "b"], 0) == 6 * KB
    assert largest_window(tied, ["shared", "a", "b"]) == ("b", 6 * KB)


def test_modules_around_a_window_stay_open() -> None:
    nested = layout(group("layers.1", [KB]), group("layers.10", [KB]), group("layers.1.mlp", [2 * KB]))
    assert window_bytes(nested, ["layers.1", "layers.10", "layers.1.mlp"], 0) == 3 * KB


def test_a_segment_opens_the_group_that_runs_again_beside_the_one_that_waits() -> None:
    streamed = ["layers.0", "layers.1", "layers.2"]

    def in_segments(*lengths: int) -> dict[str, Policy]:
        return {name: Recompute(segment=length) for name, length in zip(streamed, lengths, strict=True)}

    assert largest_window(MODEL, streamed, in_segments(1, 1, 1)) == ("layers.1", 2 * KB)
    assert largest_window(MODEL, streamed, in_segments(2, 2, 2)) == ("layers.1", 3 * KB), "one more, however long it is"
    assert window_bytes(MODEL, streamed, 0, in_segments(3, 3, 3)) == 3 * KB
    assert window_bytes(MODEL, ["layers.0", "layers.2"], 0, in_segments(2, 2, 2)) == KB, "not in the same segment"
    assert window_bytes(MODEL, ["layers.0", "layers.2"], 0, in_segments(3, 3, 3)) == 2 * KB
    assert window_bytes(MODEL, streamed, 2, in_segments(3, 3, 3)) == 4 * KB, "as many as are copied ahead"


@given(random_layouts(), st.integers(0, 3), st.data())
def test_enough_for_each_moment_of_a_step(made: Layout, depth: int, data: st.DataObject) -> None:
    streamed = {spec.name for spec in made.groups if data.draw(st.booleans())}
    sizes = group_sizes(made)
    windows = dict.fromkeys(window for spec in made.groups for window in spec.windows if spec.name in streamed)
    # Where the tied windows stand in the order of calls is anyone's guess: the others keep their order.
    own = [spec.windows[0] for spec in made.groups if len(spec.windows) == 1 and spec.name in streamed]
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
                if spec.name in streamed and any(not outer or outer in ahead for outer in spec.windows)
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
        if spec.windows == (spec.name,)
    }
    for policies in (None, segments):
        need = window_bytes(made, streamed, depth, policies)
        assert window_bytes(made, fewer, depth, policies) + group_sizes(made)[name] >= need
