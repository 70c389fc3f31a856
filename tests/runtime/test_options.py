"""Every option of a plan, turned: what its documentation says happens to the bytes or to the order of things."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide import WarmUp
from lowtide.errors import BudgetError, LowtideError, PlanError
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.memory.pools import ArenaCounts
from lowtide.planning.budget_plans import MonitorMode
from lowtide.planning.timeline import Lane, Reason
from lowtide.runtime import plan_run as plan_run_module
from lowtide.runtime.host_memory import HostPool
from lowtide.runtime.statistics.session_stats import SessionStats
from tests.runtime.stack import (
    BLOCK_BYTES,
    KB,
    NUM_BLOCKS,
    REST_BYTES,
    Stack,
    managed,
    num_on_device,
    num_resident,
    steps,
    tier,
)
from tests.zoo import assert_same

SIZE = 400 * KB


def by_hand(num_steps: int, **settings: Any) -> tuple[lowtide.Session, list[float]]:
    return managed(lowtide.make_plan(Stack(), **settings), num_steps=num_steps, device="cpu")


def stats_of(num_steps: int, **settings: Any) -> SessionStats:
    session, _ = by_hand(num_steps, **settings)
    session.settle()
    stats = session.stats()
    session.close()
    return stats


def num_fetches(session: lowtide.Session) -> int:
    return sum(row.num_fetches for row in session.stats().chunks)


def device_bytes_beside_chunks(session: lowtide.Session) -> int:
    """Between two steps, when there are neither activations nor gradients: the state."""
    session.settle()
    tracked = session._open().setup.tracked
    assert tracked is not None
    return tracked.current_bytes - tracked.charged_bytes


class TestCache:
    """`cached_buffers`: staging buffers kept for the next chunk of the same size."""

    def test_kept_buffers_are_found_again(self) -> None:
        caches = {kept: stats_of(4, schedule="in_backward", cached_buffers=kept).cache for kept in (0, 1, 2)}
        assert (caches[0].hits, caches[0].held_bytes) == (0, 0)
        requests = caches[0].misses
        assert requests == 4 * (NUM_BLOCKS + 1)
        for kept in (1, 2):
            assert caches[kept].hits + caches[kept].misses == requests
            assert caches[kept].misses < requests
            assert 0 < caches[kept].held_bytes <= kept * (BLOCK_BYTES + REST_BYTES)

    def test_memory_kept_for_one_size_does_not_make_another_take_more(self) -> None:
        # There is staging for two of the large last layer; kept ones of that size must make way for the small ones.
        def peak(kept: int) -> int:
            model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(9)], torch.nn.Linear(32, 96))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            plan = lowtide.make_plan(model, schedule="in_backward", cached_buffers=kept)
            with lowtide.manage(model, optimizer, plan, device="cpu") as session:
                for _ in range(4):
                    model(torch.ones(4, 32)).sum().backward()
                    optimizer.step()
                return tier(session, "host").peak_bytes

        assert peak(8) == peak(0)


class TestWarmUpShare:
    def test_it_bounds_the_chunks_of_the_observed_step(self) -> None:
        peaks = {}
        for share in (0.0, 0.1, 0.2):
            session, _ = managed(WarmUp(device_memory=SIZE, warm_up_share=share), num_steps=1)
            assert session.is_warming_up
            peaks[share] = tier(session, "device chunks").peak_bytes
            session.close()
        assert peaks[0.0] == REST_BYTES + BLOCK_BYTES, "the largest window always has room"
        assert peaks[0.1] == REST_BYTES + 2 * BLOCK_BYTES
        assert peaks[0.2] == REST_BYTES + 4 * BLOCK_BYTES
        assert peaks[0.2] <= 0.2 * 0.9 * SIZE

    def test_more_means_fewer_copies(self) -> None:
        moved = {}
        for share in (0.0, 0.2):
            session, _ = managed(WarmUp(device_memory=SIZE, warm_up_share=share), num_steps=1)
            moved[share] = session.stats().moved_bytes("to device")
            session.close()
        assert moved[0.2] < moved[0.0]


class TestDeviceShare:
    def test_it_bounds_all_that_is_on_the_device(self) -> None:
        found = {}
        for share in (0.72, 0.8, 1.0):
            session, _ = managed(WarmUp(device_memory=SIZE, device_share=share, warm_up_share=0.06), num_steps=4)
            device = tier(session, "device")
            assert device.budget_bytes == int(share * SIZE)
            assert device.is_within_budget
            found[share] = (num_resident(session.plan), num_on_device(session.plan))
            session.close()
        assert found[0.72] < found[0.8] < found[1.0]

    def test_too_little(self) -> None:
        with pytest.raises(
            PlanError, match=r"the device budget of 16.0 KiB \(0.04 of 400.0 KiB\) cannot hold 16.5 KiB"
        ):
            managed(WarmUp(device_memory=SIZE, device_share=0.04))


class TestHostShare:
    def test_it_bounds_what_is_on_the_host(self) -> None:
        # Weights, gradients and moments of the observed step are 386 KiB, staging comes on top.
        for share in (0.45, 0.6):
            session, _ = managed(WarmUp(device_memory=SIZE, host_memory="1MiB", host_share=share), num_steps=1)
            host = tier(session, "host")
            assert host.budget_bytes == int(share * 1024 * KB)
            assert host.is_within_budget
            session.close()

    def test_too_little(self) -> None:
        with pytest.raises(LowtideError, match=r"host .*budget|budget.* host|host tier") as caught:
            managed(WarmUp(device_memory=SIZE, host_memory="1MiB", host_share=0.35))
        assert isinstance(caught.value, BudgetError | PlanError)

    def test_the_state_is_counted_where_it_is(self) -> None:
        weights = NUM_BLOCKS * BLOCK_BYTES
        peaks = {}
        for site in ("host", "device"):
            session, _ = by_hand(1, update={"*": site, "": "device"})
            peaks[site] = tier(session, "host").peak_bytes
            session.close()
        # Gradients and both moments, beside the weights; staging is for the host's gradients.
        assert peaks["device"] == weights
        assert 4 * weights < peaks["host"] < 4.5 * weights


class TestMarginShare:
    def test_it_is_what_state_and_gradients_take_of_the_margin(self) -> None:
        on_device, state = {}, {}
        for share in (0.0, 0.5, 1.0):
            session, _ = managed(WarmUp(device_memory="500KiB", margin_share=share), num_steps=4)
            on_device[share] = num_on_device(session.plan)
            state[share] = device_bytes_beside_chunks(session)
            assert tier(session, "device").is_within_budget
            session.close()
        assert on_device[0.0] == 0
        assert state[0.0] == 0
        assert 0 < on_device[0.5] < on_device[1.0]
        # Two moments of each block that the device updates.
        assert state[0.5] == 2 * on_device[0.5] * BLOCK_BYTES
        assert state[1.0] == 2 * on_device[1.0] * BLOCK_BYTES


class TestMonitorMode:
    def test_boundaries_miss_what_rises_and_falls_inside_a_module(self) -> None:
        seen, sites = {}, {}
        for mode in MonitorMode:
            session, _ = managed(WarmUp(device_memory="450KiB", monitor=mode), num_steps=3)
            seen[mode] = max(sample.other_bytes for sample in session.observed)
            sites[mode] = num_on_device(session.plan)
            session.close()
        # In backward a block has the gradient of its inner rows beside them: 32 KiB that are gone at its end.
        assert seen[MonitorMode.BOUNDARIES] < seen[MonitorMode.PEAKS]
        assert sites[MonitorMode.BOUNDARIES] > sites[MonitorMode.PEAKS]


class TestPrefetch:
    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_each_group_ahead_takes_its_bytes(self, depth: int) -> None:
        session, _ = by_hand(3, prefetch_depth=depth)
        assert tier(session, "device chunks").peak_bytes == REST_BYTES + (depth + 1) * BLOCK_BYTES
        session.close()

    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_the_copy_is_told_that_many_groups_ahead(self, depth: int) -> None:
        # Updates on the device: a group that the host is still updating is not fetched ahead.
        session, _ = by_hand(3, prefetch_depth=depth, update="device")
        spans = session.timeline().spans
        session.close()
        last = max(span.step for span in spans)
        # In the order in which they were told; a group's computation is told when it has run.
        told = [
            (span.reason or span.lane, span.name.partition("/")[0])
            for span in spans
            if span.step == last and span.phase == "forward" and not span.name.startswith("wait:")
        ]
        for index in range(3, NUM_BLOCKS):
            copy = told.index((Reason.FETCH_WEIGHTS, f"blocks.{index}"))
            before = [number for number in range(index) if told.index((Lane.COMPUTE, f"blocks.{number}")) > copy]
            assert before == list(range(index - depth, index))


class TestWindowMemory:
    def test_more_room_means_fewer_copies(self) -> None:
        found = {}
        for num_blocks in (1, 2, 4, 6):
            session, _ = by_hand(4, window_memory=num_blocks * BLOCK_BYTES, prefetch_depth=0)
            assert tier(session, "device chunks").peak_bytes == REST_BYTES + num_blocks * BLOCK_BYTES
            found[num_blocks] = num_fetches(session)
            session.close()
        assert found[1] > found[2] > found[4] > found[6]
        # With room for all, each comes once a step: the host changes it in between.
        assert found[6] == 4 * NUM_BLOCKS

    def test_too_little(self) -> None:
        with pytest.raises(PlanError, match="window_memory is 8.0 KiB"):
            by_hand(1, window_memory="8KiB")


class TestChunkSize:
    def test_smaller_chunks_are_more_copies_of_the_same_bytes(self) -> None:
        moved, losses = {}, {}
        for chunk_bytes in (None, 8 * KB):
            layout = lay_out(find_groups(Stack()), chunk_bytes=chunk_bytes)
            session, losses[chunk_bytes] = managed(lowtide.make_plan(layout), num_steps=3, device="cpu")
            rows = [row for row in session.stats().moved if row.reason is Reason.FETCH_WEIGHTS]
            moved[chunk_bytes] = (rows[0].num_bytes, rows[0].num_copies)
            session.close()
        # The search finds 16 KiB: a whole block.
        assert moved[8 * KB][0] == moved[None][0]
        assert moved[8 * KB][1] == 2 * moved[None][1]
        assert losses[8 * KB] == losses[None]


class TestDefragmentation:
    """`defragment_every`: how often the host arena is pushed together."""

    @pytest.fixture
    def holes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sessions begin with a hole at the start of their arena."""

        def with_hole(mover: Any, worker: Any, num_bytes: int, *args: Any, **settings: Any) -> HostPool:
            pool = HostPool(mover, worker, num_bytes + 4096, *args, **settings)
            pool.allocate("hole", 4096)
            return pool

        monkeypatch.setattr(plan_run_module, "HostPool", with_hole)

    @staticmethod
    def arena_after(num_steps: int, **settings: Any) -> tuple[ArenaCounts, lowtide.Session, list[float]]:
        session, losses = by_hand(0, **settings)
        session._open()._pool.free("hole")
        assert session.optimizer is not None
        losses += steps(session.model, session.optimizer, num_steps)
        counts = session._open()._pool.counts()[1]
        session.close()
        return counts, session, losses

    @pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
    @pytest.mark.usefixtures("holes")
    def test_every_so_many_steps(self, schedule: str) -> None:
        model = Stack()
        expected = steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4)
        found = {}
        for every in (0, 3, 5, 1):
            found[every], session, losses = self.arena_after(4, defragment_every=every, schedule=schedule)
            assert_same(model, session.model, expected, losses)
        assert (found[0].num_defragmentations, found[0].moved_bytes) == (0, 0)
        assert found[5].num_defragmentations == 0
        weights = NUM_BLOCKS * BLOCK_BYTES + REST_BYTES
        for every in (3, 1):
            assert found[every].num_defragmentations == 1, "then there is no hole left"
            assert found[every].moved_bytes == weights * (2 if schedule == "deferred" else 1)

    def test_kept_buffers_are_let_go(self) -> None:
        kept, tidied = (stats_of(4, schedule="in_backward", defragment_every=every).cache for every in (0, 1))
        assert kept.held_bytes > 0
        assert tidied.held_bytes == 0


def test_a_loop_that_never_looks_at_a_gradient_leaves_nothing_behind() -> None:
    session, _ = by_hand(6)
    groups = session._open()._groups.values()
    # The copy and the update of the last step.
    gradients = [managed.host_gradient for group in groups for managed in group.members]
    assert max(len(gradient.pending) for gradient in gradients if gradient is not None) <= 2
    session.close()
