"""PlanProblem: a step to be planned inside some memory, and how it is solved.

One traced step prices every group under every activation policy (`planning.step_costs`). The search picks the fastest
placement whose estimated bytes fit (`planning.search`). Its step is then traced as the session will run it, and the plan is
accepted only if that replay of the allocator stays inside the budgets. Where it does not, or leaves much of them, the
difference corrects the next search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.policy import policy_of, word_of_policy
from lowtide.errors import PlanError
from lowtide.hardware import Hardware
from lowtide.memory.chunk import GroupSpec, Layout
from lowtide.optim.update_types import Numerics
from lowtide.planning.budget_curve import BudgetPoint, CurveSource, budget_curve
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.lanes import GroupChoice, LaneRates
from lowtide.planning.placement import assemble, can_stay_on_host, parts_by_chunk
from lowtide.planning.plan import Budgets, Plan, Schedule, Sharding, Site, Weights
from lowtide.planning.search import WORTH_IT, Candidate, Found, Limits, Search, Shape, probe_placement
from lowtide.planning.simulator import SimulatedStep, lane_rates
from lowtide.planning.step_costs import StepCosts, probe_policies, read_costs
from lowtide.runtime.host_memory import HostNeed, host_need, state_bytes_by_parameter
from lowtide.runtime.prediction.trace import Optimizer, trace, update_kind
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import tensors_in
from lowtide.units import format_bytes, format_seconds

TABLES = "tables"
ALLOWED = (TABLES,)
"""What changes the arithmetic, and is searched only with the user's word. `tables`: 16-bit embeddings stay on the host."""
_ENDLESS = 1 << 60
_MOST_REPLAYS = 6
_GAPS = 0.04
"""The share of the device budget with which `_Gaps` begin."""
_WORTH_A_REPLAY = 0.06
"""The share of the device budget that a replay must have left unused for another search."""
_WORTH_A_WORD = 0.03
"""The share of a step that another schedule must save to be told of."""
MARGIN = 0.03
"""The share of free device memory that is left alone where no budget is given."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The fastest plan that fits, with its predicted step."""

    plan: Plan
    trace: StepTrace
    """The step under the plan: its peak, and what it holds of the host."""
    simulated: SimulatedStep
    """Its time, by lanes."""
    rejected: tuple[Candidate, ...]
    """Uniform placements that fit, the fastest first: what a user would try by hand."""
    costs: StepCosts
    hardware: Hardware
    num_tokens: int
    """Elements of the batch's first tensor of whole numbers: tokens of a language model; 0 where it has none."""
    num_tried: int
    source: CurveSource
    """What it was found with."""
    in_backward_s: float | None = None
    """Predicted seconds a step with updates in backward, where they are deferred, nothing is clipped and that is faster."""
    with_tables_s: float | None = None
    """The same with 16-bit embeddings on the host, which needs `allow=["tables"]`, where that is faster."""

    @property
    def step_s(self) -> float:
        """Predicted seconds a step."""
        return self.simulated.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Predicted; None where the batch has no tokens."""
        return self.num_tokens / self.step_s if self.num_tokens else None

    def by_budget(self) -> tuple[BudgetPoint, ...]:
        """The fastest step at each device budget, from the smallest that holds it to where more memory gains nothing.

        Takes some searches, and two traces for the ends.
        """
        return budget_curve(self.source)

    def simulate(self, other: Plan) -> SimulatedStep:
        """The same step under another plan, one made by hand for instance; nothing is traced."""
        return self.source.search.simulate(other, self.source.limits)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """What the plan does, a short sentence for each technique."""
        return tuple(_words(self.plan))

    def __repr__(self) -> str:
        peak = format_bytes(self.trace.peak_reserved_bytes)
        return f"<PlannedStep: {format_seconds(self.step_s)} a step in {peak} of {self.hardware.name}; {self.plan.summary}>"


@dataclass(slots=True)
class _Gaps:
    """The share of the device budget that the allocator is taken to hold beyond its tensors.

    What the allocator held in a replay that did not fit, free to take more, is surely enough: half of the way there is tried
    first. Once a replay has fitted, it is the middle between what was too little and what was enough.
    """

    share: float = _GAPS
    _too_little: float = 0.0
    _enough: float | None = None

    def was_too_little(self, held_bytes: int, budget_bytes: int) -> None:
        """A replay did not fit, and held so much beyond its tensors without a limit."""
        if self._enough is None:
            held = held_bytes / budget_bytes
            self.share, self._too_little = (
                max(2 * self.share, held if self._too_little else (self.share + held) / 2),
                self.share,
            )
        else:
            self._too_little = self.share
            self._halve()

    def was_enough(self, left: float) -> None:
        """A replay fitted, and left this share of the budget."""
        self._enough = self.share
        if self._too_little:
            self._halve()
        else:
            self.share = max(0.0, self.share - left)

    def is_too_much(self) -> None:
        """Nothing fits beside gaps of this share."""
        self._enough = self.share
        self._halve()

    def _halve(self) -> None:
        assert self._enough is not None, "there are two ends"
        self.share = (self._too_little + self._enough) / 2


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """A step to be planned."""

    model: nn.Module
    batch: Any
    optimizer: Optimizer
    numerics: Numerics | None
    hardware: Hardware
    traced: Mapping[str, Any]
    """What `trace` gets beside model, batch and plan."""
    layout: Layout
    tell: Callable[[str], None]
    allow: frozenset[str] = frozenset()
    """What the user permits though it changes the arithmetic: words of `ALLOWED`."""
    known: tuple[StepCosts, int] | None = None
    """`priced`, where it is known already."""

    @cached_property
    def priced(self) -> tuple[StepCosts, int]:
        """The step's costs, and the bytes of tensors beyond their estimate."""
        return self.read(self.probes()) if self.known is None else self.known

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, as `PlannedStep` counts them."""
        return _num_tokens(self.batch)

    @property
    def search(self) -> Search:
        """The search among its placements, whose bytes are corrected for tensors but not for what the allocator holds beyond."""
        return self._any_search.corrected(self.priced[1])

    @cached_property
    def _any_search(self) -> Search:
        return Search(self.priced[0], self.layout, self._rates())

    def replay(self, candidate: Candidate, limits: Limits) -> tuple[Plan, StepTrace]:
        """A placement's plan, and its step as a session runs it; where the budget does not even hold the weights, without it."""
        chosen = self._plan_of(candidate, limits)
        try:
            traced = self.under(chosen)
        except PlanError:
            traced = self.under(self._plan_of(candidate, replace(limits, device_bytes=_ENDLESS)))
        # What activations take of the host is not known to a plan, and so not in its trace.
        stashed_bytes = self._any_search.estimate.stashed_bytes(candidate.placement)
        host_bytes, pinned_bytes = (traced.host_bytes or 0) + stashed_bytes, (traced.pinned_bytes or 0) + stashed_bytes
        return chosen, replace(traced, host_bytes=host_bytes, pinned_bytes=pinned_bytes)

    def under(self, plan: Plan) -> StepTrace:
        """The step under a plan, traced."""
        if plan not in self._known_traces:
            self._known_traces[plan] = trace(self.model, self.batch, plan=plan, **self.traced)
        return self._known_traces[plan]

    @cached_property
    def _known_traces(self) -> dict[Plan, StepTrace]:
        """A search comes back to plans that it has tried."""
        return {}

    def fastest(self, limits: Limits) -> PlannedStep:
        """The fastest plan that fits; near the least that any takes, the smallest one.

        Raises:
            PlanError: Not even that fits; the message says what it takes.
        """
        try:
            return self.solve(limits)
        except PlanError as error:
            self.tell("replaying the smallest plan")
            candidate = smallest(self.search, limits)
            chosen, replayed = self.replay(candidate, limits)
            if self.fits(replayed, limits):
                gaps = 1 - replayed.peak_bytes / replayed.peak_reserved_bytes
                return self._planned(candidate, chosen, replayed, limits, beyond=self.priced[1], gaps=gaps)
            if replayed.peak_reserved_bytes <= limits.device_bytes:
                raise  # the host's memory is what is short, and the message says so
            raise self.nothing_fits(candidate, replayed.peak_reserved_bytes, limits) from error

    def nothing_fits(self, candidate: Candidate, reserved_bytes: int, limits: Limits) -> PlanError:
        """Says what the smallest plan takes of the device, or of the host where more of that would do."""
        device, reserved = format_bytes(limits.device_bytes), format_bytes(reserved_bytes)
        least = smallest(self.search, replace(limits, host_bytes=_ENDLESS, pinned_bytes=_ENDLESS))
        if least.placement.groups == candidate.placement.groups:
            return PlanError(
                f"no plan fits {device} of device memory: with weights streamed, updates on the host and activations under "
                f"{candidate.shape.small!r} the step reserves {reserved}; give that much, or a smaller batch",
                needed_bytes=reserved_bytes,
            )
        return PlanError(
            f"no plan fits {device} of device memory and {format_bytes(limits.host_bytes)} of host memory "
            f"({format_bytes(limits.pinned_bytes)} of it locked): with weights streamed and updates on the host the step takes "
            f"about {format_bytes(least.device_bytes)} of the device and {format_bytes(least.host_bytes)} of the host "
            f"({format_bytes(least.pinned_bytes)} of it locked); give that much, or a precision with smaller state",
            needed_bytes=least.host_bytes,
        )

    def _planned(
        self, candidate: Candidate, chosen: Plan, replayed: StepTrace, limits: Limits, *, beyond: int, gaps: float
    ) -> PlannedStep:
        costs = self.priced[0]
        return PlannedStep(
            plan=chosen,
            trace=replayed,
            simulated=self._any_search.simulator.step(candidate.placement),
            rejected=(),
            costs=costs,
            hardware=self.hardware,
            num_tokens=_num_tokens(self.batch),
            num_tried=1,
            source=CurveSource(
                search=self._any_search.corrected(beyond),
                gaps=gaps,
                limits=limits,
                best=candidate,
                best_bytes=replayed.peak_reserved_bytes,
                device_bytes=usable_bytes(self.hardware) if self.hardware.memory_bytes else None,
                replay=lambda other, within: self.replay(other, within)[1],
            ),
        )

    def solve(self, limits: Limits) -> PlannedStep:
        """Search and replay until the replay stays inside the budgets and uses them.

        The estimate of what tensors take is off by nearly the same bytes for all placements. What the allocator holds beyond
        them is not known before the replay, and more where blocks have different policies: see `_Gaps`.
        """
        beyond = self.priced[1]
        alike, mixed = _Gaps(), _Gaps()
        best: tuple[Candidate, Plan, StepTrace] | None = None
        found: Found | None = None
        share = 0.0
        smallest: StepTrace | None = None
        for attempt in range(1, _MOST_REPLAYS + 1):
            self.tell("searching the fastest plan")
            mixed.share = max(mixed.share, alike.share)
            search = self._any_search.corrected(
                beyond + int(alike.share * limits.device_bytes),
                int((mixed.share - alike.share) * limits.device_bytes),
            )
            try:
                latest = search.fastest(limits)
            except PlanError:
                if smallest is None:
                    raise
                alike.is_too_much()
                continue
            candidate = latest.best
            if best is not None and candidate.step_s >= best[0].step_s * (1 - WORTH_IT):
                break
            self.tell(f"replaying its step ({attempt})")
            chosen, replayed = self.replay(candidate, limits)
            gaps = mixed if search.is_mixed(candidate.placement) else alike
            beyond += replayed.peak_bytes - (candidate.device_bytes - int(gaps.share * limits.device_bytes))
            if self.fits(replayed, limits):
                best, found, share = (candidate, chosen, replayed), latest, gaps.share
                left = 1 - replayed.peak_reserved_bytes / limits.device_bytes
                gaps.was_enough(left)
                if left < _WORTH_A_REPLAY and smallest is None:
                    break
            else:
                if smallest is None or replayed.peak_reserved_bytes < smallest.peak_reserved_bytes:
                    smallest = replayed
                gaps.was_too_little(replayed.peak_reserved_bytes - replayed.peak_bytes, limits.device_bytes)
        if best is None or found is None:
            assert smallest is not None, "each replay fits or does not"
            raise PlanError(
                f"no plan was found whose step stays inside {format_bytes(limits.device_bytes)} of device memory: the smallest "
                f"that was replayed takes {format_bytes(smallest.peak_reserved_bytes)}; give that much, or a smaller batch",
                needed_bytes=smallest.peak_reserved_bytes,
            )
        candidate, chosen, replayed = self._improved(best, beyond, (share, max(share, mixed.share)), limits)
        return replace(
            self._planned(candidate, chosen, replayed, limits, beyond=beyond, gaps=alike.share),
            rejected=tuple(other for other in found.uniform if other.shape != candidate.shape),
            num_tried=found.num_tried,
            in_backward_s=self._in_backward_s(search, limits, candidate.step_s),
            with_tables_s=self._with_tables_s(candidate),
        )

    def _improved(
        self, best: tuple[Candidate, Plan, StepTrace], beyond: int, shares: tuple[float, float], limits: Limits
    ) -> tuple[Candidate, Plan, StepTrace]:
        """With single choices changed, where a replay stays inside the budgets: beside the gaps that were planned with (those
        of blocks alike, and of mixed ones), or else those that the best one was seen to have.
        """
        candidate, _, replayed = best
        choices = candidate.placement.groups.values()
        if all(choice.weights is Weights.RESIDENT and choice.site is Site.DEVICE for choice in choices):
            return best  # all is on the device already: what a change saves is not worth a session in every call
        seen = (limits.device_bytes - replayed.peak_bytes) / limits.device_bytes
        for share in sorted({shares[0], max(shares[0], seen)}):
            self.tell("changing single choices")
            search = self._any_search.corrected(
                beyond + int(share * limits.device_bytes), int(max(0.0, shares[1] - share) * limits.device_bytes)
            )
            better = search.improved(candidate, limits)
            if better is candidate:
                break
            self.tell("replaying the changed step")
            chosen, replayed = self.replay(better, limits)
            if self.fits(replayed, limits):
                return better, chosen, replayed
        return best

    def _in_backward_s(self, search: Search, limits: Limits, deferred_s: float) -> float | None:
        if limits.schedule is Schedule.IN_BACKWARD or limits.is_clipped:
            return None
        return search.fastest_below(replace(limits, schedule=Schedule.IN_BACKWARD), deferred_s * (1 - _WORTH_A_WORD))

    def probes(self) -> list[tuple[dict[str, str], StepTrace]]:
        """The traces that price its parts."""
        found = []
        for policies in probe_policies(self.layout):
            self.tell("pricing the step's parts")
            probe = make_plan(self.layout, update="host", schedule="in_backward", activations=policies or None)
            found.append((policies, self.under(probe)))
        return found

    def read(self, probes: Sequence[tuple[Mapping[str, str], StepTrace]]) -> tuple[StepCosts, int]:
        """The step's costs, and the bytes of tensors beyond their estimate in the probe."""
        costs = read_costs(self.layout, probes, self._state_bytes, self._tables)
        policies, probed = probes[-1]
        estimate = Search(costs, self.layout, self._rates()).device_bytes(probe_placement(costs, self.layout, policies))
        return costs, probed.peak_bytes - estimate

    @property
    def _tables(self) -> list[str]:
        """Groups that are embeddings, and of which only rows need to come to the device.

        The host adds up the gradient rows of a 16-bit table in 16 bits: 4096 rows of one token in bf16 may come to an eighth
        of their sum. So those are the user's to choose.
        """
        return [
            group.name
            for group in self._embeddings
            if TABLES in self.allow or all(each.dtype == torch.float32 for each in group.parameters)
        ]

    @property
    def _embeddings(self) -> list[GroupSpec]:
        modules = dict(self.model.named_modules())
        return [
            group
            for group in self.layout.groups
            if isinstance(modules.get(group.name), nn.Embedding) and can_stay_on_host(group)
        ]

    def _with_tables_s(self, candidate: Candidate) -> float | None:
        """Seconds a step where nothing else changes."""
        if TABLES in self.allow or not self._embeddings:
            return None
        stay = GroupChoice(weights=Weights.HOST, site=Site.HOST)
        groups = {**candidate.placement.groups, **{group.name: stay for group in self._embeddings}}
        found_s = self._any_search.simulator.times(replace(candidate.placement, groups=groups)).step_s
        return found_s if found_s < candidate.step_s * (1 - _WORTH_A_WORD) else None

    @cached_property
    def _held(self) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:
        """The optimizer, and the parameters by name that it is about."""
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return self.optimizer, named
        named = compat.without_memory(named)
        return self.optimizer([parameter for parameter in named.values() if parameter.requires_grad]), named

    def host_needs(self, plan: Plan, layout: Layout) -> list[HostNeed]:
        """What the host must hold for each of the ranks that share the weights, as a session finds it."""
        own, named = self._held
        parts = parts_by_chunk(plan, layout)
        return [
            host_need(layout, plan, own, self.numerics, named, {name: each[rank] for name, each in parts.items()})
            for rank in range(layout.shards)
        ]

    @cached_property
    def _state_bytes(self) -> dict[str, int]:
        own, named = self._held
        sizes = state_bytes_by_parameter(own, self.numerics)
        return {
            group.name: sum(sizes.get(id(named[parameter.name]), 0) for parameter in group.parameters)
            for group in self.layout.groups
        }

    def _rates(self) -> LaneRates:
        return lane_rates(self.hardware, update_kind(self.numerics, self.hardware))

    def _plan_of(self, candidate: Candidate, limits: Limits) -> Plan:
        return plan_of(candidate, self._any_search, limits)

    def fits(self, replayed: StepTrace, limits: Limits) -> bool:
        """Whether a replayed step is inside every budget."""
        assert replayed.host_bytes is not None, "a trace under a plan has them"
        assert replayed.pinned_bytes is not None, "a trace under a plan has them"
        return (
            replayed.peak_reserved_bytes <= limits.device_bytes
            and replayed.host_bytes <= limits.host_bytes
            and replayed.pinned_bytes <= limits.pinned_bytes
        )


