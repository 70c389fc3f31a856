"""Whether a plan fits a layout, before anything is moved."""

from __future__ import annotations

from collections import Counter

from lowtide.activations.policy import KEEP
from lowtide.errors import PlanError
from lowtide.memory.groups import REST
from lowtide.memory.layout import Layout
from lowtide.planning.group_settings import is_one_module
from lowtide.planning.placement import largest_window, visitor_bytes_on_device, window_bytes_needed
from lowtide.planning.plan import Plan, Site, Weights
from lowtide.units import format_bytes


def check_plan(plan: Plan, layout: Layout, *, state_bytes_per_parameter_byte: float = 0.0) -> None:
    """Refuse a plan that was made for another model, or whose budgets cannot hold the weights.

    Only the weights on the device are known here: those of resident groups, and the windows of streamed ones; and, where the
    optimizer is known, the state that visits the device. Gradients, other optimizer state and activations come on top.

    Args:
        plan: To be checked.
        layout: The model's.
        state_bytes_per_parameter_byte: Optimizer state beside each byte of trained parameters; 0 where it is not known
            yet.

    Raises:
        PlanError: The message says which groups differ, or how many bytes are needed, for which group, and what to
            change.
    """
    _check_groups(plan, layout)
    if plan.fingerprint != layout.fingerprint:
        raise PlanError(
            f"the plan was made for another model: its fingerprint is {plan.fingerprint}, this model's is "
            f"{layout.fingerprint}. The groups have the same names and sizes, so a parameter's name, shape, dtype or "
            "requires_grad has changed, or what is tied; make the plan again"
        )
    _check_activations(plan, layout)
    _check_kept_on_host(plan, layout)
    visiting = visitor_bytes_on_device(layout, plan, state_bytes_per_parameter_byte=state_bytes_per_parameter_byte)
    _check_device(plan, layout, visiting)
    _check_host(plan, layout)


def _check_groups(plan: Plan, layout: Layout) -> None:
    planned = Counter(group.name for group in plan.groups)
    found = {group.name: group.nbytes for group in layout.groups}
    differences = [f"{name!r} is planned {count} times" for name, count in planned.items() if count > 1]
    if missing := [name for name in found if name not in planned]:
        differences.append(f"{_names(missing)} of the model {'is' if len(missing) == 1 else 'are'} not in the plan")
    if unknown := [name for name in planned if name not in found]:
        differences.append(f"{_names(unknown)} of the plan {'is' if len(unknown) == 1 else 'are'} not in the model")
    for group in plan.groups:
        if group.name not in found:
            continue
        if group.weight_bytes is not None and group.weight_bytes != found[group.name]:
            differences.append(
                f"{group.name!r} was planned with {format_bytes(group.weight_bytes)} of weights "
                f"({group.weight_bytes:,} bytes) and has {format_bytes(found[group.name])} ({found[group.name]:,} bytes)"
            )
        elif len(group.sites) != (num_chunks := len(layout.chunks_of(group.name))):
            differences.append(
                f"{group.name!r} has {num_chunks} chunks of at most {format_bytes(layout.chunk_bytes)}, and update "
                f"sites for {len(group.sites)} of {format_bytes(plan.chunk_bytes)}"
            )
    if differences:
        shown = differences[:5] + ([f"and {len(differences) - 5} more"] if len(differences) > 5 else [])
        raise PlanError(
            f"the plan does not fit this model: {'; '.join(shown)}. Make the plan again for this model, or lay the "
            f"model out with the plan's chunk size of {plan.chunk_bytes} bytes"
        )


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    kind = "the group" if len(names) == 1 else "the groups"
    return f"{kind} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _weight_bytes(plan: Plan, layout: Layout, weights: Weights) -> int:
    names = {group.name for group in plan.groups if group.weights is weights}
    return sum(chunk.nbytes for chunk in layout.chunks if chunk.group in names)


def _check_activations(plan: Plan, layout: Layout) -> None:
    specs = {group.name: group for group in layout.groups}
    for group in plan.groups:
        if group.activation != KEEP and not is_one_module(specs[group.name]):
            raise PlanError(
                f"group {group.name or '(rest of the model)'!r} is not one module's call, and the plan has "
                f"{group.activation!r} for it; give it Keep()",
                group=group.name,
            )


