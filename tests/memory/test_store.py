from __future__ import annotations

import pytest

from lowtide.errors import BudgetError
from lowtide.memory.chunk import POISON, Chunk, ChunkState
from lowtide.memory.emulated_mover import EmulatedMover
from tests.memory.belady import simulate
from tests.memory.stores import Counter, LateWork, SmallStore


class FailedWork:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        raise ValueError("no update")


ABC = {"a": [1], "b": [1], "c": [1]}


def device_value(chunk: Chunk) -> int:
    values = set(chunk.device.tolist())
    assert len(values) == 1, values
    return int(values.pop())


def host_value(chunk: Chunk) -> int:
    assert chunk.host is not None
    values = set(chunk.host.tolist())
    assert len(values) == 1, values
    return int(values.pop())


# -- open and close ----------------------------------------------------------------------------------------------------


def test_an_open_group_is_there_with_the_hosts_bytes() -> None:
    small = SmallStore({"a": [1, 2]}, window_pages=3)
    small.store.open("a")
    assert [device_value(chunk) for chunk in small.store.groups["a"].chunks] == [1, 2]
    assert [chunk.state for chunk in small.store.groups["a"].chunks] == [ChunkState.IN_USE] * 2
    assert small.store.used_bytes == small.books[0].used_bytes == small.store.peak_bytes == 3 * 512
    assert small.log.take() == [("weights", "a/0"), ("weights", "a/1"), ("wait", "a")]


def test_a_closed_group_stays_until_its_room_is_needed() -> None:
    small = SmallStore(ABC, window_pages=2)
    small.use("a", "b")
    assert small.on_device == {"a", "b"}
    small.use("a")
    assert small.log.take() == [("weights", "a/0"), ("wait", "a"), ("weights", "b/0"), ("wait", "b")]
    small.use("c")
    assert len(small.on_device) == 2
    assert small.store.used_bytes == 2 * 512
    gone = small.chunk("a" if "a" not in small.on_device else "b")
    assert gone.state is ChunkState.HOST
    assert gone.device.untyped_storage().nbytes() == 0


def test_nested_windows_hold_the_group_until_the_last_closes() -> None:
    small = SmallStore({"a": [1], "b": [1]}, window_pages=1)
    small.store.open("a")
    small.store.open("a")
    small.store.close("a")
    assert small.chunk("a").state is ChunkState.IN_USE
    with pytest.raises(BudgetError):
        small.store.open("b")
    small.store.close("a")
    small.store.open("b")
    assert small.on_device == {"b"}
    with pytest.raises(AssertionError, match="closed more often than opened"):
        small.store.close("a")


def test_a_group_that_finds_no_room_is_refused_and_nothing_has_changed() -> None:
    small = SmallStore({"a": [2], "b": [1, 2]}, window_pages=4)
    small.store.open("a")
    with pytest.raises(BudgetError, match="open groups: a") as caught:
        small.store.open("b")
    error = caught.value
    assert (error.needed_bytes, error.free_bytes, error.budget_bytes, error.owner) == (1536, 1024, 2048, "b")
    assert "b needs 1.5 KiB" in str(error)
    assert small.store.groups["b"].num_open == 0
    assert small.on_device == {"a"}
    small.store.close("a")
    small.store.open("b")
    assert small.on_device == {"b"}


def test_books_that_refuse_leave_everything_countable() -> None:
    books = [Counter(), Counter(limit_bytes=2 * 512)]
    small = SmallStore({"a": [1, 1, 1], "b": [1]}, window_pages=9, books=books)
    with pytest.raises(BudgetError, match="full"):
        small.store.open("a")
    assert small.store.groups["a"].num_open == 0
    assert small.store.used_bytes == books[0].used_bytes == books[1].used_bytes == 2 * 512
    assert [chunk.is_on_device for chunk in small.store.groups["a"].chunks] == [True, True, False]
    small.store.drop_all()
    assert books[0].used_bytes == books[1].used_bytes == 0
    small.use("b")
    books[1].limit_bytes = 9 * 512
    small.store.open("a")
    assert [device_value(chunk) for chunk in small.store.groups["a"].chunks] == [1, 2, 3]