def plan_of(candidate: Candidate, search: Search, limits: Limits, sharding: Sharding | None = None) -> Plan:
    """A candidate's plan, for the layout that was searched."""
    placement = candidate.placement
    choices = placement.groups
    least = search.estimate.window_bytes(choices, placement.prefetch_depth)
    return assemble(
        search.layout,
        weights={name: choice.weights for name, choice in choices.items()},
        sites={chunk.name: choices[chunk.group].site for chunk in search.layout.chunks},
        schedule=limits.schedule,
        prefetch_depth=placement.prefetch_depth,
        activations={name: policy_of(choice.policy) for name, choice in choices.items()},
        budgets=Budgets(
            device_bytes=limits.device_bytes,
            host_bytes=limits.host_bytes,
            pinned_bytes=limits.pinned_bytes,
            window_bytes=placement.window_bytes if placement.window_bytes > least else None,
        ),
        sharding=sharding,
    )


def smallest(search: Search, limits: Limits) -> Candidate:
    """The uniform placement that takes least of the device, of those that the host holds if there are any."""
    num = search.num_groups
    shapes = [
        Shape(
            num_resident=resident,
            num_device=device,
            small=policy,
            fast=policy,
            num_fast=0,
            prefetch_depth=0,
            tables_stay=stay,
        )
        for policy in limits.small_policies
        for resident in (0, num)
        for device in (0, num)
        for stay in search.where_tables_are
    ]

    def taken(shape: Shape) -> tuple[bool, int]:
        placement = search.placement(shape, limits)
        return search.host_bytes(placement)[0] > limits.host_bytes, search.device_bytes(placement)

    return search.evaluate(min(shapes, key=taken), limits)


