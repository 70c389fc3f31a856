"""`lowtide.plan` and `lowtide.prepare`: the fastest plan that fits, and a session under it.

One traced step prices every group under every activation policy (`planning.step_costs`). The search picks the fastest
placement whose estimated bytes fit (`planning.search`). Its step is then traced as the session will run it, and the plan is
accepted only if that replay of the allocator stays inside the budgets. Where it does not, or leaves much of them, the
difference corrects the next search.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.policy import WORDS, policy_of
from lowtide.errors import ConfigError, PlanError, TraceError
from lowtide.hardware import Hardware, find_hardware, hardware_of
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.memory.tier import PINNABLE_SHARE, host_capacity_bytes
from lowtide.optim.update_types import Numerics, numerics_of
from lowtide.planning.budget_curve import BudgetPoint, CurveSource, budget_curve
from lowtide.planning.budget_plans import WarmUp
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.lanes import LaneRates
from lowtide.planning.placement import assemble, window_bytes
from lowtide.planning.plan import Budgets, Plan, Schedule, Site, Weights, word_of
from lowtide.planning.search import WORTH_IT, Candidate, Found, Limits, Search, Shape, probe_placement
from lowtide.planning.simulator import SimulatedStep, lane_rates
from lowtide.planning.step_costs import POLICIES, StepCosts, probe_policies, read_costs
from lowtide.runtime.host_memory import state_bytes_by_parameter
from lowtide.runtime.manage import manage
from lowtide.runtime.prediction.trace import Optimizer, trace, update_kind
from lowtide.runtime.session import Session
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import Loss, tensors_in
from lowtide.units import format_bytes, format_seconds, parse_bytes

Size = str | int
_MOST_REPLAYS = 6
_GAPS = 0.04
"""The share of the device budget with which `_Gaps` begin."""
_WORTH_A_REPLAY = 0.06
"""The share of the device budget that a replay must have left unused for another search."""
_WORTH_A_WORD = 0.03
"""The share of a step that another schedule must save to be told of."""
_MARGIN = 0.03
"""The share of free device memory that `prepare` leaves alone where no budget is given."""


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


def plan(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    pinned_memory: Size | None = None,
    hardware: str | Hardware = "h200",
    precision: str | None = None,
    moments: str = "fp32",
    schedule: Schedule | str = Schedule.DEFERRED,
    max_grad_norm: float | None = None,
    policies: Iterable[str] = POLICIES,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    torch_version: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> PlannedStep:
    """The fastest plan whose step fits the memory, predicted without the device it is for.

    What changes the arithmetic is never chosen: precision, optimizer, batch and schedule are those given.

    Args:
        model: As for `trace`: real, or on meta at any size.
        batch: As for `trace`; the largest that will come.
        optimizer: As for `trace`.
        device_memory: What the allocator may reserve; by default the hardware's memory less its CUDA context and a margin of 3%.
        host_memory: Of the host, for weights, gradients, staging and state; this machine's by default.
        pinned_memory: The part of it that may be locked; 72% by default.
        hardware: The device to plan for.
        precision: As for `manage`.
        moments: As for `manage`.
        schedule: `deferred`, or `in_backward` where nothing needs all gradients at once.
        max_grad_norm: As for `manage`; clipped updates wait for the last gradient.
        policies: Activation policies that may be used: words of `lowtide.activations`.
        loss: As for `trace`.
        autocast: As for `trace`.
        settings: As for `trace`.
        torch_version: As for `trace`.
        on_progress: Is told what is being done.

    Raises:
        PlanError: Nothing fits; the message says what the smallest plan takes.
        ConfigError: An argument does not fit the others.

    Example:
        >>> import lowtide, torch
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
        >>> found = lowtide.plan(model, batch, optimizer=torch.optim.AdamW, device_memory="200MiB", hardware="rtx-4090")
        >>> found.trace.peak_reserved_bytes <= 200 << 20, found.step_s > 0
        (True, True)
    """
    problem, limits = pose(
        model,
        batch,
        optimizer=optimizer,
        device_memory=device_memory,
        host_memory=host_memory,
        pinned_memory=pinned_memory,
        hardware=hardware,
        precision=precision,
        moments=moments,
        schedule=schedule,
        max_grad_norm=max_grad_norm,
        policies=policies,
        loss=loss,
        autocast=autocast,
        settings=settings,
        torch_version=torch_version,
        on_progress=on_progress,
    )
    return problem.fastest(limits)


def pose(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    pinned_memory: Size | None = None,
    hardware: str | Hardware = "h200",
    precision: str | None = None,
    moments: str = "fp32",
    schedule: Schedule | str = Schedule.DEFERRED,
    max_grad_norm: float | None = None,
    policies: Iterable[str] = POLICIES,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    torch_version: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[PlanProblem, Limits]:
    """The arguments of `plan`, checked: a step to be planned, and what it may take."""
    target = find_hardware(hardware) if isinstance(hardware, str) else hardware
    limits = _limits(target, device_memory, host_memory, pinned_memory, schedule, max_grad_norm, policies)
    tell = on_progress or (lambda text: None)
    problem = PlanProblem(
        model=model,
        batch=batch,
        optimizer=optimizer,
        numerics=None if precision is None else numerics_of(precision, moments)[1],
        hardware=target,
        traced={
            "optimizer": optimizer,
            "precision": precision,
            "moments": moments,
            "loss": loss,
            "autocast": autocast,
            "settings": settings,
            "hardware": target,
            "torch_version": torch_version,
        },
        layout=lay_out(find_groups(model)),
        tell=tell,
    )
    return problem, limits


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
    moments: str = "fp32",
    schedule: Schedule | str = Schedule.DEFERRED,
    max_grad_norm: float | None = None,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Session:
    """Trace, plan and manage in one call: the model then trains inside the memory there is, under an unchanged loop.

    Args:
        model: As for `manage`.
        optimizer: As for `manage`.
        batch: The largest that is usual, as a larger one makes the session plan again; a mapping for which
            `model(**batch).loss` is the loss, or anything with `loss`.
        device_memory: What may be reserved of the device; what is free now, less 3%, by default. An emulated device needs it.
        host_memory: Likewise of the host; all of it by default.
        device: As for `manage`.
        precision: As for `manage`. None leaves the arithmetic alone.
        moments: As for `manage`.
        schedule: `deferred`, or `in_backward` where nothing needs all gradients at once.
        max_grad_norm: As for `manage`.
        loss: As for `trace`.
        autocast: As for `trace`.
        on_progress: Is told what is being done.

    Returns:
        The session. Its `plan` says what was chosen.

    Raises:
        PlanError: Nothing fits; the message says what the smallest plan takes.

    Example:
        >>> import lowtide, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> batch = torch.ones(4, 64)
        >>> with lowtide.prepare(
        ...     model, optimizer, batch, loss=lambda m, x: m(x).sum(), device="cpu", device_memory="1MiB"
        ... ) as session:
        ...     model(batch).sum().backward()
        ...     optimizer.step()
    """
    # Here: what only a prepared session needs would make `import lowtide` slower.
    from lowtide.runtime.replanning import LOGGER, Replanning
    from lowtide.runtime.step_planner import StepPlanner

    is_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    chosen_device = torch.device("cuda" if is_cuda else "cpu") if device is None else torch.device(device)
    if not is_cuda and device_memory is None:
        raise ConfigError(
            "an emulated device has no size of its own; give device_memory, such as '2GiB'", key="device_memory"
        )
    hardware = hardware_of(chosen_device)
    budget = _free_bytes(chosen_device) if device_memory is None else parse_bytes(device_memory)
    words: dict[str, Any] = {"hardware": hardware, "precision": precision, "moments": moments, "autocast": autocast}
    search: Callable[..., PlannedStep] = partial(
        plan, host_memory=host_memory, schedule=schedule, max_grad_norm=max_grad_norm, **words
    )
    start = partial(
        manage,
        model,
        optimizer,
        device=chosen_device,
        max_grad_norm=max_grad_norm,
        precision=precision,
        moments=moments,
    )
    try:
        planned = search(model, batch, optimizer=optimizer, device_memory=budget, loss=loss, on_progress=on_progress)
    except TraceError as error:
        warnings.warn(
            f"the step could not be traced ({error}); the plan is made after one observed training step instead",
            stacklevel=2,
        )
        asked = word_of(Schedule, schedule, "schedule")
        return start(WarmUp(device_memory=budget, host_memory=host_memory, schedule=asked))
    # Before the model is managed, as it cannot be copied afterwards.
    planner = StepPlanner(search, words, model=model, batch=batch, optimizer=optimizer, loss=loss, device_bytes=budget)
    session = start(planned.plan)
    advice = faster_schedule(planned)
    if is_cuda and advice is not None:
        LOGGER.warning(advice)  # never an exception, unlike a warning under -W error
    session._adapt(partial(Replanning, planner=planner, planned=planner.first(planned)))
    return session


def faster_schedule(planned: PlannedStep) -> str | None:
    """A sentence on updates in backward where they would be clearly faster, for who may use them; None elsewhere."""
    if planned.in_backward_s is None:
        return None
    return (
        f"updates in backward would be faster: {format_seconds(planned.in_backward_s)} a step instead of "
        f"{format_seconds(planned.step_s)}, both predicted. Give prepare(..., schedule='in_backward') if the loop neither "
        "clips, scales nor accumulates gradients"
    )


def _free_bytes(device: torch.device) -> int:
    """What this process could reserve now, less the margin: free memory, and what it has reserved already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int((free + torch.cuda.memory_reserved(device)) * (1 - _MARGIN))