def test_a_device_that_refuses_leaves_everything_countable(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallStore(ABC, window_pages=3)

    def refuse(buffer: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(small.mover, "grow", refuse)
        with pytest.raises(MemoryError):
            small.store.open("a")
    assert small.chunk("a").state is ChunkState.HOST
    assert small.store.used_bytes == small.books[0].used_bytes == 0
    small.store.open("a")
    assert device_value(small.chunk("a")) == 1


def test_a_prefetch_that_is_refused_leaves_the_group_closed() -> None:
    books = Counter()
    small = SmallStore(ABC, window_pages=3, depth=1, books=[books])
    small.learn("a", "b", "c")
    books.limit_bytes = 512
    with pytest.raises(BudgetError, match="full"):
        small.store.open("a")
    assert small.store.groups["a"].num_open == 0
    small.store.drop_all()
    assert books.used_bytes == small.store.used_bytes == 0


# -- prefetch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "expected"), [(0, {"a"}), (1, {"a", "b"}), (2, {"a", "b", "c"})])
def test_as_many_groups_ahead_as_the_depth_says(depth: int, expected: set[str]) -> None:
    small = SmallStore({**ABC, "d": [1]}, window_pages=4, depth=depth)
    small.learn("a", "b", "c", "d", "d", "c", "b", "a")
    small.store.open("a")
    assert small.on_device == expected


def test_a_prefetched_group_is_not_fetched_again_and_only_waited_for() -> None:
    small = SmallStore(ABC, window_pages=2, depth=1)
    small.learn("a", "b", "c")
    small.use("a")
    assert small.log.take() == [("weights", "a/0"), ("wait", "a"), ("weights", "b/0")]
    assert device_value(small.chunk("b")) == POISON, "it has not happened yet, nobody has asked"
    small.store.open("b")
    assert device_value(small.chunk("b")) == 2
    assert small.log.take()[0] == ("wait", "b")


def test_nothing_is_prefetched_in_the_first_cycle() -> None:
    small = SmallStore(ABC, window_pages=3, depth=2)
    small.store.open("a")
    assert small.on_device == {"a"}


def test_a_prefetch_does_not_drop_what_is_needed_sooner() -> None:
    small = SmallStore({"a": [1], "b": [1], "c": [2]}, window_pages=3, depth=2)
    small.learn("a", "b", "c")
    small.use("a")
    # For c the store would have to drop b, which comes first.
    assert small.on_device == {"a", "b"}
    small.store.open("b")
    assert small.on_device == {"b", "c"}


def test_a_group_whose_update_is_under_way_is_not_prefetched() -> None:
    small = SmallStore(ABC, window_pages=3, depth=2)
    small.learn("a", "b", "c")
    work = small.chunk("b").host_work = LateWork(small.chunk("b"), 70)
    small.store.open("a")
    assert small.on_device == {"a", "c"}
    work.finish()
    small.store.prefetch()
    assert small.on_device == {"a", "b", "c"}
    small.store.open("b")
    assert device_value(small.chunk("b")) == 2 + 70


def test_a_group_that_somebody_may_change_unnoticed_is_not_prefetched() -> None:
    small = SmallStore(ABC, window_pages=3, depth=2)
    small.learn("a", "b", "c")
    small.log.held.add("b")
    small.store.open("a")
    assert small.on_device == {"a", "c"}
    small.store.open("b")
    assert device_value(small.chunk("b")) == 2


# -- updates -----------------------------------------------------------------------------------------------------------


def test_a_fetch_waits_for_the_hosts_update() -> None:
    small = SmallStore(ABC, window_pages=3)
    small.chunk("a").host_work = LateWork(small.chunk("a"), 70)
    small.store.open("a")
    assert device_value(small.chunk("a")) == 1 + 70
    assert small.chunk("a").host_work is None


def test_an_update_that_failed_reaches_whoever_needs_it() -> None:
    small = SmallStore(ABC, window_pages=3)
    work = small.chunk("a").host_work = LateWork(small.chunk("a"), 70)
    work.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        small.store.open("a")
    assert small.store.groups["a"].num_open == 0
    assert small.store.used_bytes == 0


def test_drop_takes_old_copies_away_also_those_on_their_way() -> None:
    small = SmallStore(ABC, window_pages=3, depth=1)
    small.learn("a", "b", "c")
    small.use("a")
    assert small.chunk("b").state is ChunkState.FETCHING
    small.store.drop("b")
    small.store.drop("a")
    assert small.on_device == set()
    assert small.store.used_bytes == 0
    small.chunk("b").host_work = LateWork(small.chunk("b"), 70)
    small.store.open("b")
    assert device_value(small.chunk("b")) == 2 + 70


def test_what_is_in_use_is_not_dropped() -> None:
    small = SmallStore(ABC, window_pages=3)
    small.store.open("a")
    small.use("b")
    with pytest.raises(AssertionError, match="group 'a' is in use"):
        small.store.drop("a")
    small.store.drop_all()
    assert small.on_device == {"a"}


def test_what_was_changed_on_the_device_is_on_the_host_before_anyone_reads_it() -> None:
    small = SmallStore({"a": [1, 1], "b": [2]}, window_pages=2)
    first, second = small.store.groups["a"].chunks
    small.store.open("a")
    first.device.fill_(50)
    small.store.write_back(first)
    assert first.state is ChunkState.WRITING_BACK
    second.device.fill_(51)
    small.store.write_back(second)
    small.store.close("a")
    assert host_value(first) == 1, "nobody has waited for it"
    first.settle_host()
    assert host_value(first) == 50
    small.use("b")
    assert small.on_device == {"b"}
    assert host_value(second) == 51
    small.store.open("a")
    assert [device_value(first), device_value(second)] == [50, 51]


def test_settle_host_waits_for_the_update_and_the_copy() -> None:
    small = SmallStore(ABC, window_pages=3)
    chunk = small.chunk("a")
    chunk.host_work = LateWork(chunk, 70)
    chunk.settle_host()
    assert host_value(chunk) == 1 + 70
    assert chunk.host_work is None


# -- resident ----------------------------------------------------------------------------------------------------------


def test_resident_groups_take_no_window_and_are_never_fetched() -> None:
    small = SmallStore(ABC, window_pages=0, resident=["a", "b", "c"])
    small.use("a", "b", "c")
    assert small.log.take() == []
    assert small.store.used_bytes == 0
    assert device_value(small.chunk("a")) == 1


def test_a_resident_group_gets_what_the_host_updated() -> None:
    small = SmallStore(ABC, window_pages=0, resident=["a"])
    chunk = small.chunk("a")
    chunk.host_work = LateWork(chunk, 70)
    small.store.open("a")
    assert device_value(chunk) == 1 + 70
    assert small.log.take() == [("upload", "a/0"), ("wait", "a")]
    small.store.refresh("a")
    assert small.log.take() == []
    assert chunk.fetched is not None


def test_resident_groups_are_brought_up_to_date_before_they_are_needed_in_the_order_of_the_next_forward() -> None:
    small = SmallStore({name: [1] for name in "abcd"}, window_pages=0, resident=list("abcd"))
    works = {}
    for place, name in reversed(list(enumerate("abcd"))):  # a backward meets them the other way round
        works[name] = LateWork(small.chunk(name), 70)
        small.store.host_changes(small.chunk(name), works[name], place)
    for name in "acd":
        works[name].wait()
    small.store.prefetch()
    assert small.log.take() == [("upload", "a/0"), ("upload", "c/0")], "two at a time, and none that is not done"
    small.store.open("a")
    assert small.log.take() == [("wait", "a"), ("upload", "d/0")]
    small.store.open("b")
    assert small.log.take() == [("upload", "b/0"), ("wait", "b")]
    small.store.open("c")
    small.store.open("d")
    assert small.log.take() == [("wait", "c"), ("wait", "d")]
    assert [device_value(small.chunk(name)) for name in "abcd"] == [71, 72, 73, 74]


def test_a_group_that_is_open_keeps_the_bytes_that_it_was_opened_with() -> None:
    small = SmallStore(ABC, window_pages=0, resident=["a", "b"])
    small.store.open("a")
    work = LateWork(small.chunk("a"), 70)
    small.store.host_changes(small.chunk("a"), work, 0)
    work.wait()
    small.store.open("b")
    assert small.log.take() == []
    small.store.close("a")
    small.store.prefetch()
    assert small.log.take() == [("upload", "a/0")]


def test_an_update_that_failed_is_reported_once_and_its_group_can_be_used_again() -> None:
    small = SmallStore(ABC, window_pages=0, resident=["a", "b"])
    small.store.host_changes(small.chunk("a"), FailedWork(), 0)
    with pytest.raises(ValueError, match="no update"):
        small.store.open("b")
    assert small.store.groups["b"].num_open == 0
    small.store.open("b")
    small.store.open("a")
    assert small.log.take() == []


def test_the_host_takes_over_what_the_user_wrote_to_a_resident_group() -> None:
    small = SmallStore(ABC, window_pages=1, resident=["a"])
    chunk = small.chunk("a")
    chunk.device.fill_(60)
    small.store.refresh_host(chunk)
    assert small.log.take() == [("write back", "a/0")]
    chunk.settle_host()
    assert host_value(chunk) == 60
    small.store.refresh_host(chunk)
    assert small.log.take() == [], "it is known"
    streamed = small.chunk("b")
    small.store.refresh_host(streamed)
    assert small.log.take() == [], "the host has the truth already"


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_pages", [3, 4, 6, 9])
def test_a_known_cycle_moves_what_the_simulation_says(window_pages: int) -> None:
    pages = {"a": [1], "b": [2], "c": [3], "d": [1, 1], "e": [1]}
    cycle = "abcdeedcba"
    small = SmallStore(pages, window_pages=window_pages)
    for _ in range(4):
        before = sum(
            chunk.num_fetches * chunk.spec.nbytes for name in pages for chunk in small.store.groups[name].chunks
        )
        small.use(*cycle)
        small.store.order.end_cycle()
    after = sum(chunk.num_fetches * chunk.spec.nbytes for name in pages for chunk in small.store.groups[name].chunks)
    sizes = {name: 512 * sum(sizes) for name, sizes in pages.items()}
    assert after - before == simulate(cycle, sizes, 512 * window_pages, cycles=4)


def test_a_ticket_from_before_is_not_needed_for_the_first_release() -> None:
    """The first fetch of a chunk may be dropped before anybody used it."""
    small = SmallStore(ABC, window_pages=3, depth=2, mover=EmulatedMover(eagerness=1.0))
    small.learn("a", "b", "c")
    small.store.open("a")
    small.store.close("a")
    small.store.drop_all()
    assert small.log.present == set()
