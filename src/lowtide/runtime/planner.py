"""`lowtide.plan` and `lowtide.prepare`: the fastest plan that fits, and a session under it.

One traced step prices every group under every activation policy (`planning.step_costs`). The search picks the fastest
placement whose estimated bytes fit (`planning.search`). Its step is then traced as the session will run it, and the plan is
accepted only if that replay of the allocator stays inside the budgets. Where it does not, or leaves much of them, the
difference corrects the next search.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.policy import WORDS, policy_of
from lowtide.errors import ConfigError, PlanError, TraceError
from lowtide.hardware import Hardware, find_hardware, known_hardware
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.memory.tier import PINNABLE_SHARE, host_capacity_bytes
from lowtide.optim.update_types import Numerics, numerics_of
from lowtide.planning.budget_plans import WarmUp
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.placement import assemble
from lowtide.planning.plan import Budgets, Plan, Schedule, Site, Weights, word_of
from lowtide.planning.search import WORTH_IT, Candidate, Found, Limits, Search, probe_placement
from lowtide.planning.simulator import LaneRates, SimulatedStep, lane_rates
from lowtide.planning.step_costs import POLICIES, StepCosts, probe_policies, read_costs
from lowtide.runtime.host_memory import state_bytes_by_parameter
from lowtide.runtime.manage import manage
from lowtide.runtime.prediction.trace import Optimizer, trace
from lowtide.runtime.session import Session
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import Loss, tensors_in
from lowtide.units import format_bytes, format_seconds, parse_bytes

Size = str | int
_MOST_REPLAYS = 4
_GAPS = 0.04
"""The share of the device budget that the allocator is first taken to hold beyond its tensors."""
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
    target = find_hardware(hardware) if isinstance(hardware, str) else hardware
    limits = _limits(target, device_memory, host_memory, pinned_memory, schedule, max_grad_norm, policies)
    tell = on_progress or (lambda text: None)
    problem = _Problem(
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
    return problem.solve(limits)


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
    hardware = hardware_of(chosen_device) if is_cuda else find_hardware("cpu")
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


def hardware_of(device: torch.device) -> Hardware:
    """The kind of a CUDA device: the known one of its name and size, or what torch tells about it."""
    properties = torch.cuda.get_device_properties(device)
    same = [
        known
        for known in known_hardware()
        if known.label.split(" (")[0].startswith(properties.name)
        or properties.name.startswith(known.label.split(" (")[0])
    ]
    if same:
        nearest = min(same, key=lambda known: abs(known.memory_bytes - properties.total_memory))
        return replace(nearest, memory_bytes=properties.total_memory)
    bare = find_hardware(f"{properties.total_memory >> 20}MiB")
    return replace(
        bare,
        label=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
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
    whole = int((hardware.memory_bytes - hardware.context_bytes) * (1 - _MARGIN))
    device_bytes = _size("device_memory", device_memory, whole)
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


def _size(key: str, given: Size | None, default: int) -> int:
    if given is None:
        return default
    try:
        found = parse_bytes(given)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error
    if found <= 0:
        raise ConfigError(f"{key} is {given!r}; give a size such as '24GiB'", key=key)
    return found


@dataclass(frozen=True, kw_only=True)
class _Problem:
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

    def solve(self, limits: Limits) -> PlannedStep:
        """Search and replay until the replay stays inside the budgets.

        The estimate of what tensors take is off by nearly the same bytes for all placements. What the allocator holds beyond
        them is not known before the replay: it is taken to be `_GAPS` of the budget, and more each time that the replay does
        not fit.
        """
        costs, beyond = self._costs()
        gaps = _GAPS
        best: tuple[Candidate, Found, Plan, StepTrace] | None = None
        smallest: StepTrace | None = None
        for attempt in range(1, _MOST_REPLAYS + 1):
            self.tell("searching the fastest plan")
            correction = beyond + int(gaps * limits.device_bytes)
            try:
                found = Search(costs, self.layout, self._rates(), correction_bytes=correction).fastest(limits)
            except PlanError:
                if smallest is None:
                    raise
                break
            if best is not None and found.best.step_s >= best[0].step_s * (1 - WORTH_IT):
                break
            chosen = self._plan_of(found.best, limits)
            self.tell(f"replaying its step ({attempt})")
            replayed = trace(self.model, self.batch, plan=chosen, **self.traced)
            beyond += replayed.peak_bytes - (found.best.device_bytes - correction + beyond)
            if not self._fits(replayed, limits):
                if smallest is None or replayed.peak_reserved_bytes < smallest.peak_reserved_bytes:
                    smallest = replayed
                if best is not None:
                    break
                gaps += _GAPS
                continue
            best = (found.best, found, chosen, replayed)
            left = 1 - replayed.peak_reserved_bytes / limits.device_bytes
            if left < _WORTH_A_REPLAY or smallest is not None:
                break
            gaps = max(0.0, gaps - left)
        if best is None:
            assert smallest is not None, "each replay fits or does not"
            raise PlanError(
                f"no plan was found whose step stays inside {format_bytes(limits.device_bytes)} of device memory: the smallest "
                f"that was replayed takes {format_bytes(smallest.peak_reserved_bytes)}; give that much, or a smaller batch",
                needed_bytes=smallest.peak_reserved_bytes,
            )
        candidate, found, chosen, replayed = best
        return PlannedStep(
            plan=chosen,
            trace=replayed,
            simulated=candidate.simulated,
            rejected=tuple(other for other in found.uniform if other.shape != candidate.shape),
            costs=costs,
            hardware=self.hardware,
            num_tokens=_num_tokens(self.batch),
            num_tried=found.num_tried,
            in_backward_s=self._in_backward_s(
                costs, beyond + int(gaps * limits.device_bytes), limits, candidate.step_s
            ),
        )

    def _in_backward_s(self, costs: StepCosts, correction: int, limits: Limits, deferred_s: float) -> float | None:
        if limits.schedule is Schedule.IN_BACKWARD or limits.is_clipped:
            return None
        search = Search(costs, self.layout, self._rates(), correction_bytes=correction)
        try:
            found_s = search.fastest(replace(limits, schedule=Schedule.IN_BACKWARD)).best.step_s
        except PlanError:
            return None
        return found_s if found_s < deferred_s * (1 - _WORTH_A_WORD) else None

    def _costs(self) -> tuple[StepCosts, int]:
        """The step's costs, and the bytes of tensors beyond their estimate in the probe."""
        probes = []
        for policies in probe_policies(self.layout):
            self.tell("pricing the step's parts")
            probe = make_plan(self.layout, update="host", schedule="in_backward", activations=policies or None)
            probes.append((policies, trace(self.model, self.batch, plan=probe, **self.traced)))
        costs = read_costs(self.layout, probes, self._state_bytes())
        policies, probed = probes[-1]
        estimate = Search(costs, self.layout, self._rates()).device_bytes(probe_placement(costs, self.layout, policies))
        return costs, probed.peak_bytes - estimate

    def _state_bytes(self) -> dict[str, int]:
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if isinstance(self.optimizer, torch.optim.Optimizer):
            own = self.optimizer
        else:
            named = {name: compat.without_memory(parameter) for name, parameter in named.items()}
            own = self.optimizer([parameter for parameter in named.values() if parameter.requires_grad])
        sizes = state_bytes_by_parameter(own, self.numerics)
        return {
            group.name: sum(sizes.get(id(named[parameter.name]), 0) for parameter in group.parameters)
            for group in self.layout.groups
        }

    def _rates(self) -> LaneRates:
        # Where torch chooses by itself, it fuses Adam, AdamW and Adagrad on the host of a CUDA model.
        return lane_rates(self.hardware, is_fused=self.numerics is not None or not self.hardware.is_host)

    def _plan_of(self, candidate: Candidate, limits: Limits) -> Plan:
        choices = candidate.placement.groups
        return assemble(
            self.layout,
            weights={name: choice.weights for name, choice in choices.items()},
            sites={chunk.name: choices[chunk.group].site for chunk in self.layout.chunks},
            schedule=limits.schedule,
            prefetch_depth=candidate.shape.prefetch_depth,
            activations={name: policy_of(choice.policy) for name, choice in choices.items()},
            budgets=Budgets(
                device_bytes=limits.device_bytes, host_bytes=limits.host_bytes, pinned_bytes=limits.pinned_bytes
            ),
        )

    def _fits(self, replayed: StepTrace, limits: Limits) -> bool:
        assert replayed.host_bytes is not None, "a trace under a plan has them"
        assert replayed.pinned_bytes is not None, "a trace under a plan has them"
        return (
            replayed.peak_reserved_bytes <= limits.device_bytes
            and replayed.host_bytes <= limits.host_bytes
            and replayed.pinned_bytes <= limits.pinned_bytes
        )


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
