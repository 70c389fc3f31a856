"""What users call: `lowtide.plan` and `lowtide.prepare`, the fastest plan that fits, and a session under it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import torch
from torch import nn

from lowtide.errors import ConfigError, TraceError
from lowtide.hardware import Hardware, find_hardware, hardware_of
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.memory.tier import PINNABLE_SHARE, host_capacity_bytes
from lowtide.optim.update_types import numerics_of
from lowtide.planning.budget_plans import WarmUp
from lowtide.planning.plan import Plan, Schedule, Sharding, Site, word_of
from lowtide.planning.search import Limits
from lowtide.planning.step_costs import POLICIES
from lowtide.runtime.manage import manage
from lowtide.runtime.parameters.deferred_weights import DeferredWeights
from lowtide.runtime.plan_problem import ALLOWED, MARGIN, PlannedStep, PlanProblem, usable_bytes
from lowtide.runtime.prediction.trace import Optimizer
from lowtide.runtime.session import Session
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.training_step import Loss
from lowtide.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Size = str | int


class PlanOptions(TypedDict, total=False):
    """What `plan` takes by name, as its documentation says."""

    optimizer: Required[Optimizer]
    device_memory: Size | None
    host_memory: Size | None
    pinned_memory: Size | None
    hardware: str | Hardware
    precision: str | None
    moments: str
    schedule: Schedule | str
    max_grad_norm: float | None
    policies: Iterable[str]
    allow: Iterable[str]
    sites_of: Plan | None
    loss: Loss | None
    autocast: str | torch.dtype | None
    settings: StepSettings | None
    torch_version: str | None
    on_progress: Callable[[str], None] | None


def plan(model: nn.Module, batch: Any, **options: Unpack[PlanOptions]) -> PlannedStep:
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
        allow: What may be chosen though it changes the arithmetic. `tables`: 16-bit embeddings stay on the host, which adds up
            their gradients in 16 bits.
        sites_of: A plan for the same model: each group is updated on the device or host where it says, with the same bits.
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
    problem, limits = pose(model, batch, **options)
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
    allow: Iterable[str] = (),
    sites_of: Plan | None = None,
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    settings: StepSettings | None = None,
    torch_version: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[PlanProblem, Limits]:
    """The arguments of `plan`, checked: a step to be planned, and what it may take."""
    target = find_hardware(hardware) if isinstance(hardware, str) else hardware
    limits = _limits(target, device_memory, host_memory, pinned_memory, schedule, max_grad_norm, policies)
    if precision is None and moments != "fp32":
        raise ConfigError(
            f"moments={moments!r} is for updates through Lowtide's own kernels; give precision= as well, such as 'bf16 exact'",
            key="moments",
        )
    for word in allow:
        if word not in ALLOWED:
            raise ConfigError(f"allow has {word!r}; give words of {', '.join(ALLOWED)}", key="allow")
    layout = lay_out(find_groups(model))
    if sites_of is not None:
        if sites_of.fingerprint != layout.fingerprint:
            raise ConfigError("sites_of is a plan for another model; give one for this model", key="sites_of")
        on_host = {group.name for group in sites_of.groups if Site.HOST in group.sites[:1]}
        sites = {each.name: Site.HOST if each.name in on_host else Site.DEVICE for each in layout.groups}
        limits = replace(limits, sites=sites)
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
        layout=layout,
        allow=frozenset(allow),
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
    weights: str | Path | DeferredWeights | None = None,
    seed: int = 0,
    allow: Iterable[str] = (),
    loss: Loss | None = None,
    autocast: str | torch.dtype | None = None,
    on_progress: Callable[[str], None] | None = None,
    ranks: ProcessGroup | DeviceMesh | None = None,
    sharding: Sharding | str | None = None,
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
        weights: As for `manage`.
        seed: As for `manage`.
        allow: As for `plan`.
        loss: As for `trace`.
        autocast: As for `trace`.
        on_progress: Is told what is being done.
        ranks: As for `manage`. Rank 0 plans, for the least device memory that a rank has and an equal part of their host's memory;
            the plan then stays.
        sharding: With `ranks`, how they share weights, gradients and optimizer state: "gather" or "one to all" over all ranks (or
            the last dimension of a mesh), a `lowtide.Sharding`, or "auto" for the fastest of all ways. On the devices or on the
            hosts, whichever fits and is faster. None: each rank has the whole model.

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

    if sharding is not None and ranks is None:
        raise ConfigError(
            f"sharding={str(sharding)!r} spreads weights over several processes, and this is one; start the script with torchrun, "
            "and give ranks=torch.distributed.group.WORLD as well",
            key="sharding",
        )
    is_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    chosen_device = torch.device("cuda" if is_cuda else "cpu") if device is None else torch.device(device)
    if not is_cuda and device_memory is None:
        raise ConfigError(
            "an emulated device has no size of its own; give device_memory, such as '2GiB'", key="device_memory"
        )
    hardware = hardware_of(chosen_device)
    budget = _free_bytes(chosen_device) if device_memory is None else parse_bytes(device_memory)
    words: dict[str, Any] = {"hardware": hardware, "precision": precision, "moments": moments, "autocast": autocast}
    asked: dict[str, Any] = {"schedule": schedule, "max_grad_norm": max_grad_norm, "allow": tuple(allow), **words}
    search: Callable[..., PlannedStep] = partial(plan, host_memory=host_memory, **asked)
    start = partial(
        manage,
        model,
        optimizer,
        device=chosen_device,
        max_grad_norm=max_grad_norm,
        precision=precision,
        moments=moments,
        weights=weights,
        seed=seed,
    )
    if ranks is not None:
        from lowtide.distributed.ranks import group_of
        from lowtide.runtime.agreement import plan_alike, ways_asked

        posed = partial(pose, model, batch, optimizer=optimizer, loss=loss, on_progress=on_progress, **asked)
        host_bytes = host_capacity_bytes() if host_memory is None else parse_bytes(host_memory)
        group = group_of(ranks, sharding.shards if isinstance(sharding, Sharding) else 1)
        ways = None if sharding is None else ways_asked(sharding, ranks)
        return start(plan_alike(group, chosen_device, model, posed, budget, host_bytes, ways), ranks=group)
    try:
        planned = search(model, batch, optimizer=optimizer, device_memory=budget, loss=loss, on_progress=on_progress)
    except TraceError as error:
        warnings.warn(
            f"the step could not be traced ({error}); the plan is made after one observed training step instead",
            stacklevel=2,
        )
        when = word_of(Schedule, schedule, "schedule")
        return start(WarmUp(device_memory=budget, host_memory=host_memory, schedule=when))
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
    return int((free + torch.cuda.memory_reserved(device)) * (1 - MARGIN))


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
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(
            f"max_grad_norm is {max_grad_norm}; give a norm above 0, or leave it out", key="max_grad_norm"
        )
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


def _size(key: str, given: Size | None, default: int) -> int:
    if given is None:
        return default
    has_no_unit = isinstance(given, str) and given.strip().replace(".", "", 1).isdecimal()
    if has_no_unit and isinstance(given, str) and float(given):
        raise ConfigError(f"{key} is {given!r}, which has no unit; write '{given.strip()}GiB', or MiB", key=key)
    try:
        found = parse_bytes(given)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error
    if found <= 0:
        raise ConfigError(f"{key} is {given!r}; give a size such as '24GiB'", key=key)
    return found