def _limits(
    hardware: Hardware,
    device_memory: Size | None,
    host_memory: Size | None,
    pinned_memory: Size | None,
    schedule: Schedule | str,
    max_grad_norm: float | None,
    policies: Iterable[str],
) -> Limits:
    asked = word_of(Schedule, schedule, "schedule")
    if max_grad_norm is not None and asked is Schedule.IN_BACKWARD:
        raise ConfigError(
            f"max_grad_norm={max_grad_norm} needs all gradients before the first update; use schedule='deferred'",
            key="max_grad_norm",
        )
    if device_memory is None and not hardware.memory_bytes:
        raise ConfigError(f"the memory of {hardware.name} is not known; give device_memory", key="device_memory")
    device_bytes = _size("device_memory", device_memory, usable_bytes(hardware))
    if hardware.memory_bytes and device_bytes > hardware.memory_bytes:
        raise ConfigError(
            f"device_memory is {format_bytes(device_bytes)}, and {hardware.label} has {format_bytes(hardware.memory_bytes)}; "
            "give at most that",
            key="device_memory",
        )
    host_bytes = _size("host_memory", host_memory, host_capacity_bytes())
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise ConfigError(f"policies has {unknown[0]!r}; give words of {', '.join(POLICIES)}", key="policies")
    return Limits(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        pinned_bytes=_size("pinned_memory", pinned_memory, int(host_bytes * PINNABLE_SHARE)),
        schedule=asked,
        is_clipped=max_grad_norm is not None,
        policies=tuple(policies),
    )


