"""Links: collectives against rings that pass pieces on one by one, closed forms, and one sentence for what is typed wrongly."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.hardware import find_hardware
from lowtide.hardware.links import (
    BETWEEN,
    COLLECTIVE_S,
    INSIDE,
    SLICE_BYTES,
    Cluster,
    Link,
    Operation,
    RankGroup,
    Traffic,
    find_link,
    link_of,
    traffic,
)

FAST = Link(name="fast", bytes_per_s=1000.0, latency_s=1.0, efficiency=0.5)
SLOW = Link(name="slow", bytes_per_s=100.0, latency_s=10.0, efficiency=1.0)
CLUSTER = Cluster(inside=FAST, between=SLOW, per_node=4, adapters=2)
MIB = 1 << 20


def ring_traffic(operation: Operation, num_bytes: int, size: int) -> Traffic:
    """Each rank passes on, step by step, the piece that it got in the step before."""
    pieces = [num_bytes // size + (rank < num_bytes % size) for rank in range(size)]
    sent, received = [0] * size, [0] * size
    if operation in (Operation.BROADCAST, Operation.REDUCE):
        for rank in range(size - 1):  # a reduction is the same chain, towards its end
            sent[rank] += num_bytes
            received[rank + 1] += num_bytes
    else:
        for _ in range(2 if operation is Operation.ALL_REDUCE else 1):
            for step, rank in itertools.product(range(size - 1), range(size)):
                piece = pieces[(rank - step) % size]
                sent[rank] += piece
                received[(rank + 1) % size] += piece
    assert sum(sent) == sum(received)
    return Traffic(sum(sent), max(sent), max(received))


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("num_bytes", [0, 5, 64, 1001, 4096])
def test_bytes_are_those_of_a_ring_that_passes_pieces_on(operation: Operation, size: int, num_bytes: int) -> None:
    assert traffic(operation, num_bytes, size) == ring_traffic(operation, num_bytes, size)


def passed_on_s(cluster: Cluster, num_bytes: float, num_ranks: int) -> float:
    """An all-gather, event by event: a piece leaves a rank when it has come and the link is free, and arrives a latency later.

    Each link passes pieces at the rate of the slowest one, as rings that run beside each other do where adapters are shared.
    """
    group = cluster.all_of(num_ranks)
    piece_s = num_bytes / num_ranks / cluster.rate(group)
    there_s = {(rank, rank): 0.0 for rank in range(num_ranks)}
    free_s = [0.0] * num_ranks
    for step in range(num_ranks - 1):
        for rank in range(num_ranks):
            piece, following = (rank - step) % num_ranks, (rank + 1) % num_ranks
            start_s = max(there_s[piece, rank], free_s[rank])
            free_s[rank] = start_s + piece_s
            crosses = rank // group.per_node != following // group.per_node
            there_s[piece, following] = free_s[rank] + (cluster.between if crosses else cluster.inside).latency_s
    return max(there_s.values())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_bytes", [12, 1200, 120_000])
def test_an_all_gather_inside_a_node_takes_what_its_ring_does(num_ranks: int, num_bytes: int) -> None:
    group = CLUSTER.all_of(num_ranks)
    found = CLUSTER.seconds(Operation.ALL_GATHER, num_bytes, group)
    assert found == pytest.approx(COLLECTIVE_S + passed_on_s(CLUSTER, num_bytes, num_ranks))
    assert CLUSTER.seconds(Operation.REDUCE_SCATTER, num_bytes, group) == found


@pytest.mark.parametrize("num_ranks", [8, 16, 32])
@pytest.mark.parametrize("num_bytes", [32, 32_000])
def test_an_all_gather_over_nodes_takes_what_its_ring_does(num_ranks: int, num_bytes: int) -> None:
    """A piece that ends behind the edge of a node crosses one more, which is all that the latencies may differ by."""
    found = CLUSTER.seconds(Operation.ALL_GATHER, num_bytes, CLUSTER.all_of(num_ranks))
    reference = COLLECTIVE_S + passed_on_s(CLUSTER, num_bytes, num_ranks)
    assert reference - (SLOW.latency_s - FAST.latency_s) - 1e-9 <= found <= reference + 1e-9


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for num_ranks in (2, 4, 16):
        group = CLUSTER.all_of(num_ranks)
        halves = [CLUSTER.seconds(each, 6000, group) for each in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)]
        assert CLUSTER.seconds(Operation.ALL_REDUCE, 6000, group) == pytest.approx(sum(halves) - COLLECTIVE_S)


def test_an_all_reduce_takes_the_faster_of_ring_and_tree() -> None:
    """By NCCL's figures for 1,024 ranks: 2 x (7 x 28 + 7 x 50) microseconds in a tree, 2 x (127 x 9.6 + 896 x 3.4) on a ring."""
    cluster = Cluster(inside=INSIDE["nvlink4"], between=BETWEEN["infiniband-ndr"])
    everyone, one_node = cluster.all_of(1024), cluster.all_of(8)
    rate = 450e9 * 235 / 300
    tree_s = 2 * (7 * 28e-6 + 7 * 50e-6 + 64 * MIB / rate / 0.9)
    ring_s = 2 * (127 * 9.6e-6 + 896 * 3.4e-6 + 1023 / 1024 * 64 * MIB / rate)
    assert tree_s < ring_s
    assert cluster.seconds(Operation.ALL_REDUCE, 64 * MIB, everyone) == pytest.approx(COLLECTIVE_S + tree_s)
    inside_s = 2 * (7 * 3.4e-6 + 7 / 8 * 64 * MIB / rate)
    assert cluster.seconds(Operation.ALL_REDUCE, 64 * MIB, one_node) == pytest.approx(COLLECTIVE_S + inside_s)