def usable_bytes(hardware: Hardware) -> int:
    """What may be reserved of a device where nothing else is said: its memory less its context and a margin."""
    return int((hardware.memory_bytes - hardware.context_bytes) * (1 - MARGIN))


def _num_tokens(batch: Any) -> int:
    whole = [tensor for tensor in tensors_in(batch) if not tensor.is_floating_point()]
    return whole[0].numel() if whole else 0


def _words(plan: Plan) -> Iterable[str]:
    num_groups = len(plan.groups)
    num_resident = sum(group.weights is Weights.RESIDENT for group in plan.groups)
    tables = [group.name for group in plan.groups if group.weights is Weights.HOST]
    stay = f"{', '.join(tables)} stays on the host, " if tables else ""
    stays = "stays" if num_resident == 1 else "stay"
    yield (
        "all weights stay on the device"
        if num_resident == num_groups
        else f"{num_resident} of {num_groups} groups {stays} on the device, {stay}the others are streamed"
    )
    num_device = sum(site is Site.DEVICE for group in plan.groups for site in group.sites[:1])
    sites = {num_groups: "on the device", 0: "on the host"}
    yield (
        f"all groups are updated {sites[num_device]}, {plan.schedule.value}"
        if num_device in sites
        else f"{num_device} group{' is' if num_device == 1 else 's are'} updated on the device, {num_groups - num_device} on "
        f"the host, {plan.schedule.value}"
    )
    by_word = Counter(word_of_policy(group.activation) for group in plan.groups)
    chosen = [
        f"{count} block{'s' if count > 1 else ''} {word}" for word, count in sorted(by_word.items()) if word != "keep"
    ]
    yield f"activations: {', '.join([*chosen, 'all others keep']) if chosen else 'all blocks keep'}"
