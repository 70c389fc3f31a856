"""The search: the fastest placement whose bytes fit.

A placement has three numbers. Of the groups in the order of their first use, the first so many are resident, and the first
so many are updated on the device: their gradients come last in a backward, so that the host catches up meanwhile. Of the
blocks, the last so many have the faster of two activation policies, and the others the smaller one: the last blocks hold
their activations for the shortest time. Embeddings and the rest of the model keep theirs.

Bytes are counted from a step's costs, and corrected by the caller by what a replay of the allocator finds. Of the placements
that fit, only those are simulated whose lanes could be faster than the best so far.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from lowtide.activations.policy import OTHERS, word_of_policy
from lowtide.errors import PlanError
from lowtide.memory.chunk import Layout
from lowtide.planning.estimate import Estimate
from lowtide.planning.improve import Arrangement, Choices, improved
from lowtide.planning.lanes import GroupChoice, LaneRates, Placement, StepTimes
from lowtide.planning.placement import by_first_use, is_always_open, window_bytes, window_bytes_needed
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.planning.rank_costs import RankCosts
from lowtide.planning.simulator import SimulatedStep, Simulator
from lowtide.planning.step_costs import POLICIES, StepCosts
from lowtide.units import format_bytes

_COMBINED = ("keep", "selective", "recompute", "offload")
LADDERS = (
    *((_COMBINED[low], _COMBINED[high]) for low in range(len(_COMBINED)) for high in range(low + 1)),
    *((policy, policy) for policy in POLICIES if policy not in _COMBINED),
    *((policy, fast) for policy in ("recompute/2", "recompute/4") for fast in ("keep", "recompute")),
    ("offload/all", "keep"),
    ("offload", "offload/all"),
)
"""Pairs of a smaller and a faster policy; the same twice is a uniform placement."""
_GRID = 8
"""Steps in which the number of resident groups, and of those updated on the device, is tried before the best is refined."""
_PREFETCH_DEPTHS = (1, 0)
"""A second group fetched ahead gained less than 1% in every case that was simulated, and leaves larger gaps in the
allocator's memory."""
_SIMULATED_USES = 3000
"""What is simulated of changes to a placement before the best of them is changed further: a third of a second."""
WORTH_IT = 0.005
"""A placement must be faster by this share than one that takes less of the device, or that is uniform and easier to follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a placement may take, and what the user allows."""

    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    schedule: Schedule = Schedule.DEFERRED
    is_clipped: bool = False
    policies: tuple[str, ...] = POLICIES
    """Those that the search may use."""
    sites: Mapping[str, Site] | None = None
    """Where each group is updated, on the device or the host; None leaves it to the search."""

    @property
    def small_policies(self) -> tuple[str, ...]:
        """Those under which a step may be the smallest: whole activations that come back leave large gaps in the memory."""
        small = tuple(policy for policy in POLICIES if policy in self.policies and policy != "offload/all")
        return small or self.policies or ("keep",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that a placement is made from, or begins with where single choices were changed afterwards."""

    num_resident: int
    num_device: int
    """Groups that the device updates."""
    small: str
    fast: str
    num_fast: int
    """Blocks with the faster policy."""
    prefetch_depth: int = 1
    tables_stay: bool = False
    """Embeddings stay on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A placement with what it takes."""

    shape: Shape
    placement: Placement
    device_bytes: int
    """Estimated, with the caller's correction."""
    host_bytes: int
    pinned_bytes: int
    times: StepTimes

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.times.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search gives."""

    best: Candidate
    uniform: tuple[Candidate, ...]
    """The fastest placement of each kind that a user would try by hand, those that fit: one policy for all blocks, and
    everything resident or streamed, updated on the device or on the host."""
    num_tried: int
    """Placements that were simulated."""


@cache
def _choice(weights: Weights, site: Site, policy: str) -> GroupChoice:
    return GroupChoice(weights=weights, site=site, policy=policy)


class Search:
    """Searches among the placements of one step.

    Args:
        costs: The step's.
        layout: The model's.
        rates: The hardware's.
        correction_bytes: What a replay of the allocator found beyond the estimate of device bytes.
        mixed_bytes: What it found besides where blocks have different policies: the gaps of one do not suit another.
        ranks: What ranks keep of the groups and tell each other; None where there is one. Under sharding, groups that are not
            resident are `sharded` where the device updates them, and `streamed` where the host does.
    """

    def __init__(
        self,
        costs: StepCosts,
        layout: Layout,
        rates: LaneRates,
        *,
        correction_bytes: int = 0,
        mixed_bytes: int = 0,
        ranks: RankCosts | None = None,
    ) -> None:
        self.costs = costs
        self.layout = layout
        self.correction_bytes = correction_bytes
        self.mixed_bytes = mixed_bytes
        self.simulator = Simulator(costs, rates, ranks)
        self.estimate = Estimate(costs, layout, ranks)
        self._order = by_first_use(layout)
        self._is_sharded = ranks is not None and ranks.sharding is not None
        # What is open for the whole step is on the device in any case; spread, its optimizer state takes less there.
        self._always = {group.name for group in layout.groups if is_always_open(group) and not self._is_sharded}
        self._tables = frozenset(name for name, group in costs.groups.items() if group.is_table)
        self._blocks = [name for name in self._order if len(costs.groups[name].policies) > 1]

    def corrected(self, correction_bytes: int, mixed_bytes: int = 0) -> Search:
        """The same search with other corrections; what was simulated and counted for it is remembered."""
        other = copy.copy(self)
        other.correction_bytes = correction_bytes
        other.mixed_bytes = mixed_bytes
        return other

    def fastest(self, limits: Limits) -> Found:
        """The fastest placement within the limits.

        Raises:
            PlanError: None fits; the message says what the smallest one takes.
        """
        run = _Run(self, limits)
        run.begin()
        if run.best is None:
            raise self._does_not_fit(limits)
        run.refine()
        uniform = self._uniform(limits)
        fastest_s = min(candidate.step_s for candidate in (run.best, *uniform))
        about_as_fast = [each for each in run.simulated if each.step_s <= fastest_s * (1 + WORTH_IT)]
        simple = [each for each in uniform if each.step_s <= fastest_s * (1 + WORTH_IT)]
        best = min(simple or about_as_fast, key=self._effort)
        return Found(best=best, uniform=uniform, num_tried=len(run.simulated) + len(uniform))

    def fastest_below(self, limits: Limits, below_s: float) -> float | None:
        """Seconds of the fastest step where that takes less than so many; None where none does. Sooner told than which."""
        run = _Run(self, limits, below_s)
        run.begin()
        if run.best is not None:
            run.refine()
        return None if run.best is None else run.best.step_s

    def smallest(self, limits: Limits) -> Shape:
        """The shape that takes least of the device."""
        shapes = [
            Shape(
                num_resident=0, num_device=0, small=policy, fast=policy, num_fast=0, prefetch_depth=0, tables_stay=stay
            )
            for policy in limits.small_policies
            for stay in self.where_tables_are
        ]
        return min(shapes, key=lambda shape: self.device_bytes(self.placement(shape, limits)))

    def placement(self, shape: Shape, limits: Limits) -> Placement:
        """What a shape says about each group."""
        resident = {*self._order[: shape.num_resident], *self._always}
        on_device = set(self._order[: shape.num_device] if limits.sites is None else _updated_on_device(limits.sites))
        blocks, fast = set(self._blocks), set(self._blocks[len(self._blocks) - shape.num_fast :])
        tables = self._tables_within(limits) if shape.tables_stay else ()
        coming = {
            site: Weights.SHARDED if self._is_sharded and site is Site.DEVICE else Weights.STREAMED for site in Site
        }
        choices = tuple(
            _choice(Weights.HOST, Site.HOST, "keep")
            if name in tables
            else _choice(
                Weights.RESIDENT if name in resident else coming[Site.DEVICE if name in on_device else Site.HOST],
                Site.DEVICE if name in on_device else Site.HOST,
                (shape.fast if name in fast else shape.small) if name in blocks else "keep",
            )
            for name in self._order
        )
        return self._placed(Arrangement(choices, shape.prefetch_depth), limits)

    def _placed(self, arrangement: Arrangement, limits: Limits) -> Placement:
        groups = dict(zip(self._order, arrangement.groups, strict=True))
        least_bytes = self.estimate.window_bytes(groups, arrangement.prefetch_depth)
        placement = Placement(
            groups=groups,
            schedule=limits.schedule,
            prefetch_depth=arrangement.prefetch_depth,
            window_bytes=least_bytes + arrangement.extra_window_bytes,
            staging_bytes=0,
            is_clipped=limits.is_clipped,
        )
        return self._staged(placement, limits)

    def _staged(self, placement: Placement, limits: Limits) -> Placement:
        staging_bytes = self.estimate.staging_bytes(
            placement, host_bytes=limits.host_bytes, pinned_bytes=limits.pinned_bytes
        )
        return replace(placement, staging_bytes=staging_bytes)

    def improved(self, start: Candidate, limits: Limits) -> Candidate:
        """A candidate with single choices changed; itself, where nothing makes its step faster by as much as is worth it."""
        choices = Choices(
            weights=tuple(self._weights(name, limits) for name in self._order),
            sites=tuple(
                (Site.DEVICE, Site.HOST) if limits.sites is None else (limits.sites[name],) for name in self._order
            ),
            policies=tuple(
                tuple(word for word in self.costs.groups[name].policies if word in limits.policies or word == "keep")
                for name in self._order
            ),
            largest_bytes=max((group.weight_bytes for group in self.costs.groups.values()), default=0),
        )
        found: dict[Arrangement, Candidate] = {}

        def simulated_s(arrangement: Arrangement) -> float:
            found[arrangement] = self._candidate(start.shape, self._placed(arrangement, limits))
            return found[arrangement].step_s

        best = improved(
            Arrangement(tuple(start.placement.groups[name] for name in self._order), start.placement.prefetch_depth),
            start.step_s,
            choices,
            most_simulated=_SIMULATED_USES // len(self.costs.uses),
            least_s=lambda arrangement: self.simulator.least_s(self._placed(arrangement, limits)),
            fits=lambda arrangement: self.fits(self._placed(arrangement, limits), limits),
            simulated_s=simulated_s,
        )
        faster = found.get(best, start)
        return faster if faster.step_s < start.step_s * (1 - WORTH_IT) else start

    def _weights(self, name: str, limits: Limits) -> tuple[Weights, ...]:
        if name in self._always:
            return (Weights.RESIDENT,)
        tables = (Weights.HOST,) if name in self._tables_within(limits) else ()
        return (Weights.RESIDENT, Weights.STREAMED, *tables)

    def _tables_within(self, limits: Limits) -> frozenset[str]:
        """Embeddings that may stay on the host, and so are updated there."""
        return self._tables if limits.sites is None else self._tables.difference(_updated_on_device(limits.sites))

    def device_bytes(self, placement: Placement) -> int:
        """Estimated peak of the device, corrected."""
        return self._beside_highest(placement) + self.estimate.highest_bytes(placement)

    def _beside_highest(self, placement: Placement) -> int:
        correction = self.correction_bytes + (self.mixed_bytes if self.is_mixed(placement) else 0)
        return self.estimate.held_bytes(placement) + correction

    def is_mixed(self, placement: Placement) -> bool:
        """Whether blocks have different policies."""
        return len({placement.groups[name].policy for name in self._blocks}) > 1

    def host_bytes(self, placement: Placement) -> tuple[int, int]:
        """Bytes of the host in all, and the part of them that is locked."""
        return self.estimate.host_bytes(placement)

    def fits(self, placement: Placement, limits: Limits) -> bool:
        """Whether the placement is within every limit."""
        host, pinned = self.host_bytes(placement)
        if host > limits.host_bytes or pinned > limits.pinned_bytes:
            return False
        beside = self._beside_highest(placement)
        # Most that do not fit hold too much as it is, and the highest point is dear to find.
        return beside <= limits.device_bytes and self.device_bytes(placement) <= limits.device_bytes

    def most_fast(self, shape: Shape, limits: Limits) -> Shape | None:
        """The shape with as many blocks under the faster policy as fit; None where not even none do."""
        shape = replace(shape, num_fast=0)
        if not self.fits(self.placement(shape, limits), limits):
            return None
        if shape.small == shape.fast:
            return shape

        def is_too_much(num_fast: int) -> bool:
            return not self.fits(self.placement(replace(shape, num_fast=num_fast), limits), limits)

        most = bisect_right(range(1, len(self._blocks) + 1), 0, key=lambda count: int(is_too_much(count)))
        return replace(shape, num_fast=most)

    def evaluate(self, shape: Shape, limits: Limits) -> Candidate:
        """The candidate of a shape, simulated."""
        return self._candidate(shape, self.placement(shape, limits))

    def _candidate(self, shape: Shape, placement: Placement) -> Candidate:
        host, pinned = self.host_bytes(placement)
        return Candidate(
            shape=shape,
            placement=placement,
            device_bytes=self.device_bytes(placement),
            host_bytes=host,
            pinned_bytes=pinned,
            times=self.simulator.times(placement),
        )

    def simulate(self, plan: Plan, limits: Limits) -> SimulatedStep:
        """The step under a plan that somebody else made; a group has the policy and the site of its first chunk."""
        placement = Placement(
            groups={
                group.name: GroupChoice(
                    weights=group.weights,
                    site=group.sites[0] if group.sites else Site.DEVICE,
                    policy=word_of_policy(group.activation),
                )
                for group in plan.groups
            },
            schedule=plan.schedule,
            prefetch_depth=plan.prefetch_depth,
            window_bytes=plan.budgets.window_bytes or window_bytes_needed(self.layout, plan),
            staging_bytes=plan.budgets.staging_bytes or 0,
            is_clipped=limits.is_clipped,
        )
        if not placement.staging_bytes:
            placement = self._staged(placement, limits)
        return self.simulator.step(placement)

    @property
    def where_tables_are(self) -> tuple[bool, ...]:
        """Whether embeddings stay on the host: both are tried where there are any."""
        return (False, True) if self._tables else (False,)

    @property
    def num_groups(self) -> int:
        """Groups in all."""
        return len(self._order)

    def _effort(self, candidate: Candidate) -> tuple[bool, int]:
        """By what placements that are about as fast are ordered: nothing to manage first, then the least of the device."""
        shape = candidate.shape
        return min(shape.num_resident, shape.num_device) < self.num_groups, candidate.device_bytes

    def _grid(self, limits: Limits) -> Iterator[Shape]:
        counts = sorted({round(self.num_groups * number / _GRID) for number in range(_GRID + 1)})
        for small, fast in self.ladders(limits):
            for num_resident in counts:
                for num_device in counts if limits.sites is None else (0,):
                    shape = Shape(num_resident=num_resident, num_device=num_device, small=small, fast=fast, num_fast=0)
                    yield shape
                    if self._tables and small == fast:  # the other pairs find them among single changes
                        yield replace(shape, tables_stay=True)

    def ladders(self, limits: Limits) -> list[tuple[str, str]]:
        """Pairs of a smaller and a faster policy that the blocks can have."""
        if not self._blocks:
            return [("keep", "keep")]
        known = set(limits.policies).intersection(*(self.costs.groups[name].policies for name in self._blocks))
        return [ladder for ladder in LADDERS if set(ladder) <= known]

    def _uniform(self, limits: Limits) -> tuple[Candidate, ...]:
        found = []
        for small, fast in self.ladders(limits):
            if small != fast:
                continue
            for num_resident in (0, self.num_groups):
                for num_device in (0, self.num_groups) if limits.sites is None else (0,):
                    shape = Shape(num_resident=num_resident, num_device=num_device, small=small, fast=fast, num_fast=0)
                    if self.fits(self.placement(shape, limits), limits):
                        found.append(self.evaluate(shape, limits))
        return tuple(sorted(found, key=lambda candidate: candidate.step_s))

    def _does_not_fit(self, limits: Limits) -> PlanError:
        placement = self.placement(self.smallest(limits), limits)
        needed = self.device_bytes(placement)
        host, pinned = self.host_bytes(placement)
        if needed > limits.device_bytes:
            updates = "all updates on the host" if limits.sites is None else "updates where they are to stay"
            return PlanError(
                f"no plan fits {format_bytes(limits.device_bytes)} of device memory: with all weights streamed, {updates} "
                f"and the smallest activation policy the step takes about {format_bytes(needed)}; give at least that, or a "
                "smaller batch",
                needed_bytes=needed,
            )
        return PlanError(
            f"no plan fits {format_bytes(limits.host_bytes)} of host memory, {format_bytes(limits.pinned_bytes)} of it locked: "
            f"what the device cannot hold takes about {format_bytes(host)}, {format_bytes(pinned)} of it locked; raise "
            "host_memory or device_memory, or choose a precision with smaller state",
            needed_bytes=host,
        )


def _updated_on_device(sites: Mapping[str, Site]) -> Iterator[str]:
    return (name for name, site in sites.items() if site is Site.DEVICE)


def probe_placement(costs: StepCosts, layout: Layout, policies: Mapping[str, str]) -> Placement:
    """The placement of a step from which costs were read: all streamed, and updated on the host in backward."""
    always = {group.name for group in layout.groups if is_always_open(group)}
    streamed = costs.groups.keys() - always
    groups = {
        name: GroupChoice(
            weights=Weights.STREAMED if name in streamed else Weights.RESIDENT,
            site=Site.HOST,
            policy=policies.get(name, policies.get(OTHERS, "keep")) if len(group.policies) > 1 else "keep",
        )
        for name, group in costs.groups.items()
    }
    return Placement(
        groups=groups,
        schedule=Schedule.IN_BACKWARD,
        prefetch_depth=1,
        window_bytes=window_bytes(layout, streamed, 1),
        staging_bytes=0,
    )


@dataclass(slots=True)
class _Run:
    """One search under one set of limits."""

    search: Search
    limits: Limits
    below_s: float = math.inf
    """Slower steps are of no interest."""
    best: Candidate | None = None
    simulated: list[Candidate] = field(default_factory=list)
    _seen: set[Shape] = field(default_factory=set)

    def begin(self) -> None:
        """Try shapes that differ much."""
        for depth in _PREFETCH_DEPTHS:
            if self.try_all(replace(shape, prefetch_depth=depth) for shape in self.search._grid(self.limits)):
                return

    def try_all(self, shapes: Iterable[Shape]) -> bool:
        """Simulate those that fit and could be faster than the best, the most promising first; say whether any fits."""
        search, limits = self.search, self.limits
        promising: list[tuple[float, int, Shape]] = []
        for number, shape in enumerate(shapes):
            filled = search.most_fast(shape, limits)
            if filled is None or filled in self._seen:
                continue
            self._seen.add(filled)
            promising.append((search.simulator.least_s(search.placement(filled, limits)), number, filled))
        for least_s, _, shape in sorted(promising, key=lambda entry: entry[:2]):
            if least_s >= self.below_s:
                break
            candidate = search.evaluate(shape, limits)
            self.simulated.append(candidate)
            if candidate.step_s < self.below_s:
                self.best, self.below_s = candidate, candidate.step_s
        return bool(promising)

    def refine(self) -> None:
        """Move the best one's numbers in smaller and smaller steps, as long as that helps."""
        assert self.best is not None, "the grid found one"
        stride = max(1, self.search.num_groups // _GRID // 2)
        while True:
            before = self.best
            near = _neighbours(before.shape, stride, self.search.num_groups)
            are_given = self.limits.sites is not None
            self.try_all(each for each in near if not are_given or each.num_device == before.shape.num_device)
            if self.best is before:
                if stride == 1:
                    return
                stride = max(1, stride // 2)


def _neighbours(shape: Shape, stride: int, num_groups: int) -> Sequence[Shape]:
    moves: list[Callable[[int], Shape]] = [
        lambda by: replace(shape, num_resident=shape.num_resident + by),
        lambda by: replace(shape, num_device=shape.num_device + by),
        lambda by: replace(shape, num_resident=shape.num_resident + by, num_device=shape.num_device + by),
        lambda by: replace(shape, num_resident=shape.num_resident + by, num_device=shape.num_device - by),
    ]
    near = [move(by) for move in moves for by in (-stride, stride)]
    near += [replace(shape, prefetch_depth=depth) for depth in _PREFETCH_DEPTHS if depth != shape.prefetch_depth]
    return [each for each in near if 0 <= each.num_resident <= num_groups and 0 <= each.num_device <= num_groups]
