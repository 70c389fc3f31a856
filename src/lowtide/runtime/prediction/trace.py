"""`lowtide.trace`: the memory of a training step, before it runs and without the device it is for, plain or under a plan.

Under a plan the trace also has the step's time: its own operators, on the simulator's lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.policy import Selective
from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.hardware import Hardware, UpdateKind, find_hardware
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups, find_named_groups
from lowtide.optim.update_types import Moments, Numerics, Rounding, numerics_of
from lowtide.planning.budget_plans import StaticPartition, WarmUp, partition
from lowtide.planning.lanes import GroupChoice, LaneRates, Placement
from lowtide.planning.placement import check_plan, is_trained, window_bytes_needed
from lowtide.planning.plan import GroupPlan, Plan, Site, Weights
from lowtide.planning.simulator import SimulatedStep, lane_rates, simulate
from lowtide.planning.step_costs import StepCosts, Use, UseCost, read_costs
from lowtide.runtime.host_memory import HostNeed, host_need, state_bytes_by_parameter, state_bytes_per_parameter_byte
from lowtide.runtime.prediction.session import SessionFootprint
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.prediction.trace import trace_step
from lowtide.tracing.settings import StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Phase, StepTrace
from lowtide.tracing.training_step import Loss, OptimizerFactory
from lowtide.units import format_bytes, parse_bytes

_UPDATES = ("aten._foreach_", "aten._fused_ada", "aten._fused_sgd")
"""How the names of operators begin with which torch's optimizers step."""


def simulate_traced(
    trace: StepTrace,
    plan: Plan,
    layout: Layout,
    *,
    need: HostNeed,
    state_bytes: Mapping[str, int],
    rates: LaneRates,
    is_clipped: bool = False,
) -> SimulatedStep | None:
    """How long the step takes; None where the rates of the hardware are not known.

    A group whose chunks are updated in different places counts where most of its bytes are.

    Args:
        trace: Of a step under the plan.
        plan: For the layout.
        layout: Of the model.
        need: Of the host, under the plan.
        state_bytes: Optimizer state of each group.
        rates: Of the hardware that it was traced for.
        is_clipped: Whether all updates wait for the norm of all gradients.
    """
    if not any(op.seconds for op in trace.ops):
        return None
    placement = Placement(
        groups={group.name: GroupChoice(weights=group.weights, site=_site(group, layout)) for group in plan.groups},
        schedule=plan.schedule,
        prefetch_depth=plan.prefetch_depth,
        window_bytes=plan.budgets.window_bytes or window_bytes_needed(layout, plan),
        staging_bytes=need.useful_staging_bytes,
        is_clipped=is_clipped,
    )
    costs = read_costs(layout, [({}, _without_updates(trace))], state_bytes)
    costs = _with_offloaded(_with_watched(_without_tables(costs, plan), plan), trace.offloaded_bytes)
    return simulate(costs, placement, rates)


def _without_updates(trace: StepTrace) -> StepTrace:
    """The simulator times updates itself; those in backward stand among its operators."""
    ops = [replace(op, phase=Phase.UPDATE) if op.name.startswith(_UPDATES) else op for op in trace.ops]
    return replace(trace, ops=tuple(ops))


def _site(group: GroupPlan, layout: Layout) -> Site:
    """Where most of the group's bytes are updated; state that visits the device is updated there."""
    chunks = [
        (chunk.nbytes, site)
        for chunk, site in zip(layout.chunks_of(group.name), group.sites, strict=True)
        if is_trained(chunk)
    ]
    on_host = sum(num_bytes for num_bytes, site in chunks if site is Site.HOST)
    return Site.HOST if 2 * on_host > sum(num_bytes for num_bytes, _ in chunks) else Site.DEVICE


def _without_tables(costs: StepCosts, plan: Plan) -> StepCosts:
    """Tables that are looked up on the host send rows alone, and their updates change few."""
    tables = [group.name for group in plan.groups if group.weights is Weights.HOST]
    groups = {
        name: replace(group, weight_bytes=0, trained_bytes=0, state_bytes=0) if name in tables else group
        for name, group in costs.groups.items()
    }
    return replace(costs, groups=groups)


