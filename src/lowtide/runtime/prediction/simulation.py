"""The time of a traced step under a plan: its own operators, on the simulator's lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lowtide.activations.policy import Offload, Selective
from lowtide.hardware import Hardware, UpdateKind
from lowtide.memory.chunk import Layout
from lowtide.optim.update_types import Moments, Numerics, Rounding
from lowtide.planning.placement import is_trained, window_bytes_needed
from lowtide.planning.plan import GroupPlan, Plan, Site, Weights
from lowtide.planning.simulator import GroupChoice, LaneRates, Placement, SimulatedStep, simulate
from lowtide.planning.step_costs import StepCosts, Use, UseCost, read_costs
from lowtide.runtime.host_memory import HostNeed
from lowtide.tracing.step_trace import Phase, StepTrace

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
    """How long the step takes; None where the rates of the hardware are not known, or copies of activations are not priced.

    A group whose chunks are updated in different places counts where most of its bytes are, and what offloaded blocks
    send to the host, their inputs, is left out.

    Args:
        trace: Of a step under the plan.
        plan: For the layout.
        layout: Of the model.
        need: Of the host, under the plan.
        state_bytes: Optimizer state of each group.
        rates: Of the hardware that it was traced for.
        is_clipped: Whether all updates wait for the norm of all gradients.
    """
    offloads_all = any(isinstance(each, Offload) and not each.recompute for each in plan.activations.values())
    if offloads_all or not any(op.seconds for op in trace.ops):
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
    costs = _with_watched(_without_tables(costs, plan), plan)
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
