"""RankCosts: bytes against what sessions count and against parts laid out by hand, times of steps by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.hardware.links import BETWEEN, INSIDE, Cluster, Operation, traffic
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.planning import rank_costs as module
from lowtide.planning.estimate import Estimate
from lowtide.planning.lanes import GroupChoice, Placement
from lowtide.planning.placement import is_trained, parts_by_chunk
from lowtide.planning.plan import Collective, Schedule, Sharding, Site, Weights
from lowtide.planning.rank_costs import GroupShare, RankCosts, bytes_between_ranks, costs_in, judged_bytes, rank_costs
from lowtide.planning.simulator import Simulator, lane_rates, simulate
from lowtide.planning.step_costs import GroupCosts, StepCosts
from lowtide.planning.timeline import Lane, Reason
from lowtide.runtime.passes.exchange import ALIGNMENT
from tests.planning.test_simulator import BYTES, NUM_GROUPS, RATES, place, step
from tests.ranks import on_ranks

CLUSTER = Cluster(inside=INSIDE["nvlink4"], between=BETWEEN["infiniband-ndr"], per_node=4, adapters=4)
NAMES = [f"g{index}" for index in range(NUM_GROUPS)]


class Net(nn.Module):
    """Sizes that no alignment divides, a tied table, frozen weights, and two types in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)) for _ in range(3))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.scale.sum().float()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLANS: dict[str, dict[str, Any]] = {
    "resident": {"weights": "resident"},
    "streamed": {"weights": "streamed", "update": "host"},
    "in backward": {"weights": "streamed", "update": "device", "schedule": "in_backward"},
}


def sent_in_two_steps(rank: int) -> dict[str, tuple[int, int]]:
    """By plan, what a session has counted, and what is predicted."""
    found = {}
    for name, words in PLANS.items():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        plan = lowtide.make_plan(model, **words)
        layout = lay_out(find_groups(model))
        backwards = 2 if name == "streamed" else 1
        with lowtide.manage(model, optimizer, plan, device="cpu", ranks=dist.group.WORLD) as session:
            for _ in range(2):
                for _ in range(backwards):
                    model(torch.arange(6).view(2, 3) + rank).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ranks = session.stats().ranks
            assert ranks is not None
            counted = ranks.sent_bytes
        predicted = bytes_between_ranks(plan, layout, num_ranks=2, rank=rank, backwards=backwards)
        assert sum(predicted.values()) == predicted[Operation.ALL_REDUCE]
        found[name] = counted, 2 * predicted[Operation.ALL_REDUCE]
    return found


def test_predicted_bytes_are_those_that_sessions_send() -> None:
    for answer in on_ranks(sent_in_two_steps, 2):
        assert answer.keys() == PLANS.keys()
        for counted, predicted in answer.values():
            assert counted == predicted > 0


def test_buckets_are_aligned_as_those_that_are_sent() -> None:
    assert module.BUCKET_ALIGNMENT == ALIGNMENT


def layout_of(shards: int) -> Layout:
    return lay_out(find_groups(Net()), shards=shards)


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("collective", Collective)
def test_bytes_are_those_of_the_parts_laid_out_by_hand(shards: int, num_ranks: int, collective: Collective) -> None:
    """Rows of a bucket are built from the parts: gradients, then a number for each parameter, in whole pieces of 64 bytes."""
    layout = layout_of(shards)
    words = {"*": "streamed", "blocks.0": "resident", "blocks.2": "sharded"}
    plan = lowtide.make_plan(
        layout,
        weights=words,
        update={"*": "host", "blocks.2": "device"},
        sharding=Sharding(shards=shards, collective=collective),
    )
    parts = parts_by_chunk(plan, layout)
    fetches = {group.name: number for number, group in enumerate(layout.groups)}
    for rank in range(num_ranks):
        expected = dict.fromkeys(Operation, 0)
        trained = [
            name
            for group in layout.groups
            if group.name != "blocks.0"
            for name in group.parameters
            if name.requires_grad
        ]
        expected[Operation.ALL_REDUCE] += 8 * len(trained)  # their squared norms
        for chunk in layout.chunks:
            specs = [span.parameter for span in chunk.spans]
            if chunk.group == "blocks.0":
                elements = sum(math.ceil(math.prod(spec.shape) / 16) * 16 + 1 for spec in specs)
                expected[Operation.ALL_REDUCE] += 4 * elements
                continue
            size = specs[0].dtype.itemsize
            gathered = fetches[chunk.group] * sum(part.nbytes for part in parts[chunk.name])
            if collective is Collective.ONE_TO_ALL:
                expected[Operation.BROADCAST] += gathered
                if specs[0].requires_grad:
                    expected[Operation.REDUCE] += chunk.nbytes
                    expected[Operation.ALL_REDUCE] += size * len(specs)
                    is_owner = parts[chunk.name][rank % shards].nbytes > 0
                    expected[Operation.ALL_REDUCE] += chunk.nbytes if is_owner and num_ranks > shards else 0
                continue
            expected[Operation.ALL_GATHER] += gathered
            if specs[0].requires_grad:
                rows = [math.ceil((part.nbytes + size * len(specs)) / 64) * 64 for part in parts[chunk.name]]
                expected[Operation.REDUCE_SCATTER] += sum(rows)
                expected[Operation.ALL_REDUCE] += rows[0] if num_ranks > shards else 0
        found = bytes_between_ranks(plan, layout, num_ranks=num_ranks, rank=rank, fetches=fetches)
        assert found == expected
    assert not any(bytes_between_ranks(lowtide.make_plan(Net()), layout_of(1), num_ranks=1).values())