def _with_watched(costs: StepCosts, plan: Plan) -> StepCosts:
    """A selective policy looks at each operator of the forward, and once more when the backward repeats it."""
    selective = {group.name for group in plan.groups if isinstance(group.activation, Selective)}
    forward = {use.window: _only(use).num_ops for use in costs.uses if use.phase is Phase.FORWARD}

    def watched(use: Use) -> Use:
        cost = _only(use)
        num_ops = min(cost.num_ops, forward.get(use.window, 0))
        return replace(use, costs={"keep": replace(cost, num_watched_ops=num_ops)}) if use.window in selective else use

    return replace(costs, uses=tuple(map(watched, costs.uses)))


def _with_offloaded(costs: StepCosts, offloaded_bytes: Mapping[str, int]) -> StepCosts:
    """What blocks send to the host comes back for their backward."""
    groups = {
        name: replace(group, stashed_bytes={"keep": offloaded_bytes[name]}) if name in offloaded_bytes else group
        for name, group in costs.groups.items()
    }
    return replace(costs, groups=groups)


def _only(use: Use) -> UseCost:
    return use.under("keep")


def update_kind(numerics: Numerics | None, hardware: Hardware) -> UpdateKind:
    """Whose rates are nearest to those of the update that a session takes."""
    if numerics is None:
        # Where torch chooses by itself, it fuses Adam, AdamW and Adagrad on the host of a CUDA model.
        return UpdateKind.TORCH if hardware.is_host else UpdateKind.TORCH_FUSED
    if numerics.moments is Moments.INT8:
        return UpdateKind.EIGHT_BIT
    return UpdateKind.FP32 if numerics.rounding is Rounding.NEAREST else UpdateKind.EXACT


Optimizer = torch.optim.Optimizer | OptimizerFactory