def usable_bytes(hardware: Hardware) -> int:
    """What may be reserved of a device where nothing else is said: its memory less its context and a margin."""
    return int((hardware.memory_bytes - hardware.context_bytes) * (1 - _MARGIN))


def _size(key: str, given: Size | None, default: int) -> int:
    if given is None:
        return default
    if isinstance(given, str) and given.strip().replace(".", "", 1).isdecimal():
        raise ConfigError(f"{key} is {given!r}, which has no unit; write '{given.strip()}GiB', or MiB", key=key)
    try:
        found = parse_bytes(given)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error
    if found <= 0:
        raise ConfigError(f"{key} is {given!r}; give a size such as '24GiB'", key=key)
    return found


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
        """A placement's plan, and its step as a session runs it."""
        chosen = self._plan_of(candidate, limits)
        return chosen, self.under(chosen)

    def under(self, plan: Plan) -> StepTrace:
        """The step under a plan, traced."""
        return trace(self.model, self.batch, plan=plan, **self.traced)

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
            raise PlanError(
                f"no plan fits {format_bytes(limits.device_bytes)} of device memory: with weights streamed, updates on the "
                f"host and activations under {candidate.shape.small!r} the step reserves "
                f"{format_bytes(replayed.peak_reserved_bytes)}; give that much, or a smaller batch",
                needed_bytes=replayed.peak_reserved_bytes,
            ) from error

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
        try:
            found_s = search.fastest(replace(limits, schedule=Schedule.IN_BACKWARD)).best.step_s
        except PlanError:
            return None
        return found_s if found_s < deferred_s * (1 - _WORTH_A_WORD) else None

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
        costs = read_costs(self.layout, probes, self._state_bytes)
        policies, probed = probes[-1]
        estimate = Search(costs, self.layout, self._rates()).device_bytes(probe_placement(costs, self.layout, policies))
        return costs, probed.peak_bytes - estimate

    @cached_property
    def _state_bytes(self) -> dict[str, int]:
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if isinstance(self.optimizer, torch.optim.Optimizer):
            own = self.optimizer
        else:
            named = compat.without_memory(named)
            own = self.optimizer([parameter for parameter in named.values() if parameter.requires_grad])
        sizes = state_bytes_by_parameter(own, self.numerics)
        return {
            group.name: sum(sizes.get(id(named[parameter.name]), 0) for parameter in group.parameters)
            for group in self.layout.groups
        }

    def _rates(self) -> LaneRates:
        return lane_rates(self.hardware, update_kind(self.numerics, self.hardware))

    def _plan_of(self, candidate: Candidate, limits: Limits) -> Plan:
        placement = candidate.placement
        choices = placement.groups
        streamed = {name for name, choice in choices.items() if choice.weights is Weights.STREAMED}
        least = window_bytes(self.layout, streamed, placement.prefetch_depth)
        return assemble(
            self.layout,
            weights={name: choice.weights for name, choice in choices.items()},
            sites={chunk.name: choices[chunk.group].site for chunk in self.layout.chunks},
            schedule=limits.schedule,
            prefetch_depth=placement.prefetch_depth,
            activations={name: policy_of(choice.policy) for name, choice in choices.items()},
            budgets=Budgets(
                device_bytes=limits.device_bytes,
                host_bytes=limits.host_bytes,
                pinned_bytes=limits.pinned_bytes,
                window_bytes=placement.window_bytes if placement.window_bytes > least else None,
            ),
        )

    def fits(self, replayed: StepTrace, limits: Limits) -> bool:
        """Whether a replayed step is inside every budget."""
        assert replayed.host_bytes is not None, "a trace under a plan has them"
        assert replayed.pinned_bytes is not None, "a trace under a plan has them"
        return (
            replayed.peak_reserved_bytes <= limits.device_bytes
            and replayed.host_bytes <= limits.host_bytes
            and replayed.pinned_bytes <= limits.pinned_bytes
        )


