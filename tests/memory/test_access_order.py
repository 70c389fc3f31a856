from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.memory import access_order
from lowtide.memory.access_order import AccessOrder

NAMES = st.sampled_from("abcde")
CYCLES = st.lists(NAMES, min_size=1, max_size=12)


def known(cycle: str) -> AccessOrder:
    order = AccessOrder()
    for name in cycle:
        order.access(name)
    order.end_cycle()
    return order


def distance(order: AccessOrder, name: str) -> int:
    return order.next_use(name) - order.num_uses


def test_nothing_is_expected_in_the_first_cycle() -> None:
    order = AccessOrder()
    order.access("a")
    assert list(order.upcoming(3)) == []
    assert distance(order, "a") == distance(order, "b")


def test_the_last_cycle_is_expected_again() -> None:
    order = known("abccba")
    assert order.known == tuple("abccba")
    assert list(order.upcoming(9)) == ["a", "b", "c"]
    order.access("a")
    assert list(order.upcoming(1)) == ["b"]
    order.access("b")
    order.access("c")
    # The rest of the cycle and, around its end, the beginning of the next.
    assert list(order.upcoming(3)) == ["c", "b", "a"]
    assert [distance(order, name) for name in "cba"] == [0, 1, 2]


def test_the_tail_of_a_cycle_looks_into_the_next() -> None:
    order = known("abc")
    for name in "abc":
        order.access(name)
    assert list(order.upcoming(2)) == ["a", "b"]
    assert distance(order, "a") == 0


def test_what_was_never_used_is_farthest() -> None:
    order = known("abc")
    assert distance(order, "new") > max(distance(order, name) for name in "abc")
    assert list(order.upcoming(9)) == ["a", "b", "c"]


def test_another_path_is_followed_from_where_it_joins() -> None:
    order = known("abcdcba")
    order.access("a")
    order.access("d")
    assert list(order.upcoming(2)) == ["c", "b"]
    order.access("new")
    assert list(order.upcoming(2)) == ["c", "b"]


def test_a_changed_cycle_is_learnt() -> None:
    order = known("abc")
    for name in "cb":
        order.access(name)
    order.end_cycle()
    assert order.known == ("c", "b")
    assert list(order.upcoming(2)) == ["c", "b"]


def test_a_cycle_without_uses_changes_nothing() -> None:
    order = known("abc")
    order.access("a")
    order.end_cycle()
    order.end_cycle()
    assert order.known == ("a",)


def test_a_broken_cycle_is_forgotten() -> None:
    order = known("abc")
    order.access("a")
    order.forget_cycle()
    assert list(order.upcoming(1)) == ["a"]
    order.end_cycle()
    assert order.known == tuple("abc")


def test_a_cycle_that_nobody_ends_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_order, "MAX_CYCLE", 4)
    order = AccessOrder()
    for name in "ababab":
        order.access(name)
    assert order.known == tuple("abab")
    assert len(order._recorded) == 2


@given(cycle=CYCLES, num_done=st.integers(0, 12), count=st.integers(0, 6))
def test_upcoming_and_distance_are_those_of_the_repeated_cycle(cycle: list[str], num_done: int, count: int) -> None:
    order = known("".join(cycle))
    # A group that is used again and again is where the order may lose its place; it must not.
    num_done %= len(cycle)
    for name in cycle[:num_done]:
        order.access(name)
    coming = (cycle * 3)[num_done:]
    assert list(order.upcoming(count)) == list(dict.fromkeys(coming))[:count]
    for name in set(cycle):
        assert distance(order, name) == coming.index(name)


@given(cycle=CYCLES, uses=st.lists(NAMES, max_size=20))
def test_next_uses_stay_until_a_surprise(cycle: list[str], uses: list[str]) -> None:
    order = known("".join(cycle))
    for name in uses:
        others, epoch = {other: order.next_use(other) for other in "abcde" if other != name}, order.epoch
        order.access(name)
        if order.epoch == epoch:
            assert {other: order.next_use(other) for other in others} == others
