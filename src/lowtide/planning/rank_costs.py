"""RankCosts: what ranks keep of a step's groups and tell each other in it, as a pure function of plan, layout and cluster.

Bytes that are *sent* are counted as sessions count them, in `session.stats().ranks.sent_bytes`: those of the tensor that a
collective is about, once on each rank that takes part. For an all-reduce these are the bucket's; for an all-gather all of what is
gathered, for a reduce-scatter all of what is summed; for a broadcast and a reduce the tensor's, on all ranks. What that puts on
the links depends on the algorithm, and `hardware.links.traffic` says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from lowtide.errors import ConfigError
from lowtide.hardware.links import Cluster, Operation, RankGroup, traffic
from lowtide.memory.chunk import ChunkSpec, Layout
from lowtide.memory.parts import owners
from lowtide.planning.placement import group_sizes, is_trained, parts_by_chunk
from lowtide.planning.plan import COMING, Collective, Plan, Schedule, Sharding, Weights
from lowtide.planning.step_costs import GroupCosts, StepCosts

BUCKET_ALIGNMENT = 64
"""Bytes of which each gradient's place in a bucket is a multiple, and each rank's part of one, as in `runtime.passes.exchange`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """What one rank has of a group, and what the group's collectives take."""

    weight_bytes: int
    """That it keeps between two uses."""
    trained_bytes: int
    """The part of them that it updates."""
    state_bytes: int
    gather_s: float = 0.0
    """Until the group is whole in its window, once this rank's part is on the device."""
    gather_bytes: int = 0
    """Sent for it, as sessions count."""
    reduce_s: float = 0.0
    """Until the group's gradients are those of all ranks."""
    reduce_bytes: int = 0
    gather_link_bytes: int = 0
    """On the links, from each rank on average."""
    reduce_link_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """What each rank keeps of each group, and the time of its collectives."""

    num_ranks: int
    sharding: Sharding | None
    whole: Mapping[str, GroupShare]
    """The shares of groups that every rank has all of."""
    spread: Mapping[str, GroupShare]
    """The shares of groups that are spread over the ranks; none without sharding."""
    under_way_bytes: int
    """Device bytes of gradients on their way between ranks, at most."""
    takes_host_link: bool
    """Whether copies between device and host wait while a collective runs."""

    def is_spread(self, weights: Weights) -> bool:
        """Whether groups with such weights are spread."""
        return self.sharding is not None and weights in COMING

    def of(self, name: str, weights: Weights) -> GroupShare:
        """What a rank has of a group."""
        return (self.spread if self.is_spread(weights) else self.whole)[name]


