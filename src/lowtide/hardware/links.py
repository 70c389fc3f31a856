"""Links: what carries bytes between ranks, as data, and how long collectives over them take.

Note [Rings and trees]
Collectives are taken to run on rings, as NCCL's do for large tensors. On a ring of N ranks a tensor of n bytes is cut into N
pieces, each rank sends n (N - 1) / N bytes, and no algorithm for an all-gather or a reduce-scatter sends less. A ring over nodes
visits all ranks of a node before the next one, so that n (N - 1) / N bytes leave each node too: over all of its adapters, because
NCCL runs as many rings beside each other. What is slowest on the way says how fast it goes. A piece travels along the whole ring,
so its latencies add up, those between nodes and those inside: NCCL's own model (`src/graph/tuning.cc`) counts them alike. A
hierarchical algorithm sends the same bytes in fewer steps, (ranks of a node - 1) + (nodes - 1) instead of N - 1, but needs groups
of its own for each level, which sessions do not make: theirs is one call over one group.

A broadcast passes slices from rank to rank along the ring, and a reduction the other way: the last rank waits until the first
slice has come through all others, and then for the rest.

For an all-reduce NCCL has trees as well, in which a slice goes up through a chain in each node and a binary tree of nodes, and
down again: as many bytes at 0.9 of the rate and fewer steps, which take longer each. On many nodes they are faster. The faster one
is taken, as NCCL does by the same figures.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.hardware.profile import Hardware
from lowtide.hardware.rates import LINK_EFFICIENCY
from lowtide.units import KiB, parse_bytes

COLLECTIVE_S = 8.4e-6
"""What a collective takes to start and to end: `baseLat` of rings under NCCL's protocol for large tensors."""
SLICE_BYTES = 256 * KiB
"""What a rank passes on at a time in a broadcast: the chunk of which NCCL's table of latencies speaks."""
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 9.6e-6
"""`hwLat` of the same table, for one step of a ring. Newer NCCL says 14 microseconds for the network."""
_TREE_INSIDE_S, _TREE_NETWORK_S = 28e-6, 50e-6
"""The same for a step up or down a tree, with a slice of 256 KiB in it."""
_TREE_EFFICIENCY = 0.9
_NVLINK_EFFICIENCY = 235 / 300
"""NCCL's model lets eight A100s reach 235 GB/s of the 300 that their NVLinks have in one direction."""
_NETWORK_EFFICIENCY = 0.96
"""The same model takes a network of 100 Gbit/s, 12.5 GB/s, for 12."""


class Operation(enum.StrEnum):
    """What ranks do together with a tensor of n bytes."""

    ALL_GATHER = "all-gather"
    """Each has n / N bytes before, and all n afterwards."""
    REDUCE_SCATTER = "reduce-scatter"
    """Each has n bytes before, and n / N bytes of the sum afterwards."""
    ALL_REDUCE = "all-reduce"
    """Each has n bytes before, and n bytes of the sum afterwards: a reduce-scatter, and an all-gather of its parts."""
    BROADCAST = "broadcast"
    """One has n bytes, and all have them afterwards."""
    REDUCE = "reduce"
    """Each has n bytes, and one has n bytes of the sum afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What carries bytes from one device to another, or from one node to another."""

    name: str
    bytes_per_s: float
    """One direction, as the vendor says; of one device inside a node, of one adapter between nodes."""
    latency_s: float
    """What one step of a ring takes besides."""
    efficiency: float
    """The share of the rate that collectives reach."""
    tree_latency_s: float = math.inf
    """What one step of a tree takes; without an end where there are no trees."""
    is_host_link: bool = False
    """Whether the bytes take the device's own way to the host, so that copies wait for them."""

    @property
    def rate(self) -> float:
        """Bytes a second that collectives reach."""
        return self.bytes_per_s * self.efficiency


def _nvlink(name: str, both_gb_per_s: float) -> Link:
    """Data sheets add both directions up."""
    return Link(
        name=name,
        bytes_per_s=both_gb_per_s / 2 * 1e9,
        latency_s=_NVLINK_S,
        efficiency=_NVLINK_EFFICIENCY,
        tree_latency_s=_TREE_INSIDE_S,
    )


def _pcie(name: str, gb_per_s: float) -> Link:
    """Ring neighbours copy from device to device over PCIe, both ways at a time."""
    return Link(
        name=name,
        bytes_per_s=gb_per_s * 1e9,
        latency_s=_PCIE_S,
        efficiency=LINK_EFFICIENCY,
        tree_latency_s=_TREE_INSIDE_S,
        is_host_link=True,
    )


def _network(name: str, gbit_per_s: float) -> Link:
    return Link(
        name=name,
        bytes_per_s=gbit_per_s / 8 * 1e9,
        latency_s=_NETWORK_S,
        efficiency=_NETWORK_EFFICIENCY,
        tree_latency_s=_TREE_NETWORK_S,
    )