def test_ranks_that_the_shards_do_not_divide_are_refused() -> None:
    layout = layout_of(4)
    plan = lowtide.make_plan(layout, sharding=Sharding(shards=4))
    with pytest.raises(ConfigError, match="the plan is for 4 shards, and there are 6 ranks; give a multiple of 4"):
        bytes_between_ranks(plan, layout, num_ranks=6)


def costs_of(layout: Layout) -> StepCosts:
    """The costs of a step that does nothing, with state of twice the weights."""
    groups = {}
    for group in layout.groups:
        trained = sum(each.nbytes for each in group.parameters if each.requires_grad)
        groups[group.name] = GroupCosts(
            name=group.name,
            kind=0,
            weight_bytes=0,
            trained_bytes=0,
            state_bytes=2 * trained,
            num_trained=1,
            policies=("keep",),
        )
    return costs_in(StepCosts(uses=(), groups=groups, start_bytes=0), layout)


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("collective", Collective)
def test_a_rank_keeps_as_much_as_the_one_that_keeps_most(shards: int, collective: Collective) -> None:
    layout = layout_of(shards)
    sharding = Sharding(shards=shards, collective=collective)
    plan = lowtide.make_plan(layout, sharding=sharding)
    parts = parts_by_chunk(plan, layout)
    ranks = rank_costs(costs_of(layout), layout, CLUSTER, shards, sharding, under_way=3)

    def most(chunks: list[str]) -> int:
        return max(sum(parts[name][rank].nbytes for name in chunks) for rank in range(shards))

    trained = [chunk.name for chunk in layout.chunks if is_trained(chunk)]
    largest = max(chunk.nbytes for chunk in layout.chunks if is_trained(chunk))
    # Each group's part is rounded up to a byte.
    num_groups = len(layout.groups)
    assert 0 <= sum(share.trained_bytes for share in ranks.spread.values()) - most(trained) <= num_groups
    assert ranks.under_way_bytes == 3 * largest
    if collective is Collective.GATHER:
        assert sum(share.weight_bytes for share in ranks.spread.values()) == most([*parts])
        for name, share in ranks.spread.items():
            assert share.weight_bytes == sum(parts[chunk.name][0].nbytes for chunk in layout.chunks_of(name))
    assert {name: share.weight_bytes for name, share in ranks.whole.items()} == {
        group.name: sum(chunk.nbytes for chunk in layout.chunks_of(group.name)) for group in layout.groups
    }


