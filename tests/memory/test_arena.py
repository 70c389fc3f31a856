"""The arena over random traces: no overlap, nothing lost, never over budget; and each way in which it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BudgetError, ConfigError, GraphAliveError, OwnershipError
from lowtide.memory import pools as arena_module
from lowtide.memory.pools import Arena, ArenaMap, Move

CAPACITY_BYTES = 16 * 1024


def padded(num_bytes: int) -> int:
    return max(512, (num_bytes + 511) // 512 * 512)


def check_map(arena_map: ArenaMap, sizes: dict[str, int]) -> None:
    """Against the sizes that the trace has asked for: aligned, inside, apart, and all there."""
    places = sorted((arena_map.place_of(key), key) for key in sizes)
    assert tuple(key for _, key in places) == arena_map.keys()
    holes, end = [], 0
    for (offset, num_bytes), key in places:
        assert num_bytes == sizes[key]
        assert offset % 512 == 0
        assert offset >= end
        holes.append(offset - end)
        end = offset + padded(num_bytes)
    assert end <= arena_map.capacity_bytes
    holes.append(arena_map.capacity_bytes - end)
    assert arena_map.free_bytes == sum(holes)
    assert arena_map.largest_hole_bytes == max(holes)


def best_fit(arena_map: ArenaMap, sizes: dict[str, int], num_bytes: int) -> int | None:
    """By brute force: the smallest run of free units that holds the request, the lowest of equals."""
    taken = set()
    for key in sizes:
        offset, size = arena_map.place_of(key)
        taken.update(range(offset // 512, (offset + padded(size)) // 512))
    runs: list[list[int]] = []
    for unit in range(arena_map.capacity_bytes // 512):
        if unit in taken:
            continue
        if runs and runs[-1][-1] == unit - 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    fitting = [(len(run), run[0] * 512) for run in runs if len(run) * 512 >= padded(num_bytes)]
    return min(fitting)[1] if fitting else None


def check_moves(arena_map: ArenaMap, moves: tuple[Move, ...], before: dict[str, tuple[int, int]]) -> None:
    """No move may write where a block that has not moved yet still lies, other than the moving one itself."""
    current = dict(before)
    for move in moves:
        assert current[move.key] == (move.from_offset, move.num_bytes)
        assert move.to_offset < move.from_offset
        for key, (offset, size) in current.items():
            apart = move.to_offset + move.num_bytes <= offset or offset + size <= move.to_offset
            assert key == move.key or apart or not size
        current[move.key] = (move.to_offset, move.num_bytes)
    assert current == {key: arena_map.place_of(key) for key in before}


def test_the_map_over_thousands_of_random_traces() -> None:
    chance = random.Random(0)
    for _ in range(3000):
        arena_map = ArenaMap(CAPACITY_BYTES + chance.randrange(512))
        assert arena_map.capacity_bytes == CAPACITY_BYTES
        sizes: dict[str, int] = {}
        for number in range(chance.randrange(25)):
            action = chance.random()
            if action < 0.6:
                num_bytes = int(2 ** chance.uniform(0, 13))
                expected = best_fit(arena_map, sizes, num_bytes)
                assert arena_map.allocate(str(number), num_bytes) == expected
                if expected is not None:
                    sizes[str(number)] = num_bytes
            elif action < 0.9 and sizes:
                key = chance.choice(list(sizes))
                arena_map.free(key)
                del sizes[key]
            else:
                before = {key: arena_map.place_of(key) for key in sizes}
                moves = arena_map.compact()
                check_moves(arena_map, moves, before)
                assert arena_map.largest_hole_bytes == arena_map.free_bytes
                assert arena_map.compact() == ()
            check_map(arena_map, sizes)


class Owners:
    """What the users of an arena hold: a view and the content they wrote into it, rebound when it moves."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES, **options: object) -> None:
        self.movable = True
        self.views: dict[str, torch.Tensor] = {}
        self.contents: dict[str, torch.Tensor] = {}
        self.buffer = torch.zeros(capacity_bytes, dtype=torch.uint8)
        self.arena = Arena(self.buffer, self.rebind, may_move=lambda: self.movable, **options)  # type: ignore[arg-type]

    def rebind(self, key: str, view: torch.Tensor) -> None:
        assert view.data_ptr() < self.views[key].data_ptr() or not view.numel()
        self.views[key] = view

    def allocate(self, key: str, num_bytes: int) -> None:
        view = self.arena.allocate(key, num_bytes)
        content = torch.randint(
            0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(key))
        )
        self.views[key] = view.copy_(content.roll(sum(key.encode())))
        self.contents[key] = view.clone()

    def free(self, key: str) -> None:
        self.arena.free(key)
        del self.views[key], self.contents[key]

    def check(self) -> None:
        start = self.buffer.data_ptr()
        end = 0
        for key in sorted(self.views, key=lambda key: (self.views[key].data_ptr(), self.views[key].numel())):
            view = self.views[key]
            assert torch.equal(view, self.contents[key])
            assert torch.equal(self.arena.view(key), view)
            if view.numel():
                offset = view.data_ptr() - start
                assert offset >= end
                assert offset % 512 == 0
                end = offset + view.numel()
        assert end <= self.arena.capacity_bytes
        assert self.arena.free_bytes == self.arena.capacity_bytes - sum(map(padded, map(len, self.views.values())))