INSIDE = {
    link.name: link
    for link in (
        _nvlink("nvlink2", 300),  # V100: NVIDIA Tesla V100 data sheet, "NVLink 300 GB/s"
        _nvlink("nvlink3-bridge", 112.5),  # RTX 3090, RTX A6000, A40: their data sheets, "112.5 GB/s (bidirectional)"
        _nvlink("nvlink3", 600),  # A100: NVIDIA A100 data sheet, "NVLink: 600 GB/s"
        _nvlink("nvlink4", 900),  # H100 SXM, H200 SXM: their data sheets, "NVLink: 900GB/s"
        _nvlink(
            "nvlink5", 1800
        ),  # B200: NVIDIA Blackwell architecture brief, "1.8 TB/s of bidirectional throughput per GPU"
        _pcie("pcie3", 15.75),  # 8 GT/s with 128 of 130 bits, 16 lanes: PCI-SIG, PCI Express Base 3.0
        _pcie("pcie4", 31.5),  # 16 GT/s: PCI Express Base 4.0
        _pcie("pcie5", 63.0),  # 32 GT/s: PCI Express Base 5.0
    )
}
"""Links inside a node."""
BETWEEN = {
    link.name: link
    for link in (
        _network("infiniband-hdr", 200),  # InfiniBand Trade Association, roadmap: HDR, four lanes of 50 Gbit/s
        _network("infiniband-ndr", 400),  # the same: NDR, four lanes of 100 Gbit/s
        _network("ethernet-10", 10),  # IEEE 802.3ae
        _network("ethernet-25", 25),  # IEEE 802.3by
        _network("ethernet-100", 100),  # IEEE 802.3ba
        _network("ethernet-400", 400),  # IEEE 802.3bs
    )
}
"""Links between nodes, of one adapter."""
_WIRED = {
    "v100": "nvlink2",
    "a100": "nvlink3",
    "h100": "nvlink4",
    "h200": "nvlink4",
    "b200": "nvlink5",
}
"""Kinds of devices that are sold on boards with NVLink; all others are taken to have PCIe."""
_PCIE_OF = {15.75e9: "pcie3", 31.5e9: "pcie4", 63.0e9: "pcie5"}


def find_link(name: str, *, is_inside: bool) -> Link:
    """The link of that name, or one of that rate: `12GB` stands for 12 GB a second in one direction.

    Raises:
        UnknownNameError: There is no such link; the message names the nearest.
        ConfigError: It begins as a number does, but is no positive size with a unit.
    """
    known = INSIDE if is_inside else BETWEEN
    typed = name.strip().lower().replace("_", "-")
    if typed in known:
        return known[typed]
    if not re.match(r"[.0-9]", typed):
        raise UnknownNameError("link", name, known)
    try:
        rate = parse_bytes(name) if typed[-1:].isalpha() else 0
    except ConfigError:
        rate = 0
    if rate == 0:
        raise ConfigError(
            f"the link {name!r} is neither a name nor a rate; write a name such as {next(iter(known))}, or the bytes of a second "
            "in one direction with their unit, such as 12GB",
            key="link",
        )
    latency_s, tree_latency_s = (_NVLINK_S, _TREE_INSIDE_S) if is_inside else (_NETWORK_S, _TREE_NETWORK_S)
    return Link(
        name=f"{name} a second", bytes_per_s=rate, latency_s=latency_s, efficiency=1.0, tree_latency_s=tree_latency_s
    )