@pytest.mark.parametrize(("num_ranks", "shards"), [(4, 4), (8, 8), (8, 4), (16, 4), (16, 2), (16, 8)])
@pytest.mark.parametrize("collective", Collective)
def test_times_and_bytes_are_sums_over_chunks(num_ranks: int, shards: int, collective: Collective) -> None:
    layout = layout_of(shards)
    sharding = Sharding(shards=shards, collective=collective)
    ranks = rank_costs(costs_of(layout), layout, CLUSTER, num_ranks, sharding, under_way=3)
    sharers, _ = CLUSTER.split(num_ranks, shards)
    together = Operation.ALL_GATHER if collective is Collective.GATHER else Operation.BROADCAST
    for name, share in ranks.spread.items():
        sizes = [chunk.nbytes for chunk in layout.chunks_of(name)]
        assert share.gather_s == pytest.approx(sum(CLUSTER.seconds(together, size, sharers) for size in sizes))
        assert share.gather_link_bytes == sum(traffic(together, size, shards).total_bytes // shards for size in sizes)
        assert (share.reduce_s > 0) == (share.trained_bytes > 0)
    plan = lowtide.make_plan(layout, sharding=sharding)
    once = dict.fromkeys(ranks.spread, 1)
    predicted = [
        bytes_between_ranks(plan, layout, num_ranks=num_ranks, rank=rank, fetches=once) for rank in range(shards)
    ]
    average = sum(sum(each.values()) for each in predicted) / shards - judged_bytes(plan, layout)
    counted = sum(share.gather_bytes + share.reduce_bytes for share in ranks.spread.values())
    assert average - len(ranks.spread) <= counted <= average


def test_device_and_host_bytes_are_arithmetic_on_parts() -> None:
    """Weights, state and gradients are cut, and the window and what is on its way are not."""
    found: dict[tuple[int, Site], tuple[int, int]] = {}
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    size = 4 * 256 * 256
    for shards in (2, 4, 8):
        layout = lay_out(find_groups(model), shards=shards)
        costs = costs_of(layout)
        ranks = rank_costs(costs, layout, CLUSTER, shards, Sharding(shards=shards), under_way=3)
        estimate = Estimate(costs, layout, ranks)
        for site, weights in ((Site.DEVICE, Weights.SHARDED), (Site.HOST, Weights.STREAMED)):
            groups = {name: GroupChoice(weights=weights, site=site) for name in costs.groups}
            placement = Placement(
                groups=groups,
                schedule=Schedule.DEFERRED,
                prefetch_depth=1,
                window_bytes=estimate.window_bytes(groups, 1),
                staging_bytes=0,
            )
            assert placement.window_bytes == 2 * size
            assert estimate.highest_bytes(placement) == 3 * size  # on their way; no use of the step has any
            found[shards, site] = estimate.held_bytes(placement), estimate.host_bytes(placement)[0]
        assert found[shards, Site.DEVICE] == (2 * size + (4 * size + 8 * size) // shards, 0)
        assert found[shards, Site.HOST] == (2 * size, (4 + 4 + 8) * size // shards)


def by_hand(
    *, gather_s: float = 0.0, reduce_s: float = 0.0, shards: int = 4, takes_host_link: bool = False
) -> RankCosts:
    """Ranks of the simulator's tests: six groups of 100 bytes."""
    share = GroupShare(
        weight_bytes=BYTES,
        trained_bytes=BYTES,
        state_bytes=0,
        reduce_s=reduce_s,
        reduce_bytes=BYTES,
        reduce_link_bytes=BYTES,
    )
    part = replace(
        share,
        weight_bytes=BYTES // shards,
        trained_bytes=BYTES // shards,
        gather_s=gather_s,
        gather_bytes=BYTES,
        gather_link_bytes=BYTES * (shards - 1) // shards,
    )
    return RankCosts(
        num_ranks=shards,
        sharding=Sharding(shards=shards),
        whole=dict.fromkeys(NAMES, share),
        spread=dict.fromkeys(NAMES, part),
        under_way_bytes=0,
        takes_host_link=takes_host_link,
    )


RESIDENT = place(Weights.RESIDENT, Site.DEVICE, Schedule.DEFERRED)
SHARDED = place(Weights.SHARDED, Site.DEVICE, Schedule.DEFERRED)
ON_HOSTS = place(Weights.STREAMED, Site.HOST, Schedule.DEFERRED)
ALONE_S = NUM_GROUPS * 30.0


def test_sums_hide_behind_the_backward_but_the_last() -> None:
    simulated = simulate(step(), RESIDENT, RATES, by_hand(reduce_s=5.0))
    assert simulated.step_s == pytest.approx(ALONE_S + 5.0, abs=1e-4)
    assert simulated.busy_s[Lane.BETWEEN_RANKS] == pytest.approx(NUM_GROUPS * 5.0)
    assert simulated.times.link_bytes == NUM_GROUPS * BYTES


def test_sums_that_are_slower_than_the_backward_bound_the_step() -> None:
    """The first begins when the first of six backwards has ended, and they follow each other."""
    simulated = simulate(step(), RESIDENT, RATES, by_hand(reduce_s=25.0))
    assert simulated.step_s == pytest.approx(60.0 + 20.0 + NUM_GROUPS * 25.0, abs=1e-4)
    assert simulated.timeline.exposed_copy_s() == pytest.approx(simulated.step_s - ALONE_S, abs=1e-4)


def test_no_more_than_one_group_is_on_its_way_beside_a_backward() -> None:
    """The computation waits for the sum of a group when the next one's gradients are there."""
    simulated = simulate(step(), RESIDENT, RATES, by_hand(reduce_s=25.0))
    sums = [span for span in simulated.timeline.spans if span.reason is Reason.SUM]
    backwards = [
        span
        for span in simulated.timeline.spans
        if span.lane is Lane.COMPUTE and span.phase == "backward" and span.waits_for is None
    ]
    for done, (_, following) in zip(sums, pairwise(backwards[1:]), strict=False):
        assert following.start_s >= done.end_s - 1e-9


def test_parts_are_gathered_while_others_compute() -> None:
    """Only the first gather has nothing before it; two of six groups stay in the window at the turn."""
    simulated = simulate(step(), SHARDED, RATES, by_hand(gather_s=4.0, reduce_s=5.0))
    assert simulated.step_s == pytest.approx(ALONE_S + 4.0 + 5.0, abs=1e-4)
    gathers = [span for span in simulated.timeline.spans if span.reason is Reason.GATHER]
    assert len(gathers) == 2 * NUM_GROUPS - 2
    assert simulated.busy_s[Lane.TO_DEVICE] == 0.0
    assert simulated.times.link_bytes == len(gathers) * 75 + NUM_GROUPS * BYTES


def test_parts_on_hosts_come_to_the_device_and_are_then_gathered() -> None:
    """A fourth of 100 bytes takes 0.25 s at 100 bytes a second; the gradient's part goes back, and is updated there."""
    ranks = by_hand(gather_s=4.0, reduce_s=5.0)
    simulated = simulate(step(), ON_HOSTS, RATES, ranks)
    update_s = 3 * 25 / RATES.host_update_bytes_per_s
    assert simulated.step_s == pytest.approx(ALONE_S + 5.0 + 0.25 + update_s + 0.25 + 4.0, abs=1e-4)
    for fetched, gathered in zip(
        [span for span in simulated.timeline.spans if span.reason is Reason.FETCH_WEIGHTS],
        [span for span in simulated.timeline.spans if span.reason is Reason.GATHER],
        strict=True,
    ):
        assert fetched.name == gathered.name
        assert fetched.num_bytes == 25
        assert gathered.start_s >= fetched.end_s


def test_collectives_over_the_host_link_hold_copies_up() -> None:
    costs = step(1.0, 1.0)
    apart = simulate(costs, ON_HOSTS, RATES, by_hand(gather_s=4.0, reduce_s=5.0))
    shared = simulate(costs, ON_HOSTS, RATES, by_hand(gather_s=4.0, reduce_s=5.0, takes_host_link=True))
    assert shared.step_s > apart.step_s
    spans = [span for span in shared.timeline.spans if span.lane in (Lane.TO_DEVICE, Lane.BETWEEN_RANKS)]
    ordered = sorted(spans, key=lambda span: span.start_s)
    assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(ordered))


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("placement", [RESIDENT, SHARDED, ON_HOSTS], ids=["resident", "sharded", "on hosts"])
@pytest.mark.parametrize(("gather_s", "reduce_s"), [(0.0, 0.0), (4.0, 5.0), (30.0, 1.0), (1.0, 40.0)])
def test_no_step_is_faster_than_its_bound_and_lanes_work_in_order(
    schedule: Schedule, placement: Placement, gather_s: float, reduce_s: float
) -> None:
    ranks = by_hand(gather_s=gather_s, reduce_s=reduce_s)
    placement = replace(placement, schedule=schedule)
    simulator = Simulator(step(), RATES, ranks)
    simulated = simulator.step(placement)
    assert simulated.step_s >= simulator.least_s(placement) - 1e-9
    for lane in Lane:
        spans = [span for span in simulated.timeline.spans if span.lane is lane]
        ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s))
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(ordered))