def _check_kept_on_host(plan: Plan, layout: Layout) -> None:
    specs = {group.name: group for group in layout.groups}
    for group in plan.groups:
        if group.weights is not Weights.HOST:
            continue
        spec = specs[group.name]
        if spec.name != REST and len(spec.modules) > 1:
            users = " and ".join(repr(window) if window else "the model itself" for window in spec.modules)
            raise PlanError(
                f"group {group.name!r} is tied: {users} use the same parameter, and only an embedding that nothing else uses "
                "can stay on the host; stream it instead, or untie it (give the other its own Parameter)",
                group=group.name,
            )
        is_table = len(spec.parameters) == 1 and len(spec.parameters[0].shape) == 2 and spec.modules == (spec.name,)
        if not is_table:
            raise PlanError(
                f"group {group.name or '(rest of the model)'!r} has {len(spec.parameters)} parameters in "
                f"{len(spec.modules)} module calls, and only an embedding, one table in one call, can stay on the host; "
                "stream it instead",
                group=group.name,
            )
        if any(site is not Site.HOST for site in group.sites):
            raise PlanError(
                f"group {group.name!r} stays on the host, and its update is on the device; update it on the host",
                group=group.name,
            )


def _check_device(plan: Plan, layout: Layout, visiting: int) -> None:
    streamed = {group.name for group in plan.groups if group.weights is Weights.STREAMED}
    window, alone = largest_window(layout, streamed, plan.activations)
    shorter = ["recompute in segments of 1"] if largest_window(layout, streamed)[1] < alone else []
    budgets = plan.budgets
    if budgets.window_bytes is not None and budgets.window_bytes < alone:
        raise PlanError(
            f"window_memory is {format_bytes(budgets.window_bytes)} ({budgets.window_bytes:,} bytes), and the streamed "
            f"weights that {window or 'the model'!r} needs at once are {format_bytes(alone)} ({alone:,} bytes); "
            + ", or ".join(
                [
                    "raise window_memory",
                    *shorter,
                    "tile that module's layers into groups of their own (lowtide.activations.tile)",
                ]
            ),
            needed_bytes=alone,
            group=window,
        )
    if budgets.device_bytes is None:
        return
    resident = _weight_bytes(plan, layout, Weights.RESIDENT)
    windows = window_bytes_needed(layout, plan) if budgets.window_bytes is None else budgets.window_bytes
    needed = resident + windows + visiting
    if needed <= budgets.device_bytes:
        return
    advice = [f"raise the device budget to more than {format_bytes(needed)}"]
    if resident:
        advice.append("stream more groups")
    if plan.prefetch_depth and windows > alone:
        advice.append(f"lower prefetch_depth from {plan.prefetch_depth}")
    advice += shorter
    if visiting:
        advice.append("update on the host")
    advice.append("tile the layers of that module (lowtide.activations.tile)" if alone else "use a smaller model")
    visitors = (
        f", and optimizer state that visits the device ('paged') takes {format_bytes(visiting)} ({visiting:,} bytes)"
    )
    raise PlanError(
        f"the device budget of {format_bytes(budgets.device_bytes)} cannot hold the weights: "
        f"{format_bytes(resident)} are resident, and the windows of streamed groups need {format_bytes(windows)} "
        f"({format_bytes(alone)} of it for {window or 'the model'!r} alone){visitors if visiting else ''}, {needed:,} bytes "
        f"together; {', or '.join(advice)}",
        needed_bytes=needed,
        group=window if alone else None,
    )


def _check_host(plan: Plan, layout: Layout) -> None:
    streamed = _weight_bytes(plan, layout, Weights.STREAMED) + _weight_bytes(plan, layout, Weights.HOST)
    limit = plan.budgets.host_bytes
    if limit is not None and streamed > limit:
        raise PlanError(
            f"the host budget of {format_bytes(limit)} cannot hold the {format_bytes(streamed)} ({streamed:,} bytes) of "
            "streamed weights; raise it, or keep more groups resident",
            needed_bytes=streamed,
        )