@pytest.mark.parametrize("operation", [Operation.BROADCAST, Operation.REDUCE])
@pytest.mark.parametrize("num_slices", [1, 5])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_broadcast_takes_what_a_chain_of_slices_does(operation: Operation, num_slices: int, num_ranks: int) -> None:
    """Slice by slice and rank by rank: each is passed on when it has come, and the one before it has left."""
    group = CLUSTER.all_of(num_ranks)
    slice_s = SLICE_BYTES / CLUSTER.rate(group)
    free_s = [0.0] * num_ranks
    end_s = 0.0
    for _ in range(num_slices):
        end_s = 0.0
        for rank in range(num_ranks - 1):
            free_s[rank] = max(end_s, free_s[rank]) + slice_s
            crosses = rank // 4 != (rank + 1) // 4
            end_s = free_s[rank] + (SLOW if crosses else FAST).latency_s
    found = CLUSTER.seconds(operation, num_slices * SLICE_BYTES, group)
    assert found == pytest.approx(COLLECTIVE_S + end_s)


def test_one_rank_and_no_bytes_take_no_time() -> None:
    for operation in Operation:
        assert CLUSTER.seconds(operation, 100, CLUSTER.all_of(1)) == 0.0
        assert CLUSTER.seconds(operation, 0, CLUSTER.all_of(4)) == 0.0


def test_many_bytes_go_at_the_rate_of_the_slowest_link() -> None:
    """Bus bandwidth, as nccl-tests prints it: 2 (N - 1) / N of the bytes over the seconds of an all-reduce."""
    cluster = Cluster(inside=INSIDE["nvlink4"], between=BETWEEN["infiniband-ndr"])
    for num_ranks, rate in ((8, 450e9 * 235 / 300), (64, 450e9 * 235 / 300), (512, 450e9 * 235 / 300)):
        num_bytes = 1 << 36
        seconds = cluster.seconds(Operation.ALL_REDUCE, num_bytes, cluster.all_of(num_ranks))
        assert 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds == pytest.approx(rate, rel=0.05)
    slow = replace(cluster, adapters=1)
    assert slow.rate(slow.all_of(16)) == pytest.approx(50e9 * 0.96)


def test_ranks_at_the_same_place_of_each_node_share_its_adapters() -> None:
    sharers, replicas = CLUSTER.split(16, 4)
    assert (sharers, replicas) == (
        RankGroup(per_node=4, num_nodes=1),
        RankGroup(per_node=1, num_nodes=4, beside=4),
    )
    assert CLUSTER.rate(sharers) == FAST.rate
    assert CLUSTER.rate(replicas) == pytest.approx(SLOW.rate * 2 / 4)


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 64])
def test_a_split_has_each_rank_once_in_both_kinds_of_groups(per_node: int, num_ranks: int) -> None:
    cluster = replace(CLUSTER, per_node=per_node)
    for shards in (count for count in (2, 4, 8, 16, 64) if count <= num_ranks):
        sharers, replicas = cluster.split(num_ranks, shards)
        assert sharers.size == shards
        assert sharers.size * replicas.size == num_ranks
        # Neighbours share: those that are on one node with rank 0, and those at its place in the other sets.
        on_node = min(per_node, num_ranks)
        assert sharers.per_node == sum(rank < on_node for rank in range(shards))
        assert replicas.per_node == sum(rank < on_node for rank in range(0, num_ranks, shards))


@pytest.mark.parametrize("name", [*INSIDE, *BETWEEN])
def test_each_preset_is_found_by_its_name(name: str) -> None:
    is_inside = name in INSIDE
    link = find_link(name.upper().replace("-", "_"), is_inside=is_inside)
    assert link.name == name
    assert 0 < link.rate < link.bytes_per_s


def test_a_rate_stands_for_a_link_that_reaches_it() -> None:
    assert find_link("12GB", is_inside=False).rate == 12e9


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("h200", "nvlink4"),
        ("h100-pcie", "pcie5"),
        ("a100-40gb", "nvlink3"),
        ("v100-16gb", "nvlink2"),
        ("b200", "nvlink5"),
        ("rtx-4090", "pcie4"),
        ("t4", "pcie3"),
    ],
)
def test_devices_have_the_link_they_are_sold_with(name: str, link: str) -> None:
    assert link_of(find_hardware(name)).name == link


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(UnknownNameError, match="there is no link named 'nvlink9'; did you mean"):
        find_link("nvlink9", is_inside=True)
    with pytest.raises(ConfigError, match="the link '12' is neither a name nor a rate; write a name such as nvlink2"):
        find_link("12", is_inside=True)
    with pytest.raises(ConfigError, match="the link '12parsec' is neither a name nor a rate"):
        find_link("12parsec", is_inside=False)
    with pytest.raises(ConfigError, match="per_node is 0; give a whole number, 1 or more"):
        replace(CLUSTER, per_node=0)
    with pytest.raises(ConfigError, match="6 ranks do not fill nodes of 4; give a multiple of 4"):
        CLUSTER.all_of(6)
    with pytest.raises(ConfigError, match="3 shards do not divide 16 ranks on nodes of 4; give a divisor of 4"):
        CLUSTER.split(16, 3)
    with pytest.raises(ConfigError, match="6 shards do not divide 12 ranks on nodes of 4"):
        CLUSTER.split(12, 6)