def trace(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    plan: Plan | StaticPartition | WarmUp | None = None,
    precision: str | None = None,
    moments: str = "fp32",
    hardware: str | Hardware = "h200",
    torch_version: str | None = None,
    allocator: AllocatorSettings | None = None,
    name: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> StepTrace:
    """Predict a steady-state training step: what it allocates, when, and for which module.

    Nothing is trained and no weight is touched: the model may be real, or live on the meta device at any size. The step
    runs on tensors without memory in a subprocess, some seconds for a model of eight billion parameters.

    Args:
        model: In the precision and the mode (`train()`) it will be trained in.
        batch: A mapping, for which `model(**batch).loss` is the loss; anything else together with `loss`. Integer inputs
            are sent with their values, since models look at masks and positions.
        optimizer: The optimizer, or a function from parameters to one; None traces forward and backward alone.
        loss: `lambda model, batch: ...`, where the batch alone does not say.
        autocast: `bfloat16` or `float16`, as text or as torch's own, if forward and loss run under `torch.autocast`.
        settings: Everything else about the step.
        plan: Trace the step as `lowtide.manage` runs it under this plan: its groups come and go, its policies are applied,
            `host_bytes` and `pinned_bytes` say what it holds of the host, and `simulated_s` how long it takes. A `WarmUp` is
            refused: its plan is made from a step of the run. The allocator may reserve as much as the plan's
            `device_memory`; a step that does not fit is traced without that limit, and a note says so.
        precision: As for `manage`, with a plan.
        moments: As for `manage`, with a precision.
        hardware: The kind of device to predict for: its name, a capacity such as `24GiB`, or `this`, the device of this
            machine as `lowtide.calibrate` measured it.
        torch_version: The version it will run under; the installed one by default.
        allocator: The allocator's settings, as in `PYTORCH_ALLOC_CONF`.
        name: Shown in reports; the model's class by default.
        on_progress: Is told what is being done.

    Raises:
        ConfigError: An argument does not fit the others; the message says which and why.
        PlanError: The plan is for another model.

    Example:
        >>> import lowtide, torch
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
        >>> plain = lowtide.trace(model, batch, optimizer=torch.optim.AdamW)
        >>> plain.peak_bytes == sum(plain.at_peak.values())
        True
        >>> plan = lowtide.make_plan(model, weights="streamed", update="host")
        >>> managed = lowtide.trace(model, batch, optimizer=torch.optim.AdamW, plan=plan)
        >>> managed.peak_bytes < plain.peak_bytes, managed.host_bytes > 0
        (True, True)
    """
    step = partial(
        trace_step,
        model,
        batch,
        loss=loss,
        autocast=autocast,
        settings=settings,
        hardware=hardware,
        torch_version=torch_version,
        name=name,
        on_progress=on_progress,
    )
    if plan is None:
        if precision is not None:
            raise ConfigError(
                f"precision={precision!r} says how a session updates the weights, and there is no plan; give plan=, or convert "
                "the model with settings=StepSettings(precision=...)",
                key="precision",
            )
        return step(optimizer=optimizer, allocator=allocator)
    if optimizer is None:
        raise ConfigError(
            "a plan places what an optimizer needs; give the optimizer that manage() will get", key="optimizer"
        )
    _refuse_in_settings(settings or StepSettings())
    numerics = None if precision is None else numerics_of(precision, moments)[1]
    target = find_hardware(hardware) if isinstance(hardware, str) else hardware
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        own = optimizer
    else:
        named = compat.without_memory(named)
        own = optimizer([parameter for parameter in named.values() if parameter.requires_grad])
    found = _plan_on(target, plan, model, own, numerics)
    layout = lay_out(find_named_groups(model, [group.name for group in found.groups]), chunk_bytes=found.chunk_bytes)
    check_plan(found, layout)
    session = SessionFootprint(
        found,
        layout,
        make_optimizer=_Given(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer,
        numerics=numerics,
    )
    given, budget = allocator or AllocatorSettings(), found.budgets.device_bytes
    result = step(
        optimizer=session.optimizer,
        context=session,
        allocator=replace(given, allowed_bytes=budget),
        if_full=None if budget is None else given,
    )
    need = host_need(layout, found, own, numerics, named)
    simulated = simulate_traced(
        result,
        found,
        layout,
        need=need,
        state_bytes=_state_bytes(layout, own, numerics, named),
        rates=lane_rates(target, update_kind(numerics, target)),
    )
    return replace(_with_host(result, need), simulated_s=None if simulated is None else simulated.seconds)


def _state_bytes(
    layout: Layout, optimizer: torch.optim.Optimizer, numerics: Numerics | None, named: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Bytes of each group's state. An optimizer that cannot say, and so steps on the device, counts as one without state."""
    try:
        sizes = state_bytes_by_parameter(optimizer, numerics)
    except UnsupportedOptimizerError:
        sizes = {}
    return {group.name: sum(sizes.get(id(named[each.name]), 0) for each in group.parameters) for group in layout.groups}


class _Given:
    """Gives an optimizer that exists; it travels with the model, whose parameters it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        del parameters
        return self._optimizer


def _with_host(result: StepTrace, need: HostNeed) -> StepTrace:
    notes = result.notes
    if need.useful_staging_bytes > need.staging_bytes:
        more = format_bytes(need.useful_staging_bytes - need.staging_bytes)
        notes = (*notes, f"a host with room takes up to {more} more for gradients that wait for their updates")
    pinned_bytes = need.total_bytes + need.paged_bytes
    return replace(result, notes=notes, host_bytes=need.everything_bytes, pinned_bytes=pinned_bytes)


def _refuse_in_settings(settings: StepSettings) -> None:
    """What a plan says itself."""
    if settings.activations is not None:
        raise ConfigError(
            f"settings say activations={settings.activations!r}, and so does a plan; give them to make_plan(activations=...)",
            key="activations",
        )
    if settings.update is not UpdateSchedule.DEFERRED:
        raise ConfigError(
            "settings say when weights are updated, and so does a plan; give make_plan(schedule='in_backward')",
            key="update",
        )


def _plan_on(
    hardware: Hardware,
    plan: Plan | StaticPartition | WarmUp,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numerics: Numerics | None,
) -> Plan:
    """The plan that a session would have on some hardware."""
    if isinstance(plan, StaticPartition):
        return partition(
            lay_out(find_groups(model)),
            hardware.memory_bytes if plan.device_memory is None else parse_bytes(plan.device_memory),
            plan,
            state_bytes_per_parameter_byte=state_bytes_per_parameter_byte(optimizer, numerics),
        )
    if isinstance(plan, WarmUp):
        raise ConfigError("a WarmUp's plan is made from the first step of the run, and is not known before", key="plan")
    if any(site is Site.PAGED for group in plan.groups for site in group.sites):
        raise ConfigError(
            "the plan updates chunks on the device with state that visits it ('paged'), which is not predicted",
            key="plan",
        )
    return plan
