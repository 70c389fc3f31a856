"""The ways to train one model on several ranks, each simulated at its best, and which of them fits and is the fastest.

What a rank takes of its device and host is estimated from the traced step, as the search for plans does it. Where a run is to
begin, the step is replayed with the allocator as well. Tensor and pipeline parallelism are out of scope: every rank runs the whole
model on its own batch.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import ConfigError, PlanError
from lowtide.hardware import Hardware
from lowtide.hardware.links import Cluster, Operation, find_link, link_of
from lowtide.memory.chunk import ChunkSpec, Layout, lay_out
from lowtide.planning.placement import assemble, is_trained, window_bytes_needed
from lowtide.planning.plan import Budgets, Collective, Plan, Schedule, Sharding, Site, Weights
from lowtide.planning.rank_costs import RankCosts, bucket_bytes, bytes_between_ranks, costs_in, rank_costs, row_bytes
from lowtide.planning.search import Candidate, Limits, Search, Shape
from lowtide.planning.simulator import SimulatedStep, lane_rates
from lowtide.planning.timeline import Reason
from lowtide.runtime.passes.exchange import UNDER_WAY
from lowtide.runtime.plan_problem import PlanProblem, plan_of, smallest
from lowtide.runtime.prediction.trace import update_kind
from lowtide.units import format_bytes

MOST_RANKS = 1024
_GAPS = 0.04
"""The share of the device budget that the allocator is taken to hold beyond its tensors, as where all hardware is ranked."""
_PER_NODE = 8
_MOST_REPLAYS = 4
"""How often one way is replayed, each time with less left to the search, before it counts as one that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """How many ranks to plan for, and what is between them."""

    count: int | None = None
    """`--ranks`; None: one process, and nothing is said of ranks."""
    per_node: int | None = None
    """Ranks of a node; all of them up to 8, where it is left out."""
    link: str | None = None
    """Inside a node: a name such as `nvlink4` or `pcie4`, or a rate such as `200GB`. What the device is sold with, by default."""
    network: str | None = None
    """Between nodes, of one adapter: `infiniband-ndr`, `ethernet-100`, ..., or a rate."""
    adapters: int | None = None
    """Adapters of each node. By default one for each rank if devices have NVLink, and one for all if they have not."""
    shards: int | None = None
    """Ranks that share the weights in the hybrid way; those of a node by default."""

    def __post_init__(self) -> None:
        if self.count is None:
            if given := [
                key for key in ("per_node", "link", "network", "adapters", "shards") if getattr(self, key) is not None
            ]:
                raise ConfigError(
                    f"ranks.{given[0]} was given, and no number of ranks; give --ranks as well", key="ranks"
                )
            return
        for key in ("count", "per_node", "adapters", "shards"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"ranks.{key} is {value}; give a whole number, 1 or more", key=f"ranks.{key}")
        if self.count > MOST_RANKS:
            raise ConfigError(
                f"--ranks is {self.count}; plans are made for up to {MOST_RANKS}, beyond which rings are too long",
                key="ranks",
            )
        if self.shards is not None and not 2 <= self.shards < self.count:
            raise ConfigError(
                f"ranks.shards is {self.shards} of {self.count} ranks; give 2 or more, and fewer than all, so that there are "
                "replicas",
                key="ranks.shards",
            )

    def cluster(self, hardware: Hardware) -> Cluster:
        """The nodes and links that are meant, with defaults by the device."""
        inside = link_of(hardware) if self.link is None else find_link(self.link, is_inside=True)
        is_wired = link_of(hardware).name.startswith("nvlink")
        generation = "infiniband-ndr" if link_of(hardware).name in ("nvlink4", "nvlink5") else "infiniband-hdr"
        network = self.network or (generation if is_wired else "ethernet-100")
        per_node = self.per_node or min(self.count or 1, _PER_NODE)
        return Cluster(
            inside=inside,
            between=find_link(network, is_inside=False),
            per_node=per_node,
            adapters=self.adapters or (per_node if is_wired else 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model is put on several ranks."""

    name: str
    sharding: Sharding | None = None
    site: Site | None = None
    """Where each rank keeps its part and updates it; None leaves each group to the search."""


@dataclass(frozen=True, kw_only=True)
class RankedWay:
    """The best that a way can do: its fastest step that fits, or the smallest where none does."""

    way: Way
    num_ranks: int
    plan: Plan
    """The plan of each rank."""
    candidate: Candidate
    simulated: SimulatedStep
    sent_bytes: dict[Operation, int]
    """By a rank in a step, as sessions count them; of rank 0."""
    over_bytes: int
    """What is beyond the device's budget; 0 where the step fits it."""
    host_over_bytes: int
    """The same of the host's."""
    beside_bytes: int
    """Bytes of the device, beyond what one process takes that streams all weights and updates on the host: gradients on their way
    between ranks, and what the device keeps."""
    update_bytes: int
    """Bytes of the device in `step()`, beside windows: parts, and what torch's own step takes besides, a copy of each weight."""
    num_tokens: int
    """Tokens of a rank's batch."""
    blocks: tuple[str, ...]
    """Groups that can have an activation policy."""

    @property
    def fits(self) -> bool:
        """Whether the step is inside every budget."""
        return not self.over_bytes and not self.host_over_bytes

    @property
    def step_s(self) -> float:
        """Predicted seconds a step."""
        return self.simulated.step_s

    @property
    def link_bytes(self) -> int:
        """What a rank puts on the links in a step."""
        return self.simulated.times.link_bytes

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of all ranks together; None if the batch has none."""
        return self.num_ranks * self.num_tokens / self.step_s if self.num_tokens else None


@dataclass(frozen=True, kw_only=True)
class RankPlans:
    """What `plan_ranks` finds."""

    num_ranks: int
    cluster: Cluster
    ways: tuple[RankedWay, ...]
    limits: Limits
    """What one rank may take."""

    @property
    def fastest(self) -> RankedWay | None:
        """The fastest way that fits; None if none does."""
        return min((way for way in self.ways if way.fits), key=lambda way: way.step_s, default=None)


def plan_ranks(
    problem: PlanProblem, limits: Limits, settings: RankSettings, ways: Sequence[Way] | None = None
) -> RankPlans:
    """The ways to train on so many ranks.

    Args:
        problem: The step of one rank.
        limits: What a device may hold, and what a whole node's host may: its ranks share it equally.
        settings: The ranks, and the links between them.
        ways: Those to look at; None for all.

    Raises:
        ConfigError: The ranks do not fill their nodes, or the shards do not divide them.
    """
    assert settings.count is not None, "without a count there is nothing to plan"
    cluster = settings.cluster(problem.hardware)
    num_ranks = settings.count
    local = cluster.all_of(num_ranks).per_node
    within = replace(limits, host_bytes=limits.host_bytes // local, pinned_bytes=limits.pinned_bytes // local)
    found = []
    for way in ways or _ways(num_ranks, cluster, settings.shards):
        problem.tell(f"simulating {num_ranks} ranks: {way.name}")
        found.append(_best(problem, within, cluster, num_ranks, way))
    return RankPlans(num_ranks=num_ranks, cluster=cluster, ways=tuple(found), limits=within)


def scaling(problem: PlanProblem, limits: Limits, settings: RankSettings) -> tuple[RankPlans, ...]:
    """`plan_ranks` for 1, 2, 4, ... ranks on such nodes, up to those of the settings."""
    assert settings.count is not None, "without a count there is nothing to plan"
    per_node = settings.cluster(problem.hardware).per_node
    counts = sorted({1 << power for power in range(settings.count.bit_length())} | {settings.count})
    fitting = [count for count in counts if count <= per_node or count % per_node == 0]
    return tuple(
        plan_ranks(
            problem, limits, replace(settings, count=count, per_node=per_node, shards=_shards_of(settings, count))
        )
        for count in fitting
    )


def _shards_of(settings: RankSettings, count: int) -> int | None:
    return settings.shards if settings.shards is not None and settings.shards < count else None


def _ways(num_ranks: int, cluster: Cluster, shards: int | None) -> Iterator[Way]:
    yield Way(name="data parallel")
    if num_ranks == 1:
        return
    for collective in Collective:
        yield from spread_ways(Sharding(shards=num_ranks, collective=collective), num_ranks)
    if shards is None and 1 < cluster.per_node < num_ranks:
        shards = cluster.per_node
    if shards is not None:
        yield from spread_ways(Sharding(shards=shards), num_ranks)


def spread_ways(sharding: Sharding, num_ranks: int) -> Iterator[Way]:
    """Parts on the devices, and on the hosts."""
    name = "sharded" if sharding.collective is Collective.GATHER else "one to all"
    if sharding.shards < num_ranks:
        name = "hybrid" if sharding.collective is Collective.GATHER else "hybrid, one to all"
    for where, site in {"device": Site.DEVICE, "host": Site.HOST}.items():
        yield Way(name=f"{name}, {where}", sharding=sharding, site=site)


def fastest_plan(
    problem: PlanProblem, limits: Limits, settings: RankSettings, ways: Sequence[Way] | None = None
) -> Plan:
    """The plan of the fastest way whose replayed step is inside the budgets.

    Args:
        problem: As for `plan_ranks`, as are the others.
        limits: What a device may hold, and what a whole node's host may.
        settings: The ranks.
        ways: Those to choose from; None for all.

    Raises:
        ConfigError: The ranks do not fill their nodes, or the shards do not divide them.
        PlanError: None fits; the message says what the nearest takes.
    """
    found = plan_ranks(problem, limits, settings, ways)
    tried = []
    for way in sorted(found.ways, key=lambda way: (not way.fits, way.step_s)):
        replayed = _replayed(problem, found, way)
        if replayed.fits:
            return replayed.plan
        tried.append(replayed)
    raise nothing_fits(replace(found, ways=tuple(tried)))


def nothing_fits(found: RankPlans) -> PlanError:
    """Says what the nearest way takes."""
    nearest = min(found.ways, key=lambda way: way.over_bytes + way.host_over_bytes)
    host = (
        found.limits.host_bytes + nearest.host_over_bytes if nearest.host_over_bytes else nearest.candidate.host_bytes
    )
    device = found.limits.device_bytes + nearest.over_bytes if nearest.over_bytes else nearest.candidate.device_bytes
    way = "no way to train" if len({each.way.sharding for each in found.ways}) > 1 else "no plan"
    return PlanError(
        f"{way} on {found.num_ranks} ranks fits {format_bytes(found.limits.device_bytes)} of each device and "
        f"{format_bytes(found.limits.host_bytes)} of the host for each rank: {nearest.way.name!r}, the nearest, takes about "
        f"{format_bytes(device)} of the device and {format_bytes(host)} of the host; give more ranks, more memory, or a smaller "
        "batch",
        needed_bytes=device,
    )


def _replayed(problem: PlanProblem, found: RankPlans, way: RankedWay) -> RankedWay:
    """The way with its bytes replayed, searched again beside what the estimate did not see, where that is too much."""
    limits, beyond = found.limits, 0
    if way.way.sharding is None:
        return _replayed_whole(problem, limits, way)
    for _ in range(_MOST_REPLAYS):
        way = replace(way, host_over_bytes=_host_over_bytes(problem, limits, way))
        if way.host_over_bytes:
            return way
        problem.tell(f"replaying the step: {way.way.name}")
        needed = _needed_bytes(problem, limits, way)
        over = max(0, needed - limits.device_bytes)
        if not over or not way.fits:
            return replace(way, over_bytes=over)
        beyond += needed - way.candidate.device_bytes
        way = _best(problem, limits, found.cluster, found.num_ranks, way.way, beyond)
    return replace(way, over_bytes=over)


def _replayed_whole(problem: PlanProblem, limits: Limits, way: RankedWay) -> RankedWay:
    """All of the model on each rank: planned as for one process, with room for gradients on their way."""
    least = way.beside_bytes
    try:
        if limits.device_bytes > least:
            planned = problem.fastest(replace(limits, device_bytes=limits.device_bytes - least)).plan
            budgets = replace(planned.budgets, device_bytes=limits.device_bytes)
            return replace(way, plan=replace(planned, budgets=budgets), over_bytes=0, host_over_bytes=0)
    except PlanError as error:
        least += error.needed_bytes or 0
    return replace(way, over_bytes=max(1, way.over_bytes, least - limits.device_bytes))


def _host_over_bytes(problem: PlanProblem, limits: Limits, way: RankedWay) -> int:
    """What is beyond the host's budgets on the rank that needs most, as its session will find it."""
    assert way.way.sharding is not None, "the whole model is planned as ever"
    layout = lay_out(problem.layout.groups, chunk_bytes=way.plan.chunk_bytes, shards=way.way.sharding.shards)
    stashed = problem.search.estimate.stashed_bytes(way.candidate.placement)
    needs = problem.host_needs(way.plan, layout)
    host = stashed + max(need.everything_bytes for need in needs) - limits.host_bytes
    pinned = stashed + max(need.total_bytes + need.paged_bytes for need in needs) - limits.pinned_bytes
    return max(0, host, pinned)


def _needed_bytes(problem: PlanProblem, limits: Limits, way: RankedWay) -> int:
    """What a rank's device takes. Its step is replayed as that of one process whose gradients go to the host at once."""
    plan, sharding = way.plan, way.way.sharding
    assert sharding is not None, "the whole model is replayed as it is"
    layout = lay_out(problem.layout.groups, chunk_bytes=plan.chunk_bytes, shards=sharding.shards)
    alike = assemble(
        problem.layout,
        weights={},
        sites={},
        schedule=plan.schedule,
        prefetch_depth=plan.prefetch_depth,
        activations=plan.activations,
        budgets=Budgets(device_bytes=max(0, limits.device_bytes - way.beside_bytes)),
    )
    windows = window_bytes_needed(layout, plan)
    beside = way.beside_bytes + max(0, windows - window_bytes_needed(problem.layout, alike))
    try:
        traced = problem.under(alike)
    except PlanError:  # the budget does not even hold the windows
        traced = problem.under(replace(alike, budgets=Budgets()))
    return max(traced.peak_reserved_bytes + beside, windows + way.update_bytes)


def _under_way_bytes(layout: Layout, sharding: Sharding | None) -> int:
    """Device bytes of gradients on their way between ranks, at most: buckets, and this rank's sum of each."""

    def taken(chunk: ChunkSpec) -> int:
        if sharding is None:
            return sum(bucket_bytes(chunk))
        num_rows = sharding.shards + 1 if sharding.collective is Collective.GATHER else 1
        return num_rows * row_bytes(chunk, sharding)

    return (UNDER_WAY + 1) * max(map(taken, filter(is_trained, layout.chunks)), default=0)


def _kept_bytes(problem: PlanProblem, candidate: Candidate, ranks: RankCosts) -> tuple[int, int]:
    """Bytes of a rank's parts on its device: in a backward, and with what their update takes."""
    choices = candidate.placement.groups.items()
    shares = [ranks.of(name, choice.weights) for name, choice in choices if choice.weights is Weights.SHARDED]
    held = sum(share.weight_bytes + share.state_bytes for share in shares)
    if candidate.placement.schedule is Schedule.IN_BACKWARD:
        return held, held
    gradients = sum(share.trained_bytes for share in shares)
    return held + gradients, held + (1 if problem.numerics is not None else 2) * gradients


def _best(
    problem: PlanProblem, limits: Limits, cluster: Cluster, num_ranks: int, way: Way, beyond_bytes: int = 0
) -> RankedWay:
    layout = problem.layout
    if way.sharding is not None:
        layout = lay_out(layout.groups, chunk_bytes=layout.chunk_bytes, shards=way.sharding.shards)
    costs, beyond = problem.priced
    costs = costs_in(costs, layout)
    ranks: RankCosts | None = None
    if num_ranks > 1:
        ranks = rank_costs(costs, layout, cluster, num_ranks, way.sharding, under_way=UNDER_WAY + 1)
    kind = update_kind(problem.numerics, problem.hardware)
    rates = lane_rates(problem.hardware, kind, ranks_on_host=cluster.all_of(num_ranks).per_node)
    correction = beyond + int(_GAPS * limits.device_bytes) + beyond_bytes
    search = Search(costs, layout, rates, correction_bytes=correction, ranks=ranks)
    candidate = _fastest(search, limits, way) if way.site is None else _fastest_sharded(search, limits, way.site)
    plan = plan_of(candidate, search, limits, way.sharding)
    simulated = search.simulator.step(candidate.placement)
    kept, update = (0, 0) if ranks is None else _kept_bytes(problem, candidate, ranks)
    gathers = Counter(span.name for span in simulated.timeline.spans if span.reason is Reason.GATHER)
    return RankedWay(
        way=way,
        num_ranks=num_ranks,
        plan=plan,
        candidate=candidate,
        simulated=simulated,
        sent_bytes=bytes_between_ranks(plan, layout, num_ranks=num_ranks, fetches=gathers),
        over_bytes=max(0, candidate.device_bytes - limits.device_bytes),
        host_over_bytes=max(0, candidate.host_bytes - limits.host_bytes, candidate.pinned_bytes - limits.pinned_bytes),
        beside_bytes=kept + (_under_way_bytes(layout, way.sharding) if num_ranks > 1 else 0),
        update_bytes=update,
        num_tokens=problem.num_tokens,
        blocks=tuple(name for name, group in costs.groups.items() if len(group.policies) > 1),
    )


def _fastest(search: Search, limits: Limits, way: Way) -> Candidate:
    assert way.sharding is None, "where each group goes is searched where all ranks have all of them"
    with contextlib.suppress(PlanError):
        return search.fastest(limits).best
    return smallest(search, limits)


def _fastest_sharded(search: Search, limits: Limits, site: Site) -> Candidate:
    """No group is whole on a rank, and all are updated in one place: activations and prefetching are searched."""
    num_device = search.num_groups if site is Site.DEVICE else 0
    shapes = [
        Shape(num_resident=0, num_device=num_device, small=small, fast=fast, num_fast=0, prefetch_depth=depth)
        for small, fast in search.ladders(limits)
        for depth in (1, 0)
    ]
    filled = [search.most_fast(shape, limits) for shape in shapes]
    fitting = [search.evaluate(shape, limits) for shape in dict.fromkeys(filled) if shape is not None]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_s)
    return min((search.evaluate(shape, limits) for shape in shapes), key=lambda candidate: candidate.device_bytes)


def code_of(
    found: RankedWay,
    for_manage: Mapping[str, object] | None = None,
    for_prepare: Mapping[str, object] | None = None,
) -> str:
    """The lines of a script that train this way.

    Args:
        found: The way; a plan of data parallelism is searched again by `prepare`, for the memory that ranks really have.
        for_manage: Settings beside the plan, of `manage` and `prepare`.
        for_prepare: Settings of `prepare` alone; `host_memory` is that of a node.
    """
    more, more_for_prepare = (
        "".join(f", {name}={word!r}" for name, word in (words or {}).items()) for words in (for_manage, for_prepare)
    )
    budgets, sharding = found.plan.budgets, found.way.sharding
    assert budgets.device_bytes is not None, "a search has a budget"
    device = f"device_memory={f'{budgets.device_bytes >> 20}MiB'!r}"
    if sharding is None:
        given = f", {device}" if found.plan.schedule is Schedule.DEFERRED else f", {device}, schedule='in_backward'"
        ranks = ", ranks=torch.distributed.group.WORLD" if found.num_ranks > 1 else ""
        return f"session = lowtide.prepare(model, optimizer, batch{given}{more_for_prepare}{more}{ranks})"
    words = [f"weights={(Weights.SHARDED if found.way.site is Site.DEVICE else Weights.STREAMED).value!r}"]
    if policies := _policies_in_words(found):
        words.append(f"activations={policies}")
    if found.plan.schedule is not Schedule.DEFERRED:
        words.append(f"schedule={found.plan.schedule.value!r}")
    if found.plan.prefetch_depth != 1:
        words.append(f"prefetch_depth={found.plan.prefetch_depth}")
    is_gathered = sharding.collective is Collective.GATHER
    collective = "" if is_gathered else ", collective=lowtide.planning.plan.Collective.ONE_TO_ALL"
    words += [f"sharding=lowtide.Sharding(shards={sharding.shards}{collective})", device]
    if "host_memory" in (for_prepare or {}) and budgets.host_bytes is not None:
        words.append(f"host_memory={f'{budgets.host_bytes >> 20}MiB'!r}")
    return (
        f"{'' if is_gathered else 'import lowtide.planning.plan; '}plan = lowtide.make_plan(model, {', '.join(words)}); session = "
        f"lowtide.manage(model, optimizer, plan{more}, ranks=torch.distributed.group.WORLD)"
    )


def _policies_in_words(found: RankedWay) -> str:
    """What `make_plan` takes as `activations`: a word, or the blocks that have another one by name; "" where all keep."""
    policies = {name: found.candidate.placement.groups[name].policy for name in found.blocks}
    word = found.candidate.shape.small
    others = [name for name, policy in policies.items() if policy != word]
    if len(others) == len(policies):
        word, others = found.candidate.shape.fast, []
    if not others:
        return "" if word == "keep" or not policies else repr(word)
    return f"{{'*': {word!r}, {_named(others, found.candidate.shape.fast)}}}"


def _named(names: Sequence[str], word: str) -> str:
    """A word for each name, as the inside of a dictionary: names that count up together."""
    numbered = [re.fullmatch(r"(.*\.)(\d+)", name) for name in names]
    numbers = [int(match[2]) for match in numbered if match]
    first = numbered[0]
    is_run = first and len(numbers) == len(names) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if first and is_run and len(names) > 2 and len({match[1] for match in numbered if match}) == 1:
        return f"**{{f'{first[1]}{{i}}': {word!r} for i in range({numbers[0]}, {numbers[-1] + 1})}}"
    return ", ".join(f"{name!r}: {word!r}" for name in names)
