"""Random traces over random stores: never over budget, never a wrong byte, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetError
from lowtide.memory.chunk import Chunk, ChunkState, StoredGroup
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.store import ChunkStore
from tests.memory.stores import LARGEST, Counter, LateWork, SmallStore, add

ACTIONS = ("open", "close", "use", "update", "read", "write", "finish", "end cycle", "drop", "settle", "prefetch")


@st.composite
def small_stores(draw: st.DrawFn) -> tuple[SmallStore, random.Random]:
    num_groups = draw(st.integers(1, 6))
    names = "abcdef"[:num_groups]
    pages = {name: draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) for name in names}
    largest = max(sum(sizes) for sizes in pages.values())
    small = SmallStore(
        pages,
        window_pages=draw(st.integers(largest, 2 * largest + 3)),
        depth=draw(st.integers(0, 4)),
        resident=[name for name in names if draw(st.integers(0, 3)) == 0],
        mover=EmulatedMover(eagerness=draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])), seed=draw(st.integers(0, 99))),
        books=[Counter(), Counter()],
    )
    return small, random.Random(draw(st.integers(0, 1 << 32)))


class Driver:
    """Uses a store as the engine does, and knows what every byte should be."""

    def __init__(self, small: SmallStore, chance: random.Random) -> None:
        self.small, self.store, self.chance = small, small.store, chance
        self.truth = {chunk.spec.name: index + 1 for index, chunk in enumerate(self.chunks())}
        self.on_device: dict[str, int] = {}
        """What the computation must find in an open group: the weights from when it was opened."""
        # One chunk is updated either on the host or on the device, for the whole session.
        self.is_host_site = {chunk.spec.name: chance.random() < 0.6 for chunk in self.chunks()}
        self.opened: list[str] = []
        self.work: list[LateWork] = []
        self.num_refused = 0

    def chunks(self) -> Iterator[Chunk]:
        for group in self.store.groups.values():
            yield from group.chunks

    # -- what the engine does ------------------------------------------------------------------------------------------

    def open(self, name: str) -> None:
        group = self.store.groups[name]
        held = sum(chunk.spec.nbytes for other in set(self.opened) for chunk in self.streamed(other))
        needed = 0 if name in self.opened else sum(chunk.spec.nbytes for chunk in self.streamed(name))
        if held + needed > self.store.window_bytes:
            with pytest.raises(BudgetError):
                self.store.open(name)
            self.num_refused += 1
            assert group.num_open == self.opened.count(name)
            return
        self.store.open(name)
        if name not in self.opened:
            self.on_device |= {chunk.spec.name: self.truth[chunk.spec.name] for chunk in group.chunks}
        self.opened.append(name)

    def close(self, name: str) -> None:
        self.store.close(name)
        self.opened.remove(name)
        self.forget_old_copy(name)

    def update(self, name: str, change: int) -> None:
        """An optimizer step on one chunk, at its site."""
        chunk = self.chance.choice(self.store.groups[name].chunks)
        if self.is_host_site[chunk.spec.name]:
            if chunk.host_work is not None and not chunk.host_work.is_done():
                return  # one backward a step
            if chunk.state is ChunkState.RESIDENT:
                self.store.refresh_host(chunk)
            if chunk.host_work is not None:
                chunk.host_work.wait()
            work = LateWork(chunk, change)
            chunk.host_work = work
            self.work.append(work)
            self.forget_old_copy(name)
        elif name in self.opened and chunk.state is not ChunkState.WRITING_BACK:
            add(chunk.device, change)
            self.on_device[chunk.spec.name] = (self.on_device[chunk.spec.name] + change) % LARGEST
            if chunk.state is not ChunkState.RESIDENT:
                self.store.write_back(chunk)
        else:
            return
        self.truth[chunk.spec.name] = (self.truth[chunk.spec.name] + change) % LARGEST

    def forget_old_copy(self, name: str) -> None:
        if name not in self.opened and any(chunk.host_work is not None for chunk in self.store.groups[name].chunks):
            self.store.drop(name)

    def settle(self, name: str) -> None:
        """Somebody looks at the parameters between two uses."""
        for chunk in self.streamed(name):
            chunk.settle_host()
            assert chunk.host is not None
            assert_filled(chunk.host, self.truth[chunk.spec.name], chunk)
        self.store.refresh(name)
        for chunk in self.store.groups[name].chunks:
            if chunk.state is ChunkState.RESIDENT:
                assert_filled(chunk.device, self.truth[chunk.spec.name], chunk)

    def write(self, name: str, value: int) -> None:
        """The user writes a parameter between two uses."""
        self.settle(name)
        for chunk in self.store.groups[name].chunks:
            self.truth[chunk.spec.name] = value
            if chunk.state is ChunkState.RESIDENT:
                chunk.device.fill_(value)
                chunk.is_touched = True
            else:
                assert chunk.host is not None
                chunk.host.fill_(value)

    # -- one action ----------------------------------------------------------------------------------------------------

    def act(self, action: str, name: str, value: int) -> None:
        if action == "open":
            self.open(name)
        elif action == "close" and self.opened:
            self.close(self.chance.choice(self.opened))
        elif action == "use" and name not in self.opened:
            self.open(name)
            if name in self.opened:
                self.check()
                self.close(name)
        elif action == "update":
            self.update(name, value)
        elif action in ("read", "write") and name not in self.opened:
            self.settle(name)
            self.store.drop(name)
            if action == "write":
                self.write(name, value)
        elif action == "finish" and self.work:
            self.work.pop(0).finish()
        elif action == "end cycle":
            self.store.order.end_cycle()
        elif action == "drop" and name not in self.opened:
            self.store.drop(name)
        elif action == "settle" and name not in self.opened:
            self.settle(name)
        elif action == "prefetch":
            self.store.prefetch()

    def streamed(self, name: str) -> list[Chunk]:
        return [chunk for chunk in self.store.groups[name].chunks if chunk.state is not ChunkState.RESIDENT]

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        store = self.store
        present = [chunk for chunk in self.chunks() if chunk.state not in (ChunkState.HOST, ChunkState.RESIDENT)]
        assert store.used_bytes == sum(chunk.spec.nbytes for chunk in present) <= store.window_bytes
        assert all(books.used_bytes == store.used_bytes for books in self.small.books)
        assert store.used_bytes <= store.peak_bytes <= store.window_bytes
        assert self.small.log.present == {chunk.spec.name for chunk in present}
        for chunk in self.chunks():
            has_memory = chunk.device.untyped_storage().nbytes() > 0
            assert has_memory == chunk.is_on_device, chunk.spec.name
        for name in set(self.opened):
            assert store.groups[name].num_open == self.opened.count(name)
            for chunk in store.groups[name].chunks:
                assert chunk.state in (ChunkState.IN_USE, ChunkState.WRITING_BACK, ChunkState.RESIDENT)
                assert_filled(chunk.device, self.on_device[chunk.spec.name], chunk)

    def finish(self) -> None:
        """Close everything: every value is where it belongs."""
        for name in list(self.opened):
            self.close(name)
        for name in self.store.groups:
            self.settle(name)
        self.store.drop_all()
        self.check()
        assert self.store.used_bytes == 0


def assert_filled(buffer: torch.Tensor, value: int, chunk: Chunk) -> None:
    assert bool((buffer == value).all()), f"{chunk.spec.name} has {set(buffer.tolist())}, not {value}"


def run(small: SmallStore, chance: random.Random, length: int) -> Driver:
    driver = Driver(small, chance)
    names = list(small.store.groups)
    cycle = chance.choices(names, k=chance.randint(1, 8))
    for step in range(length):
        # Half of the uses follow an order that can be learnt; sometimes it changes.
        if chance.random() < 0.5:
            action, name = "use", cycle[step % len(cycle)]
            if step % len(cycle) == 0:
                driver.store.order.end_cycle()
        else:
            action, name = chance.choice(ACTIONS), chance.choice(names)
        if chance.random() < 0.02:
            cycle = chance.choices(names, k=chance.randint(1, 8))
        driver.act(action, name, chance.randint(1, 200))
        driver.check()
    driver.finish()
    return driver


@settings(max_examples=2000)
@given(made=small_stores())
def test_random_traces(made: tuple[SmallStore, random.Random]) -> None:
    run(*made, length=40)


def test_long_traces() -> None:
    """Everything that can happen does happen, over and over in one store."""
    num_refused = num_fetches = 0
    for seed in range(12):
        chance = random.Random(seed)
        small = SmallStore(
            {name: chance.choices([1, 2, 3], k=chance.randint(1, 3)) for name in "abcdef"},
            window_pages=12,
            depth=seed % 4,
            resident=["b"] if seed % 2 else [],
            mover=EmulatedMover(eagerness=(seed % 3) / 4, seed=seed),
            books=[Counter(), Counter()],
        )
        driver = run(small, chance, length=600)
        num_refused += driver.num_refused
        num_fetches += sum(chunk.num_fetches for chunk in driver.chunks())
    assert num_refused > 20
    assert num_fetches > 2000


# -- a fault shows -----------------------------------------------------------------------------------------------------


def num_faults() -> int:
    """How many of twenty traces fail."""
    found = 0
    for seed in range(20):
        chance = random.Random(seed)
        small = SmallStore(
            {name: [1, 2] for name in "abcd"}, window_pages=7, depth=2, resident=["d"], books=[Counter(), Counter()]
        )
        try:
            run(small, chance, length=300)
        except (AssertionError, BudgetError, pytest.fail.Exception):
            found += 1
    return found


def test_the_unbroken_store_has_no_faults() -> None:
    assert num_faults() == 0


def test_a_computation_that_does_not_wait_for_its_copy_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedMover, "compute_after", lambda mover, ticket: None)
    assert num_faults() > 5


def test_a_release_that_does_not_wait_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EmulatedMover.shrink
    monkeypatch.setattr(EmulatedMover, "shrink", lambda mover, buffer, after: whole(mover, buffer, []))
    assert num_faults() > 5


def test_a_fetch_that_does_not_wait_for_the_write_back_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EmulatedMover.to_device
    monkeypatch.setattr(
        EmulatedMover, "to_device", lambda mover, target, source, after=(): whole(mover, target, source)
    )
    assert num_faults() == 0, "the release before it waits as well, so that either wait is enough"
    monkeypatch.setattr(Chunk, "pending_device_reads", property(lambda chunk: [chunk.last_use or chunk.fetched.ended]))
    assert num_faults() > 5


def test_an_update_that_is_not_waited_for_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateWork, "wait", lambda work: None)
    assert num_faults() > 5


def test_an_update_that_does_not_wait_for_the_copies_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateWork, "copies_of", staticmethod(lambda chunk: []))
    assert num_faults() > 5


def test_an_old_copy_that_is_kept_after_an_update_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "forget_old_copy", lambda driver, name: None)
    assert num_faults() > 5


def test_room_that_is_not_made_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkStore, "_make_room", lambda store, group, missing, is_needed_now: True)
    assert num_faults() > 5


def test_a_group_that_leaves_while_it_is_open_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ChunkStore._make_room

    def careless(store: ChunkStore, group: StoredGroup, missing: list[Chunk], *, is_needed_now: bool) -> bool:
        """Takes what is in use for idle."""
        for other in store.groups.values():
            for chunk in other.chunks:
                if chunk.state is ChunkState.IN_USE:
                    chunk.become(ChunkState.IDLE)
            other.num_open = 0
        return whole(store, group, missing, is_needed_now=is_needed_now)

    monkeypatch.setattr(ChunkStore, "_make_room", careless)
    assert num_faults() > 5
