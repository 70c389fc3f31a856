"""Plans that fill a device's budget: by a fixed share of it (static partition), or by what one observed step leaves (warm-up).

Both give the room to groups in the order in which a step first uses them; what does not fit is streamed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from lowtide.activations.policy import Policies, Policy, check_policies
from lowtide.config import require_least
from lowtide.errors import ConfigError, PlanError
from lowtide.memory.chunk import Layout
from lowtide.planning.hand_plan import activations_by_group
from lowtide.planning.placement import (
    assemble,
    by_first_use,
    gradient_bytes,
    group_sizes,
    is_always_open,
    is_trained,
    largest_window,
    most_that_fit,
    state_bytes,
    window_bytes,
)
from lowtide.planning.plan import Budgets, Plan, Schedule, Site, Weights, require_sizes, word_of
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPartition:
    """How the device is divided between chunks and everything else.

    Example:
        >>> StaticPartition(share=0.5).chunk_room_bytes(1000)
        500
    """

    share: float
    """Share of the device's bytes that chunks may use, above 0, at most 1: the weights of resident groups, their
    gradients and optimizer state, and the windows of streamed groups. The remainder is for activations, temporaries,
    workspaces, and gradients on their way to the host."""
    device_memory: str | int | None = None
    """The device's bytes, such as "14GiB", of which `share` is a part; also what may be reserved there at all. None: the
    whole device. An emulated device has no size of its own and needs one."""
    prefetch_depth: int = 1
    """How many groups ahead of the running one have room in the windows."""
    schedule: Schedule = Schedule.DEFERRED
    """When the updates run."""
    activations: Policies | None = None
    """What becomes of saved activations, as in `make_plan`."""
    cached_buffers: int = 2
    """Released buffers kept per size class; 0 keeps none."""
    defragment_every: int = 0
    """Steps between two defragmentations of the host arena."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; give a share of the device above 0, at most 1", key="share")
        _check_common(self, "device_memory")

    def chunk_room_bytes(self, device_bytes: int) -> int:
        """What chunks may use of a device of so many bytes."""
        return int(self.share * device_bytes)


def partition(
    layout: Layout,
    device_bytes: int,
    config: StaticPartition,
    *,
    state_bytes_per_parameter_byte: float,
) -> Plan:
    """The plan that fills the chunks' share of the device, in the order in which a step first uses the groups.

    Room for the windows of the groups that stay streamed comes first. Then groups become resident, updated on the
    device, until the next one would not fit with its weights, gradients (under `in_backward` those of the largest
    group alone) and state; the others are streamed and updated on the host.

    Args:
        layout: The model's.
        device_bytes: What may be reserved on the device in all: `config.device_memory` in bytes, or all of the device's.
        config: The share.
        state_bytes_per_parameter_byte: Optimizer state beside each byte of trained parameters: 2 for Adam in the
            parameters' own dtype, 4 for fp32 moments of bf16 parameters, 0 for SGD without momentum.

    Raises:
        PlanError: The share cannot hold the windows.
    """
    sizes = group_sizes(layout)
    policies = activations_by_group(layout, config.activations)
    trained = dict.fromkeys(sizes, 0)
    for chunk in layout.chunks:
        trained[chunk.group] += chunk.nbytes if is_trained(chunk) else 0

    def needed(resident: frozenset[str]) -> int:
        updated = {name: trained[name] for name in resident}
        return (
            sum(sizes[name] for name in resident)
            + gradient_bytes(updated, config.schedule)
            + state_bytes(sum(updated.values()), state_bytes_per_parameter_byte)
            + window_bytes(layout, sizes.keys() - resident, config.prefetch_depth, policies)
        )

    room = config.chunk_room_bytes(device_bytes)
    resident = most_that_fit(by_first_use(layout), needed, room)
    if resident is None:
        window, alone = largest_window(layout, sizes, policies)
        raise PlanError(
            f"a share of {config.share:g} of {format_bytes(device_bytes)} is {format_bytes(room)}, and the windows of "
            f"streamed groups need {format_bytes(needed(frozenset()))} ({format_bytes(alone)} of it for "
            f"{window or 'the model'!r} alone); raise the share or the device budget, lower prefetch_depth from "
            f"{config.prefetch_depth}, or split that group",
            needed_bytes=needed(frozenset()),
            group=window,
        )
    windows = window_bytes(layout, sizes.keys() - resident, config.prefetch_depth, policies)
    return _assembled(
        layout,
        config,
        policies,
        resident=resident,
        on_device={chunk.name for chunk in layout.chunks if chunk.group in resident},
        budgets=Budgets(device_bytes=device_bytes, window_bytes=windows),
    )


