"""The ways to train on several ranks: the code that is printed makes the plan, one rank is planned as ever, bad input is told."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ConfigError
from lowtide.hardware import find_hardware
from lowtide.hardware.links import BETWEEN, INSIDE
from lowtide.memory.chunk import lay_out
from lowtide.models import resolve_model
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.planning.rank_costs import bytes_between_ranks, judged_bytes
from lowtide.planning.search import Limits
from lowtide.planning.timeline import Lane, Reason
from lowtide.runtime.plan_problem import PlanProblem
from lowtide.runtime.planner import pose
from lowtide.runtime.rank_ways import RankedWay, RankPlans, RankSettings, code_of, plan_ranks, scaling
from lowtide.units import GiB, MiB


@cache
def posed() -> tuple[PlanProblem, Limits]:
    source = resolve_model("gpt-tiny")
    return pose(
        source.build(torch.bfloat16),
        source.make_batch("8x128"),
        optimizer=torch.optim.AdamW,
        hardware="rtx-4090",
        device_memory="1GiB",
        host_memory="16GiB",
    )


def found_for(count: int, *, device_bytes: int | None = None, **words: Any) -> RankPlans:
    problem, limits = posed()
    limits = limits if device_bytes is None else replace(limits, device_bytes=device_bytes)
    return plan_ranks(problem, limits, RankSettings(count=count, **words))


def named(found: RankPlans) -> dict[str, RankedWay]:
    return {way.way.name: way for way in found.ways}


def test_one_rank_is_planned_as_without_ranks() -> None:
    problem, limits = posed()
    (alone,) = found_for(1).ways
    assert alone.fits
    assert not any(alone.sent_bytes.values())
    assert alone.simulated.busy_s[Lane.BETWEEN_RANKS] == alone.link_bytes == 0
    gaps = int(0.04 * limits.device_bytes)
    costs, beyond = problem.priced
    searched = replace(problem, known=(costs, beyond + gaps)).search.fastest(limits).best
    assert alone.step_s == searched.step_s
    assert alone.candidate.device_bytes == searched.device_bytes


@pytest.mark.parametrize("count", [2, 4, 16, 64])
def test_ways_take_what_their_parts_do(count: int) -> None:
    """Sharded on the device: weights and state of 1 / N, the rest as on two ranks."""
    ways = named(found_for(count, device_bytes=8 * GiB))
    hybrid = {"hybrid, device", "hybrid, host"} if count > 8 else set()
    assert ways.keys() == {
        "data parallel",
        *(f"{way}, {where}" for way in ("sharded", "one to all") for where in ("device", "host")),
        *hybrid,
    }
    problem, _ = posed()
    state_bytes = sum(group.state_bytes for group in problem.priced[0].groups.values())
    plain, sharded, on_hosts = (ways[name].candidate for name in ("data parallel", "sharded, device", "sharded, host"))
    assert plain.host_bytes == sharded.host_bytes == 0
    assert plain.device_bytes - sharded.device_bytes > state_bytes * (1 - 1 / count) - 8 * MiB
    weights = sum(chunk.nbytes for chunk in lay_out(problem.layout.groups, shards=count).chunks)
    # Weights and gradients, and state for each element; two chunks' worth of staging besides.
    largest = max(chunk.nbytes for chunk in lay_out(problem.layout.groups, shards=count).chunks)
    assert 0 <= on_hosts.host_bytes - (2 * weights + state_bytes) // count <= 2 * largest + 8192
    for name, way in ways.items():
        spread = {group.weights for group in way.plan.groups}
        assert way.num_ranks == count
        assert way.tokens_per_s == pytest.approx(count * 8 * 128 / way.step_s)
        if name.endswith(", device"):
            assert spread == {Weights.SHARDED}
        if name.endswith(", host"):
            assert spread == {Weights.STREAMED}


@pytest.mark.parametrize("count", [2, 8, 16])
def test_predicted_bytes_are_those_of_the_simulated_collectives(count: int) -> None:
    for way in found_for(count).ways:
        spans = way.simulated.timeline.spans
        simulated = sum(span.num_bytes for span in spans if span.lane is Lane.BETWEEN_RANKS)
        shards = 1 if way.way.sharding is None else way.way.sharding.shards
        layout = lay_out(posed()[0].layout.groups, chunk_bytes=way.plan.chunk_bytes, shards=shards)
        assert sum(way.sent_bytes.values()) == simulated + judged_bytes(way.plan, layout)
        gathered = [span.name for span in spans if span.reason is Reason.GATHER]
        if way.way.sharding is not None:
            most = bytes_between_ranks(way.plan, layout, num_ranks=count)
            # No group comes together more often than it is used.
            assert all(way.sent_bytes[operation] <= most[operation] for operation in most)
            assert set(gathered) == {group.name for group in way.plan.groups}


@pytest.mark.parametrize("device_bytes", [28 * MiB, 32 * MiB, 38 * MiB, 1 * GiB])
@pytest.mark.parametrize("words", [{}, {"per_node": 2}])
def test_the_printed_code_makes_the_plan(device_bytes: int, words: dict[str, Any]) -> None:
    problem, _ = posed()
    namespace: dict[str, Any] = {"lowtide": lowtide, "model": problem.model}
    num_mixed = 0
    found = found_for(4, device_bytes=device_bytes, **words)
    for way in found.ways:
        code = code_of(way, {"max_grad_norm": 1.0}, {"host_memory": "16GiB"})
        assert "max_grad_norm=1.0, ranks=torch.distributed.group.WORLD)" in code
        if way.way.sharding is None:
            assert "host_memory='16GiB', max_grad_norm" in code
            assert code.startswith(
                f"session = lowtide.prepare(model, optimizer, batch, device_memory='{device_bytes >> 20}MiB'"
            )
            continue
        making, _, managing = code.rpartition("; session = ")
        assert managing.startswith("lowtide.manage(model, optimizer, plan")
        if not way.fits:
            continue
        exec(making, namespace)
        plan = namespace["plan"]
        assert plan.sharding == way.plan.sharding == way.way.sharding
        assert plan.groups == way.plan.groups
        assert (plan.schedule, plan.prefetch_depth) == (way.plan.schedule, way.plan.prefetch_depth)
        assert plan.budgets.device_bytes == device_bytes
        assert plan.budgets.host_bytes == found.limits.host_bytes
        num_mixed += len({group.activation for group in plan.groups if group.name in way.blocks}) > 1
    if device_bytes < GiB:
        assert num_mixed, "blocks with two policies are what is hard to write"


def test_the_code_names_the_schedule() -> None:
    problem, limits = posed()
    limits = replace(limits, schedule=Schedule.IN_BACKWARD)
    ways = named(plan_ranks(problem, limits, RankSettings(count=2)))
    assert "schedule='in_backward'" in code_of(ways["sharded, host"])
    assert "schedule='in_backward'" in code_of(ways["data parallel"])
    assert all(site is Site.DEVICE for group in ways["sharded, device"].plan.groups for site in group.sites)


def test_the_host_is_shared_by_the_ranks_of_a_node() -> None:
    _, limits = posed()
    assert found_for(4).limits.host_bytes == limits.host_bytes // 4
    assert found_for(16).limits.host_bytes == limits.host_bytes // 8
    assert found_for(16, per_node=2).limits.pinned_bytes == limits.pinned_bytes // 2


def test_slower_links_make_slower_steps_of_the_same_bytes() -> None:
    fast, slow = (named(found_for(4, link=link)) for link in ("nvlink4", "pcie3"))
    for name, way in fast.items():
        assert slow[name].step_s >= way.step_s
    assert slow["sharded, device"].sent_bytes == fast["sharded, device"].sent_bytes


def test_nothing_fits_a_device_that_is_too_small() -> None:
    found = found_for(2, device_bytes=20 * MiB)
    assert found.fastest is None
    assert all(way.over_bytes > 0 and not way.fits for way in found.ways)


def test_more_ranks_are_planned_from_one_to_as_many_as_there_are() -> None:
    problem, limits = posed()
    by_count = scaling(problem, limits, RankSettings(count=24, per_node=4, shards=4))
    assert [each.num_ranks for each in by_count] == [1, 2, 4, 8, 16, 24]
    assert "hybrid, device" in named(by_count[-1])
    assert "hybrid, device" not in named(by_count[2])
    held = [named(each)["sharded, device"].candidate.device_bytes for each in by_count[1:]]
    assert held == sorted(held, reverse=True)


def test_defaults_are_those_of_the_device() -> None:
    cluster = RankSettings(count=16).cluster(find_hardware("h200"))
    assert (cluster.inside, cluster.between) == (INSIDE["nvlink4"], BETWEEN["infiniband-ndr"])
    assert (cluster.per_node, cluster.adapters) == (8, 8)
    cluster = RankSettings(count=4).cluster(find_hardware("rtx-4090"))
    assert (cluster.inside, cluster.between) == (INSIDE["pcie4"], BETWEEN["ethernet-100"])
    assert (cluster.per_node, cluster.adapters) == (4, 1)
    given = RankSettings(count=4, link="pcie5", network="25GB", adapters=2, per_node=2).cluster(find_hardware("h200"))
    assert (given.inside, given.between.rate, given.adapters, given.per_node) == (INSIDE["pcie5"], 25e9, 2, 2)


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="ranks.link was given, and no number of ranks; give --ranks as well"):
        RankSettings(link="nvlink4")
    with pytest.raises(ConfigError, match="ranks.count is 0; give a whole number, 1 or more"):
        RankSettings(count=0)
    with pytest.raises(ConfigError, match="--ranks is 2048; plans are made for up to 1024"):
        RankSettings(count=2048)
    with pytest.raises(ConfigError, match="ranks.shards is 8 of 8 ranks; give 2 or more, and fewer than all"):
        RankSettings(count=8, shards=8)
    with pytest.raises(ConfigError, match="12 ranks do not fill nodes of 8; give a multiple of 8"):
        found_for(12)