def link_of(hardware: Hardware) -> Link:
    """What such devices have inside a node: NVLink where they are sold with it, else their PCIe slots."""
    wired = _WIRED.get(hardware.name.partition("-")[0])
    if wired is not None and not hardware.name.endswith("-pcie"):
        return INSIDE[wired]
    return INSIDE[_PCIE_OF.get(hardware.host_link_bytes_per_s or 0.0, "pcie4")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that make collectives together."""

    per_node: int
    """Its ranks on each node."""
    num_nodes: int
    beside: int = 1
    """How many such groups use a node's adapters at one time."""

    @property
    def size(self) -> int:
        """Its ranks."""
        return self.per_node * self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with devices, and the links between them."""

    inside: Link
    between: Link
    per_node: int = 8
    """Ranks of a node, with a device each."""
    adapters: int = 8
    """Adapters of the link between nodes, on each node."""

    def __post_init__(self) -> None:
        for key in ("per_node", "adapters"):
            count = getattr(self, key)
            if count < 1:
                raise ConfigError(f"{key} is {count}; give a whole number, 1 or more", key=key)

    def all_of(self, num_ranks: int) -> RankGroup:
        """So many ranks, node by node.

        Raises:
            ConfigError: They do not fill their nodes.
        """
        if num_ranks <= self.per_node:
            return RankGroup(per_node=num_ranks, num_nodes=1)
        if num_ranks % self.per_node:
            raise ConfigError(
                f"{num_ranks} ranks do not fill nodes of {self.per_node}; give a multiple of {self.per_node}, or another number "
                "of ranks per node",
                key="ranks.per_node",
            )
        return RankGroup(per_node=self.per_node, num_nodes=num_ranks // self.per_node)

    def split(self, num_ranks: int, shards: int) -> tuple[RankGroup, RankGroup]:
        """The group of neighbours that share the weights, and that of the ranks that have the same part of them.

        Raises:
            ConfigError: The shards do not divide the ranks, or lie across nodes that they do not fill.
        """
        all_ranks = self.all_of(num_ranks)
        inside = all_ranks.per_node
        if num_ranks % shards or (shards > inside and shards % inside) or (shards < inside and inside % shards):
            raise ConfigError(
                f"{shards} shards do not divide {num_ranks} ranks on nodes of {inside}; give a divisor of {inside}, or a multiple "
                f"of it that divides {num_ranks}",
                key="ranks.shards",
            )
        if shards <= inside:
            return (
                RankGroup(per_node=shards, num_nodes=1),
                RankGroup(per_node=inside // shards, num_nodes=all_ranks.num_nodes, beside=shards),
            )
        nodes = shards // inside
        return (
            RankGroup(per_node=inside, num_nodes=nodes),
            RankGroup(per_node=1, num_nodes=num_ranks // shards, beside=inside),
        )

    def rate(self, group: RankGroup) -> float:
        """Bytes a second that each of its ranks passes on: those of the slowest link on the way."""
        across = self.between.rate * self.adapters / group.beside
        rates = [self.inside.rate] * (group.per_node > 1) + [across] * (group.num_nodes > 1)
        return min(rates)

    def seconds(self, operation: Operation, num_bytes: int, group: RankGroup) -> float:
        """How long an operation on so many bytes takes; see Note [Rings and trees].

        Example:
            >>> cluster = Cluster(inside=INSIDE["nvlink4"], between=BETWEEN["infiniband-ndr"])
            >>> eight = cluster.all_of(8)
            >>> one_gib = cluster.seconds(Operation.ALL_GATHER, 1 << 30, eight)
            >>> one_gib == COLLECTIVE_S + 7 * 3.4e-6 + 7 / 8 * (1 << 30) / (450e9 * 235 / 300)
            True
        """
        size = group.size
        if size == 1 or not num_bytes:
            return 0.0
        rate = self.rate(group)
        crossing = group.num_nodes - 1
        latency_s = crossing * self.between.latency_s + (size - 1 - crossing) * self.inside.latency_s
        if operation in (Operation.BROADCAST, Operation.REDUCE):
            filling = (size - 2) * min(num_bytes, SLICE_BYTES)
            return COLLECTIVE_S + latency_s + (num_bytes + filling) / rate
        once_s = latency_s + (size - 1) / size * num_bytes / rate
        if operation is not Operation.ALL_REDUCE:
            return COLLECTIVE_S + once_s
        return COLLECTIVE_S + 2 * min(once_s, self._tree_s(group) + num_bytes / rate / _TREE_EFFICIENCY)

    def _tree_s(self, group: RankGroup) -> float:
        """From the leaves of a tree to its root."""
        up_s = (group.per_node - 1) * self.inside.tree_latency_s if group.per_node > 1 else 0.0
        depth = (group.num_nodes - 1).bit_length()
        return up_s + (depth * self.between.tree_latency_s if depth else 0.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that ranks put on their links."""

    total_bytes: int
    """All ranks together; each byte that is sent is received by another."""
    most_sent_bytes: int
    """By the rank that sends most."""
    most_received_bytes: int
    """By the rank that receives most."""


def traffic(operation: Operation, num_bytes: int, size: int) -> Traffic:
    """What an operation on so many bytes puts on the links of a ring of so many ranks.

    A tensor that the ranks do not divide is cut into pieces as equal as they can be.

    Example:
        >>> traffic(Operation.ALL_REDUCE, 800, 8)
        Traffic(total_bytes=11200, most_sent_bytes=1400, most_received_bytes=1400)
        >>> traffic(Operation.BROADCAST, 800, 8)
        Traffic(total_bytes=5600, most_sent_bytes=800, most_received_bytes=800)
    """
    if size == 1 or not num_bytes:
        return Traffic(0, 0, 0)
    total = (size - 1) * num_bytes
    if operation in (Operation.BROADCAST, Operation.REDUCE):
        return Traffic(total, num_bytes, num_bytes)
    rounds = 2 if operation is Operation.ALL_REDUCE else 1
    # Each round every rank passes all pieces but one on, and takes all but one: at most all but a smallest.
    most = num_bytes - num_bytes // size
    return Traffic(rounds * total, rounds * most, rounds * most)