def smallest(search: Search, limits: Limits) -> Candidate:
    """The uniform placement that takes least of the device, of those that the host holds if there are any."""
    num = search.num_groups
    shapes = [
        Shape(num_resident=resident, num_device=device, small=policy, fast=policy, num_fast=0, prefetch_depth=0)
        for policy in limits.policies or ("keep",)
        for resident in (0, num)
        for device in (0, num)
    ]

    def taken(shape: Shape) -> tuple[bool, int]:
        placement = search.placement(shape, limits)
        return search.host_bytes(placement)[0] > limits.host_bytes, search.device_bytes(placement)

    return search.evaluate(min(shapes, key=taken), limits)


def _num_tokens(batch: Any) -> int:
    whole = [tensor for tensor in tensors_in(batch) if not tensor.is_floating_point()]
    return whole[0].numel() if whole else 0


def _words(plan: Plan) -> Iterable[str]:
    num_groups = len(plan.groups)
    num_resident = sum(group.weights is Weights.RESIDENT for group in plan.groups)
    yield (
        "all weights stay on the device"
        if num_resident == num_groups
        else f"{num_resident} of {num_groups} groups stay on the device, the others are streamed"
    )
    num_device = sum(site is Site.DEVICE for group in plan.groups for site in group.sites[:1])
    sites = {num_groups: "on the device", 0: "on the host"}
    yield (
        f"all groups are updated {sites[num_device]}, {plan.schedule.value}"
        if num_device in sites
        else f"{num_device} groups are updated on the device, {num_groups - num_device} on the host, {plan.schedule.value}"
    )
    by_policy = Counter(group.activation for group in plan.groups)
    named = {policy: word for word, policy in WORDS.items() if word != "keep"}
    chosen = [f"{by_policy[policy]} blocks {word}" for policy, word in named.items() if by_policy[policy]]
    yield f"activations: {', '.join([*chosen, 'all others keep']) if chosen else 'all blocks keep'}"
