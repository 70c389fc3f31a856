from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.report.labels import Box, Label, cut_name, place_labels

BOUNDS = Box(0.0, 0.0, 900.0, 450.0)
SIZE = (130.0, 14.0)
ANCHORS = st.lists(st.tuples(st.floats(5, 895), st.floats(5, 445)), min_size=1, max_size=18)


def check_apart(anchors: list[tuple[float, float]], labels: tuple[Label, ...]) -> None:
    for one, other in combinations(labels, 2):
        assert one.box.overlap(other.box) == 0.0
    for label in labels:
        assert all(label.box.overlap(Box.around(anchor, 5.0)) == 0.0 for anchor in anchors)
        assert label.box.left >= BOUNDS.left - 1e-6
        assert label.box.right <= BOUNDS.right + 1e-6
        assert label.box.top >= BOUNDS.top - 1e-6
        assert label.box.bottom <= BOUNDS.bottom + 1e-6


@given(ANCHORS)
def test_names_never_touch(anchors: list[tuple[float, float]]) -> None:
    check_apart(anchors, place_labels(anchors, [SIZE] * len(anchors), bounds=BOUNDS))


def test_names_of_one_place_are_parted_and_led_back() -> None:
    anchors = [(450.0, 225.0)] * 12
    labels = place_labels(anchors, [SIZE] * 12, bounds=BOUNDS)
    check_apart(anchors, labels)
    assert any(label.leader is not None for label in labels)
    assert all(label.leader is None or label.leader[0] == (450.0, 225.0) for label in labels)


def test_a_lonely_name_stands_right_of_its_mark() -> None:
    [label] = place_labels([(450.0, 225.0)], [SIZE], bounds=BOUNDS)
    assert label.leader is None
    assert 455.0 < label.box.left < 465.0
    assert label.box.top < 225.0 < label.box.bottom


def test_at_the_edge_it_stands_left() -> None:
    [label] = place_labels([(890.0, 225.0)], [SIZE], bounds=BOUNDS)
    assert label.box.right < 890.0


def test_names_keep_off_obstacles_and_lines() -> None:
    obstacle = Box(455.0, 200.0, 640.0, 250.0)
    [label] = place_labels([(450.0, 225.0)], [SIZE], bounds=BOUNDS, obstacles=[obstacle])
    assert label.box.overlap(obstacle) == 0.0
    [label] = place_labels([(450.0, 225.0)], [SIZE], bounds=BOUNDS, lines=[((450.0, 225.0), (900.0, 225.0))])
    assert not (label.box.right > 455.0 and label.box.top < 225.0 < label.box.bottom)


def test_names_are_cut_in_the_middle() -> None:
    assert cut_name("control") == "control"
    assert cut_name("abcdefghij", limit=10) == "abcdefghij"
    assert cut_name("abcdefghijk", limit=10) == "abcde…hijk"
    assert len(cut_name("x" * 99)) == 40