@settings(max_examples=400)
@given(data=st.data(), poison=st.booleans(), staging_bytes=st.sampled_from([512, 1000, 4096, 1 << 20]))
def test_contents_survive_every_trace(data: st.DataObject, poison: bool, staging_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "STAGING_BYTES", staging_bytes)
        owners = Owners(poison=poison, defragment_every=data.draw(st.integers(0, 2)))
        sizes = st.one_of(st.integers(0, 1500), st.integers(1500, 9000))
        for number in range(data.draw(st.integers(1, 14))):
            action = data.draw(st.sampled_from(["allocate", "allocate", "allocate", "free", "free", "tick", "switch"]))
            if action == "allocate":
                num_bytes = data.draw(sizes)
                fits = padded(num_bytes) <= owners.arena.free_bytes
                whole = padded(num_bytes) <= owners.arena.largest_hole_bytes
                if fits and (whole or owners.movable):
                    owners.allocate(f"block {number}", num_bytes)
                else:
                    with pytest.raises(GraphAliveError if fits else BudgetError):
                        owners.allocate(f"block {number}", num_bytes)
            elif action == "free" and owners.views:
                owners.free(data.draw(st.sampled_from(sorted(owners.views))))
            elif action == "tick":
                owners.arena.tick()
            elif action == "switch":
                owners.movable = not owners.movable
            owners.check()


def fragmented(**options: object) -> Owners:
    """Sixteen blocks of 1 KiB, every second one free again: 8 KiB free, 1 KiB in one piece."""
    owners = Owners(**options)
    for number in range(16):
        owners.allocate(f"block {number}", 1024)
    for number in range(0, 16, 2):
        owners.free(f"block {number}")
    assert (owners.arena.free_bytes, owners.arena.largest_hole_bytes) == (8192, 1024)
    return owners


def test_a_request_that_fails_for_fragmentation_moves_what_is_in_the_way() -> None:
    owners = fragmented()
    owners.allocate("large", 8192)
    owners.check()
    assert owners.arena.counts.num_defragmentations == 1
    assert owners.arena.counts.moved_bytes == 8 * 1024
    assert owners.arena.counts.num_failed == 0
    assert owners.arena.free_bytes == owners.arena.largest_hole_bytes == 0


def test_no_move_while_a_graph_is_alive() -> None:
    owners = fragmented()
    owners.movable = False
    message = (
        r"'large' needs 8.0 KiB of 'arena', which has 8.0 KiB free but at most 1.0 KiB in one piece: a graph is alive"
    )
    with pytest.raises(GraphAliveError, match=message):
        owners.arena.allocate("large", 8192)
    with pytest.raises(GraphAliveError, match=r"cannot defragment 'arena': a graph is alive .* drop the loss"):
        owners.arena.defragment()
    owners.check()
    assert owners.arena.counts.num_failed == 1
    owners.movable = True
    owners.allocate("large", 8192)
    owners.check()


def test_a_request_beyond_the_free_bytes() -> None:
    owners = fragmented(name="host arena")
    with pytest.raises(
        BudgetError, match=r"'large' needs 8.5 KiB of 'host arena', which has 8.0 KiB free of 16.0 KiB"
    ) as caught:
        owners.arena.allocate("large", 8704)
    assert (caught.value.tier, caught.value.owner) == ("host arena", "large")
    assert (caught.value.needed_bytes, caught.value.free_bytes, caught.value.budget_bytes) == (8704, 8192, 16384)
    owners.check()
    assert owners.arena.counts.num_failed == 1
    assert owners.arena.counts.num_defragmentations == 0


def test_tick_defragments_every_so_many_steps() -> None:
    owners = fragmented(defragment_every=3)
    largest = []
    for _ in range(4):
        owners.arena.tick()
        largest.append(owners.arena.largest_hole_bytes)
    assert largest == [1024, 1024, 8192, 8192]
    owners.free("block 1")  # a hole at the start: one step of the next interval has passed
    owners.arena.tick()
    assert owners.arena.largest_hole_bytes == 8192
    owners.arena.tick()
    assert owners.arena.largest_hole_bytes == 9216
    owners.check()
    assert owners.arena.counts.num_defragmentations == 2


