"""The order of uses, and which group leaves: against a rule that looks at all of them, and against all choices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.memory import store
from lowtide.memory.store import AccessOrder, LeavingQueue
from tests.memory.belady import Candidate, choose_leaving, simulate

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
    monkeypatch.setattr(store, "MAX_CYCLE", 4)
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


def candidate(group: str, num_bytes: int, distance: int) -> Candidate:
    return Candidate(group=group, num_bytes=num_bytes, distance=distance)


NEAR, MIDDLE, FAR = candidate("near", 10, 1), candidate("middle", 20, 4), candidate("far", 5, 9)


def test_the_farthest_next_use_leaves_first() -> None:
    assert choose_leaving([NEAR, FAR, MIDDLE], 5, nearer_than=None) == ["far"]
    assert choose_leaving([NEAR, FAR, MIDDLE], 6, nearer_than=None) == ["far", "middle"]
    assert choose_leaving([NEAR, FAR, MIDDLE], 26, nearer_than=None) == ["far", "middle", "near"]


def test_none_where_all_together_do_not_suffice() -> None:
    assert choose_leaving([NEAR, FAR, MIDDLE], 35, nearer_than=None) == ["far", "middle", "near"]
    assert choose_leaving([NEAR, FAR, MIDDLE], 36, nearer_than=None) is None
    assert choose_leaving([], 1, nearer_than=None) is None


def test_nobody_leaves_for_nothing() -> None:
    assert choose_leaving([NEAR, FAR], 0, nearer_than=None) == []
    assert choose_leaving([NEAR, FAR], -5, nearer_than=3) == []


def test_a_prefetch_drops_only_what_is_used_later_than_itself() -> None:
    assert choose_leaving([NEAR, FAR, MIDDLE], 25, nearer_than=3) == ["far", "middle"]
    assert choose_leaving([NEAR, FAR, MIDDLE], 26, nearer_than=3) is None
    assert choose_leaving([MIDDLE], 1, nearer_than=4) is None


def test_equal_distances_leave_in_the_order_of_their_names() -> None:
    twins = [candidate("b", 1, 3), candidate("a", 1, 3)]
    assert choose_leaving(twins, 1, nearer_than=None) == ["a"]


@given(
    found=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6),
    needed=st.integers(-3, 40),
    nearer_than=st.none() | st.integers(0, 9),
)
def test_no_more_leave_than_needed(found: list[tuple[int, int]], needed: int, nearer_than: int | None) -> None:
    candidates = [candidate(str(index), size, distance) for index, (size, distance) in enumerate(found)]
    sizes = {item.group: item.num_bytes for item in candidates}
    may_leave = [item for item in candidates if nearer_than is None or item.distance > nearer_than]
    leaving = choose_leaving(candidates, needed, nearer_than=nearer_than)
    if leaving is None:
        assert sum(item.num_bytes for item in may_leave) < needed
        return
    assert set(leaving) <= {item.group for item in may_leave}
    assert sum(sizes[name] for name in leaving) >= needed
    if leaving:
        assert sum(sizes[name] for name in leaving[:-1]) < needed


# -- the queue ---------------------------------------------------------------------------------------------------------


@given(
    cycle=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12),
    uses=st.lists(st.sampled_from("abcdefg"), max_size=40),
    surprises=st.sets(st.integers(0, 39), max_size=4),
    sizes=st.lists(st.integers(1, 9), min_size=7, max_size=7),
    asked=st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=40, max_size=40),
)
def test_the_queue_chooses_as_if_it_looked_at_every_group(
    cycle: list[str],
    uses: list[str],
    surprises: set[int],
    sizes: list[int],
    asked: list[tuple[int, bool]],
) -> None:
    size_of = dict(zip("abcdefg", sizes, strict=True))
    present: set[str] = set()
    order = AccessOrder()
    queue = LeavingQueue("abcdefg", lambda name: size_of[name] if name in present else 0)
    for name in cycle:
        order.access(name)
    order.end_cycle()
    for number, (use, (needed, is_needed_now)) in enumerate(zip(uses, asked, strict=False)):
        # Mostly what is expected, so that the heap is used for long; sometimes anything.
        name = use if number in surprises else next(iter(order.upcoming(1)))
        present.discard(name)
        order.access(name)
        later_than = None if is_needed_now else order.next_use(name)
        candidates = [candidate(other, size_of[other], order.next_use(other)) for other in present]
        expected = choose_leaving(candidates, needed, nearer_than=later_than)
        assert queue.choose(needed, order, staying=name, later_than=later_than) == expected
        present.difference_update(expected or ())
        present.add(name)
        queue.enter(name, order)


def test_the_queue_finds_a_group_that_nobody_entered_where_one_is_needed_now() -> None:
    order, sizes = AccessOrder(), {"a": 4, "b": 4}
    queue = LeavingQueue(sizes, sizes.__getitem__)
    assert queue.choose(4, order, staying="b") == ["a"]
    assert queue.choose(4, order, staying="b") == ["a"]  # left out of the heap by the call before


@pytest.mark.parametrize("every", [None, 5], ids=["nothing leaves", "one leaves now and then"])
def test_the_queue_holds_no_more_after_many_uses(every: int | None) -> None:
    order, present = known("abcdedcba"), set("abcde")
    queue = LeavingQueue("abcde", lambda name: 4 if name in present else 0)
    for number in range(2_000):
        name = next(iter(order.upcoming(1)))
        present.discard(name)
        order.access(name)
        if every is not None and number % every == 0:
            candidates = [candidate(other, 4, order.next_use(other)) for other in present]
            leaving = choose_leaving(candidates, 4, nearer_than=None)
            assert queue.choose(4, order, staying=name) == leaving
            present.difference_update(leaving or ())
        present.add(name)
        queue.enter(name, order)
        assert len(queue._heap) <= 8 * 5


# -- simulate ----------------------------------------------------------------------------------------------------------


def fewest_fetches(order: Sequence[str], room: int) -> int:
    """Over all choices of what leaves whenever something must, groups of one size; `room` in groups."""
    costs: dict[frozenset[str], int] = {frozenset(): 0}
    for group in order:
        reached: dict[frozenset[str], int] = {}
        for present, cost in costs.items():
            if group in present:
                choices = [(present, cost)]
            elif len(present) < room:
                choices = [(present | {group}, cost + 1)]
            else:
                choices = [(present - {leaving} | {group}, cost + 1) for leaving in present]
            for now, paid in choices:
                reached[now] = min(paid, reached.get(now, paid))
        costs = reached
    return min(costs.values())


@settings(max_examples=300)
@given(order=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=10), room=st.integers(1, 5))
def test_no_other_choice_fetches_less(order: list[str], room: int) -> None:
    sizes = dict.fromkeys(order, 7)
    first = simulate(order, sizes, 7 * room, cycles=1)
    assert first == 7 * fewest_fetches(order, room)
    second = simulate(order, sizes, 7 * room, cycles=2)
    assert first + second == 7 * fewest_fetches(order * 2, room)


def test_what_fits_is_fetched_once() -> None:
    order, sizes = "abcba", {"a": 3, "b": 4, "c": 5}
    assert simulate(order, sizes, 12, cycles=1) == 12
    assert simulate(order, sizes, 12, cycles=2) == 0


def test_with_room_for_one_every_change_is_a_fetch() -> None:
    assert simulate("abcba", {"a": 3, "b": 4, "c": 5}, 5) == 3 * 0 + 4 + 5 + 4 + 3


def test_more_room_never_costs_bytes_when_sizes_are_equal() -> None:
    order = "abcdeedcba"
    fetched = [simulate(order, dict.fromkeys(order, 1), room, cycles=3) for room in range(1, 6)]
    assert fetched == sorted(fetched, reverse=True)
    assert all(one > other for one, other in itertools.pairwise(fetched))


def test_a_group_larger_than_the_room_is_refused() -> None:
    with pytest.raises(AssertionError, match="b alone is larger than 3 bytes"):
        simulate("ab", {"a": 3, "b": 4}, 3)