def bucket_bytes(chunk: ChunkSpec) -> list[int]:
    """Bytes of the buckets in which a chunk's gradients are averaged: one for each type, with a number for each parameter."""
    elements: dict[torch.dtype, int] = {}
    for span in chunk.spans:
        spec = span.parameter
        if spec.requires_grad:
            unit = max(1, BUCKET_ALIGNMENT // spec.dtype.itemsize)
            elements[spec.dtype] = elements.get(spec.dtype, 0) + -(-math.prod(spec.shape) // unit) * unit + 1
    return [count * dtype.itemsize for dtype, count in elements.items()]


def row_bytes(chunk: ChunkSpec, sharding: Sharding) -> int:
    """Bytes of the gradients that one rank gets of a chunk that is spread: its part, or all of it for its only owner.

    They lie as the weights do. Behind each of several parts there is a number for each parameter. Chunks of a layout with shards
    have one type.
    """
    if sharding.collective is Collective.ONE_TO_ALL:
        return chunk.nbytes
    part = chunk.nbytes // sharding.shards + _flag_bytes(chunk)
    return -(-part // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT


def _flag_bytes(chunk: ChunkSpec) -> int:
    """One number for each parameter, in their type: whether a rank has a gradient for it."""
    return sum(span.parameter.dtype.itemsize for span in chunk.spans)


def _sums(chunk: ChunkSpec, sharding: Sharding) -> list[tuple[Operation, int, bool]]:
    """What the gradients of a chunk that is spread take: operations, their bytes, and whether all ranks take part in them."""
    row = row_bytes(chunk, sharding)
    if sharding.collective is Collective.GATHER:
        return [(Operation.REDUCE_SCATTER, sharding.shards * row, False)]
    return [(Operation.REDUCE, row, False), (Operation.ALL_REDUCE, _flag_bytes(chunk), True)]


def judged_bytes(plan: Plan, layout: Layout) -> int:
    """Bytes that ranks which share weights send in a `step()` to judge all gradients alike, of which each has parts.

    Deferred, the squared norm of each parameter in double; in backward, whether a rank has found one that is not finite.
    """
    spread = {group.name for group in plan.groups if plan.sharding is not None and group.weights in COMING}
    trained = [chunk for chunk in layout.chunks if chunk.group in spread and is_trained(chunk)]
    if plan.schedule is Schedule.IN_BACKWARD:
        return 4 if trained else 0
    return 8 * sum(len(chunk.spans) for chunk in trained)


def bytes_between_ranks(
    plan: Plan,
    layout: Layout,
    *,
    num_ranks: int,
    rank: int = 0,
    backwards: int = 1,
    fetches: Mapping[str, int] | None = None,
) -> dict[Operation, int]:
    """Bytes that one rank sends in a step, by operation, counted as sessions count them.

    All trained parameters have a gradient on some rank, and buffers that forwards copy from rank 0 are not counted.

    Args:
        plan: The plan of each rank.
        layout: The model's, with as many shards as the plan.
        num_ranks: All of them; a multiple of the shards.
        rank: Whose bytes. They differ only where chunks with one owner are averaged over replicas.
        backwards: Backwards outside of `no_sync` in the step, whose gradients are sent.
        fetches: How often the window of each group that is spread comes together in the step. By default for each forward
            and for each backward; a group that stays in window memory between the two comes once.

    Raises:
        ConfigError: The shards do not divide the ranks.
    """
    shards = 1 if plan.sharding is None else plan.sharding.shards
    if num_ranks % shards:
        raise ConfigError(
            f"the plan is for {shards} shards, and there are {num_ranks} ranks; give a multiple of {shards}",
            key="ranks",
        )
    sent = dict.fromkeys(Operation, 0)
    if num_ranks == 1:
        return sent
    sent[Operation.ALL_REDUCE] += judged_bytes(plan, layout)
    parts, weights = parts_by_chunk(plan, layout), {group.name: group.weights for group in plan.groups}
    for chunk in layout.chunks:
        if plan.sharding is None or weights[chunk.group] not in COMING:
            sent[Operation.ALL_REDUCE] += backwards * sum(bucket_bytes(chunk))
            continue
        is_gathered = plan.sharding.collective is Collective.GATHER
        num_fetches = 2 * backwards if fetches is None else fetches.get(chunk.group, 0)
        sent[Operation.ALL_GATHER if is_gathered else Operation.BROADCAST] += num_fetches * chunk.nbytes
        if not is_trained(chunk):
            continue
        for operation, num_bytes, _ in _sums(chunk, plan.sharding):
            sent[operation] += backwards * num_bytes
        if num_ranks > shards and parts[chunk.name][rank % shards].nbytes:
            sent[Operation.ALL_REDUCE] += backwards * row_bytes(chunk, plan.sharding)
    return sent


def rank_costs(
    costs: StepCosts,
    layout: Layout,
    cluster: Cluster,
    num_ranks: int,
    sharding: Sharding | None,
    *,
    under_way: int,
) -> RankCosts:
    """What ranks keep of a step's groups, and how long their collectives take.

    With one owner for each chunk, ranks keep different groups. Then a rank is meant that has as much in all as the one that has
    most, spread evenly over the groups.

    Args:
        costs: The step's; see `costs_in`.
        layout: The model's, with as many shards.
        cluster: The nodes and links.
        num_ranks: All of them.
        sharding: None where every rank has the whole model.
        under_way: Chunks whose gradients may be on their way between ranks at a time.

    Raises:
        ConfigError: The ranks do not fill their nodes, or the shards do not divide them.
    """
    everyone = cluster.all_of(num_ranks)
    chunks: dict[str, list[ChunkSpec]] = {group.name: [] for group in layout.groups}
    for chunk in layout.chunks:
        chunks[chunk.group].append(chunk)

    def averaged(name: str) -> GroupShare:
        sizes = [num_bytes for chunk in chunks[name] for num_bytes in bucket_bytes(chunk)]
        return _reduced(
            _all_of(costs.groups[name]), cluster, [(Operation.ALL_REDUCE, each, everyone) for each in sizes]
        )

    spread: dict[str, GroupShare] = {}
    if sharding is not None:
        sharers, replicas = cluster.split(num_ranks, sharding.shards)
        held, trained = _busiest(layout.chunks, sharding), _busiest(filter(is_trained, layout.chunks), sharding)
        for name, own in chunks.items():
            share = _part_of(costs.groups[name], held, trained)
            spread[name] = _spread(share, cluster, sharding, own, (sharers, replicas, everyone))
    largest = max((chunk.nbytes for chunk in layout.chunks if is_trained(chunk)), default=0)
    return RankCosts(
        num_ranks=num_ranks,
        sharding=sharding,
        whole={name: averaged(name) for name in chunks},
        spread=spread,
        under_way_bytes=under_way * largest if num_ranks > 1 else 0,
        takes_host_link=cluster.inside.is_host_link and everyone.per_node > 1,
    )


def costs_in(costs: StepCosts, layout: Layout) -> StepCosts:
    """The costs of a step whose groups lie in another layout, with padding for its shards."""
    sizes = group_sizes(layout)
    trained = dict.fromkeys(sizes, 0)
    for chunk in filter(is_trained, layout.chunks):
        trained[chunk.group] += chunk.nbytes
    groups = {
        name: replace(group, weight_bytes=sizes[name], trained_bytes=trained[name])
        for name, group in costs.groups.items()
    }
    return replace(costs, groups=groups)


def _busiest(chunks: Iterable[ChunkSpec], sharding: Sharding) -> tuple[int, int]:
    """Bytes of the rank that keeps most of some chunks, and of all of them."""
    chunks = list(chunks)
    total = sum(chunk.nbytes for chunk in chunks)
    if sharding.collective is Collective.GATHER:
        return total // sharding.shards, total
    held = [0] * sharding.shards
    owner = owners(chunks, sharding.shards)
    for chunk in chunks:
        held[owner[chunk.name]] += chunk.nbytes
    return max(held), total


def _all_of(group: GroupCosts) -> GroupShare:
    return GroupShare(weight_bytes=group.weight_bytes, trained_bytes=group.trained_bytes, state_bytes=group.state_bytes)


def _part_of(group: GroupCosts, held: tuple[int, int], trained: tuple[int, int]) -> GroupShare:
    def part(num_bytes: int, share: tuple[int, int]) -> int:
        return -(-num_bytes * share[0] // share[1]) if num_bytes else 0

    return GroupShare(
        weight_bytes=part(group.weight_bytes, held),
        trained_bytes=part(group.trained_bytes, trained),
        state_bytes=part(group.state_bytes, trained),
    )


def _spread(
    share: GroupShare,
    cluster: Cluster,
    sharding: Sharding,
    chunks: list[ChunkSpec],
    groups: tuple[RankGroup, RankGroup, RankGroup],
) -> GroupShare:
    sharers, replicas, everyone = groups
    gather = Operation.ALL_GATHER if sharding.collective is Collective.GATHER else Operation.BROADCAST
    share = replace(
        share,
        gather_s=sum(cluster.seconds(gather, chunk.nbytes, sharers) for chunk in chunks),
        gather_bytes=sum(chunk.nbytes for chunk in chunks),
        gather_link_bytes=sum(_link_bytes(gather, chunk.nbytes, sharers) for chunk in chunks),
    )
    sums: list[tuple[Operation, int, RankGroup]] = []
    averaged: list[tuple[Operation, int, RankGroup]] = []
    for chunk in filter(is_trained, chunks):
        sums += [
            (each, num_bytes, everyone if is_all else sharers) for each, num_bytes, is_all in _sums(chunk, sharding)
        ]
        if replicas.size > 1:
            averaged.append((Operation.ALL_REDUCE, row_bytes(chunk, sharding), replicas))
    # Where a chunk has one owner, the others that it shares weights with wait while it averages; they send nothing.
    num_waiting = 1 if sharding.collective is Collective.GATHER else sharding.shards
    own, both = _reduced(share, cluster, sums), _reduced(share, cluster, averaged)
    return replace(
        share,
        reduce_s=own.reduce_s + both.reduce_s,
        reduce_bytes=own.reduce_bytes + both.reduce_bytes // num_waiting,
        reduce_link_bytes=own.reduce_link_bytes + both.reduce_link_bytes // num_waiting,
    )


def _reduced(share: GroupShare, cluster: Cluster, sums: list[tuple[Operation, int, RankGroup]]) -> GroupShare:
    return replace(
        share,
        reduce_s=sum(cluster.seconds(*each) for each in sums),
        reduce_bytes=sum(num_bytes for _, num_bytes, group in sums if group.size > 1),
        reduce_link_bytes=sum(_link_bytes(*each) for each in sums),
    )


def _link_bytes(operation: Operation, num_bytes: int, group: RankGroup) -> int:
    return traffic(operation, num_bytes, group.size).total_bytes // group.size