class MonitorMode(enum.StrEnum):
    """What a sample of the observed step holds."""

    PEAKS = "peaks"
    """The most that was in use since the sample before: exact, from the allocator's own counters."""
    BOUNDARIES = "boundaries"
    """What is in use when the sample is taken: what rises and falls inside a module is missed, and the plan that comes of it
    uses more of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """How much of the device and the host a plan from an observed step may use."""

    warm_up_share: float = 0.1
    """Share of the device budget (`device_share` of the device) that chunks may use in the observed step. More makes it
    faster, less leaves more to its activations, which nobody knows yet. The largest group's window always has room."""
    device_share: float = 0.9
    """Share of the device's bytes that may be used at all: the device budget."""
    host_share: float = 0.8
    """Share of the host's bytes that may be used: the host budget."""
    margin_share: float = 0.8
    """Share of the margin (what weights, windows and the fullest point of the step leave of the budget) that optimizer state and
    gradients on the device may use."""
    monitor: MonitorMode = MonitorMode.PEAKS
    device_memory: str | int | None = None
    """The device's bytes, such as "14GiB", of which the budget is a share. None: the whole device. An emulated device has
    no size of its own and needs one."""
    host_memory: str | int | None = None
    """The host's bytes, of which the budget is a share. None: this machine's, or its container's."""
    prefetch_depth: int = 1
    """How many groups ahead are copied; fewer where there is no room for as many."""
    schedule: Schedule = Schedule.DEFERRED
    """When the updates run, in the observed step too."""
    activations: Policies | None = None
    """What becomes of saved activations, as in `make_plan`."""
    cached_buffers: int = 2
    """Released buffers kept per size class; 0 keeps none."""
    defragment_every: int = 0
    """Steps between two defragmentations of the host arena."""

    def __post_init__(self) -> None:
        for key in ("warm_up_share", "device_share", "host_share", "margin_share"):
            share = getattr(self, key)
            least_is_zero = key in ("warm_up_share", "margin_share")
            if not (0 <= share <= 1 if least_is_zero else 0 < share <= 1):
                least = "from 0" if least_is_zero else "above 0"
                raise ConfigError(f"{key} is {share}; give a share {least} to 1", key=key)
        _check_common(self, "device_memory", "host_memory")

    def quota_bytes(self, device_bytes: int) -> int:
        """The budget on a device of so many bytes."""
        return int(self.device_share * device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Device memory at one point of the observed step."""

    number: int
    """Counts from 0 through the step."""
    group: str
    """The group whose module is about to run or has just run."""
    phase: str
    """`forward`, `backward` or `update`."""
    used_bytes: int
    """All that was in use, as `MonitorMode` says."""
    chunk_bytes: int
    """What chunks held of it. For a peak, the least that they held since the sample before, so that the rest is not
    underestimated."""

    @property
    def other_bytes(self) -> int:
        """What was no chunk: activations, temporaries, workspaces."""
        return max(0, self.used_bytes - self.chunk_bytes)


def warm_up_plan(layout: Layout, config: WarmUp, device_bytes: int, *, host_bytes: int | None = None) -> Plan:
    """The plan of the observed step: all is streamed and updated on the host, but for the rest group, which is open
    all the time and therefore resident.

    Raises:
        PlanError: The budget cannot hold the largest group.
    """
    quota = config.quota_bytes(device_bytes)
    sizes = group_sizes(layout)
    resident = {group.name for group in layout.groups if is_always_open(group)}
    resident_bytes = sum(sizes[name] for name in resident)
    policies = activations_by_group(layout, config.activations)
    window, alone = largest_window(layout, sizes.keys() - resident, policies)
    if resident_bytes + alone > quota:
        raise _too_small(config, device_bytes, resident_bytes, window, alone, other=0)
    windows = max(alone, int(config.warm_up_share * quota) - resident_bytes)
    budgets = _budgets(config, device_bytes, host_bytes, window_bytes=windows)
    return _assembled(layout, config, policies, resident=resident, on_device=(), budgets=budgets)


def plan_after(
    layout: Layout,
    samples: Iterable[StepSample],
    config: WarmUp,
    device_bytes: int,
    *,
    state_bytes_per_parameter_byte: float,
    host_bytes: int | None = None,
) -> Plan:
    """The plan for all steps after the observed one.

    The room is the device budget without what was no chunk at the fullest point of the step. It goes first to the windows of
    streamed groups, then to the weights of groups in the order of their first use, which become resident until the next
    does not fit. Of what is left, the margin, `margin_share` goes to gradients and state of the first chunks, which the
    device updates; the host updates the others.

    Args:
        layout: The model's.
        samples: Those of the observed step.
        config: The shares.
        device_bytes: All that the device has.
        state_bytes_per_parameter_byte: Optimizer state beside each byte of trained parameters: 2 for Adam in the
            parameters' own dtype.
        host_bytes: All that the host has; None leaves the host without a budget.

    Raises:
        PlanError: There are no samples, or the room cannot hold the largest group.
    """
    other = max((sample.other_bytes for sample in samples), default=None)
    if other is None:
        raise PlanError(
            "there are no samples of a warm-up step to plan from; run one step under the warm-up plan first"
        )
    room = config.quota_bytes(device_bytes) - other
    sizes = group_sizes(layout)
    policies = activations_by_group(layout, config.activations)
    always = frozenset(group.name for group in layout.groups if is_always_open(group))
    others = [name for name in by_first_use(layout) if name not in always]
    for depth in range(config.prefetch_depth, -1, -1):

        def weights_and_windows(chosen: frozenset[str], depth: int = depth) -> int:
            resident = always | chosen
            windows = window_bytes(layout, sizes.keys() - resident, depth, policies)
            return sum(sizes[name] for name in resident) + windows

        chosen = most_that_fit(others, weights_and_windows, room)
        if chosen is not None:
            break
    else:
        window, alone = largest_window(layout, sizes.keys() - always, policies)
        raise _too_small(config, device_bytes, sum(sizes[name] for name in always), window, alone, other=other)
    margin = math.floor(config.margin_share * (room - weights_and_windows(chosen)))
    windows = window_bytes(layout, sizes.keys() - (always | chosen), depth, policies)
    return _assembled(
        layout,
        replace(config, prefetch_depth=depth),
        policies,
        resident=always | chosen,
        on_device=_first_chunks(layout, margin, state_bytes_per_parameter_byte, config.schedule),
        budgets=_budgets(config, device_bytes, host_bytes, window_bytes=windows),
    )


def _assembled(
    layout: Layout,
    config: StaticPartition | WarmUp,
    policies: Mapping[str, Policy],
    *,
    resident: Collection[str],
    on_device: Collection[str],
    budgets: Budgets,
) -> Plan:
    return assemble(
        layout,
        weights=dict.fromkeys(resident, Weights.RESIDENT),
        sites=dict.fromkeys(on_device, Site.DEVICE),
        schedule=config.schedule,
        activations=policies,
        cached_buffers=config.cached_buffers,
        defragment_every=config.defragment_every,
        prefetch_depth=config.prefetch_depth,
        budgets=budgets,
    )


def _first_chunks(
    layout: Layout, room_bytes: int, state_bytes_per_parameter_byte: float, schedule: Schedule
) -> frozenset[str]:
    """Names of the first trained chunks whose gradients and optimizer state together fit the room."""
    chunks = {chunk.name: chunk for chunk in layout.chunks if is_trained(chunk)}

    def needed(names: frozenset[str]) -> int:
        updated: dict[str, int] = {}
        for name in names:
            updated[chunks[name].group] = updated.get(chunks[name].group, 0) + chunks[name].nbytes
        return gradient_bytes(updated, schedule) + state_bytes(sum(updated.values()), state_bytes_per_parameter_byte)

    found = most_that_fit(list(chunks), needed, room_bytes)
    assert found is not None, "nothing needs no bytes"
    return found


def _check_common(config: StaticPartition | WarmUp, *sizes: str) -> None:
    """Check what both kinds of settings have. The word of a schedule becomes the schedule itself."""
    # Frozen, so set past the guard.
    object.__setattr__(config, "schedule", word_of(Schedule, config.schedule, "schedule"))
    require_least(config, 0, "prefetch_depth", "cached_buffers", "defragment_every")
    require_sizes(config, *sizes)
    check_policies(config.activations)


def _budgets(config: WarmUp, device_bytes: int, host_bytes: int | None, *, window_bytes: int) -> Budgets:
    return Budgets(
        device_bytes=config.quota_bytes(device_bytes),
        host_bytes=None if host_bytes is None else int(config.host_share * host_bytes),
        window_bytes=window_bytes,
    )


def _too_small(
    config: WarmUp, device_bytes: int, resident_bytes: int, window: str, window_alone: int, *, other: int
) -> PlanError:
    needed = resident_bytes + window_alone + other
    return PlanError(
        f"the device budget of {format_bytes(config.quota_bytes(device_bytes))} ({config.device_share:g} of "
        f"{format_bytes(device_bytes)}) cannot hold {format_bytes(needed)}: {format_bytes(window_alone)} of weights that "
        f"{window or 'the model'!r} needs at once, {format_bytes(resident_bytes)} that are always needed, and "
        f"{format_bytes(other)} that were no chunks at the fullest point of the step; raise device_share or the device's "
        "bytes, make the batch smaller, or split that group",
        needed_bytes=needed,
        group=window,
    )