def test_an_empty_block_needs_a_place_too() -> None:
    owners = Owners(1024)
    owners.allocate("full", 1024)
    with pytest.raises(BudgetError, match="'empty' needs 0 B of 'arena', which has 0 B free of 1.0 KiB"):
        owners.arena.allocate("empty", 0)


def test_tick_never_defragments_by_default() -> None:
    owners = fragmented()
    for _ in range(10):
        owners.arena.tick()
    assert owners.arena.largest_hole_bytes == 1024


def test_a_tick_that_may_not_move_stays_due() -> None:
    owners = fragmented(defragment_every=2)
    owners.movable = False
    for _ in range(3):
        owners.arena.tick()
    assert owners.arena.counts.num_postponed == 2
    assert owners.arena.largest_hole_bytes == 1024
    owners.movable = True
    owners.arena.tick()
    assert owners.arena.largest_hole_bytes == 8192


@pytest.mark.parametrize(("hole_bytes", "num_extra"), [(512, 1), (2048, 1), (4096, 0), (8192, 0)])
def test_defragmentation_takes_little_beside_the_buffer(
    monkeypatch: pytest.MonkeyPatch, hole_bytes: int, num_extra: int
) -> None:
    """A block that overlaps its new place goes through one bounded staging buffer; over a long way it needs none."""
    monkeypatch.setattr(arena_module, "STAGING_BYTES", 4096)
    owners = Owners(64 * 1024)
    owners.allocate("hole", hole_bytes)
    owners.allocate("large", 50_000)
    owners.free("hole")
    taken: list[int] = []
    real: Callable[..., torch.Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: taken.append(size) or real(size, **options))
    owners.arena.defragment()
    monkeypatch.undo()
    owners.check()
    assert taken == [4096] * num_extra


def test_every_owner_is_told_even_if_one_fails() -> None:
    owners = fragmented()
    told = []

    def rebind(key: str, view: torch.Tensor) -> None:
        owners.views[key] = view
        told.append(key)
        if key == "block 3":
            raise RuntimeError("the owner of block 3 is gone")

    arena = owners.arena
    arena._on_move = rebind
    with pytest.raises(RuntimeError, match="the owner of block 3 is gone"):
        arena.defragment()
    assert told == [f"block {number}" for number in range(1, 16, 2)]
    owners.check()


def test_writing_one_block_does_not_age_another() -> None:
    """Autograd would refuse a backward through a saved view whose version has changed."""
    owners = Owners()
    weight = owners.arena.allocate("weight", 1024).view(torch.float32).fill_(2.0)
    other = owners.arena.allocate("other", 1024)
    leaf = torch.ones(256, requires_grad=True)
    loss = (leaf * weight).sum()
    other.fill_(7)
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((256,), 2.0))


def test_poison_reaches_what_is_freed_and_what_was_left_behind() -> None:
    owners = Owners(poison=True)
    first = owners.arena.allocate("first", 1024).view(torch.bfloat16)
    owners.allocate("second", 1024)
    left_behind = owners.views["second"].view(torch.float32)
    owners.arena.free("first")
    assert bool(first.isnan().all())
    owners.arena.defragment()
    assert bool(left_behind.isnan().all())
    owners.check()


def test_keys_are_owned_once() -> None:
    owners = Owners()
    owners.allocate("block", 100)
    with pytest.raises(OwnershipError, match="'block' has a block already; free it first"):
        owners.arena.allocate("block", 100)
    owners.free("block")
    for call in (owners.arena.free, owners.arena.view):
        with pytest.raises(OwnershipError, match="'block' has no block here"):
            call("block")


def test_bad_arguments() -> None:
    def ignore(key: str, view: torch.Tensor) -> None:
        raise AssertionError((key, view))

    for buffer in (torch.zeros(10), torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ConfigError, match="give contiguous uint8 of one dimension"):
            Arena(buffer, ignore, may_move=lambda: True)
    with pytest.raises(ConfigError, match="defragment_every is -1; give 0 or more"):
        Arena(torch.zeros(8, dtype=torch.uint8), ignore, may_move=lambda: True, defragment_every=-1)
    with pytest.raises(ConfigError, match="'block' asks for -1 bytes"):
        Owners().arena.allocate("block", -1)


def test_a_buffer_that_is_itself_a_view() -> None:
    whole = torch.zeros(4096, dtype=torch.uint8)
    arena = Arena(whole[1024:3072], lambda key, view: None, may_move=lambda: True)
    arena.allocate("a", 1024).fill_(1)
    arena.allocate("b", 1024).fill_(2)
    assert whole.unique_consecutive(return_counts=True)[1].tolist() == [1024] * 4