def test_one_rank_is_simulated_as_without_ranks() -> None:
    costs = step(2.0, 3.0, state_bytes=BYTES)
    share = GroupShare(weight_bytes=BYTES, trained_bytes=BYTES, state_bytes=BYTES)
    alone = RankCosts(
        num_ranks=1,
        sharding=None,
        whole=dict.fromkeys(NAMES, share),
        spread={},
        under_way_bytes=0,
        takes_host_link=False,
    )
    for placement in (RESIDENT, ON_HOSTS, place(Weights.STREAMED, Site.DEVICE, Schedule.DEFERRED)):
        assert simulate(costs, placement, RATES, alone).times.busy_s == simulate(costs, placement, RATES).times.busy_s


def test_ranks_of_a_host_share_its_rate_of_updates() -> None:
    from lowtide.hardware import UpdateKind, find_hardware

    hardware = find_hardware("h200")
    alone, shared = (lane_rates(hardware, UpdateKind.EXACT, ranks_on_host=count) for count in (1, 8))
    assert shared.host_update_bytes_per_s == alone.host_update_bytes_per_s / 8
    assert shared.host_update_beside_copies_bytes_per_s == alone.host_update_beside_copies_bytes_per_s / 8
    assert shared.to_device_bytes_per_s == alone.to_device_bytes_per_s
    measured = replace(hardware, host=replace(hardware.host, memory_bytes_per_s=160e9))
    narrow = lane_rates(measured, UpdateKind.EXACT, ranks_on_host=8)
    assert narrow.to_device_bytes_per_s == narrow.to_host_bytes_per_s == 10e9
