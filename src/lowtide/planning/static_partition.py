"""Static partition: a fixed share of the device for chunks, decided before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.activations.policy import Policies, check_policies
from lowtide.errors import ConfigError, PlanError
from lowtide.memory.layout_types import Layout
from lowtide.planning.activation_choice import activations_by_group
from lowtide.planning.placement import assemble, by_first_use, gradient_bytes, is_trained, most_that_fit, state_bytes
from lowtide.planning.plan import Budgets, Plan, Schedule, require_sizes, schedule_of
from lowtide.planning.window_need import group_sizes, largest_window, window_bytes
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
    whole card. An emulated device has no size of its own and needs one."""
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
        # Text is taken for the enum, as everywhere; frozen, so set past the guard.
        object.__setattr__(self, "schedule", schedule_of(self.schedule))
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; give a share of the device above 0, at most 1", key="share")
        for key in ("prefetch_depth", "cached_buffers", "defragment_every"):
            if getattr(self, key) < 0:
                raise ConfigError(f"{key} is {getattr(self, key)}; give 0 or more", key=key)
        require_sizes(self, "device_memory")
        check_policies(self.activations)

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
        layout: Of the model.
        device_bytes: What may be reserved on the device in all: `config.device_memory` in bytes, or the card's.
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
    return assemble(
        layout,
        resident=resident,
        on_device={chunk.name for chunk in layout.chunks if chunk.group in resident},
        schedule=config.schedule,
        prefetch_depth=config.prefetch_depth,
        cached_buffers=config.cached_buffers,
        defragment_every=config.defragment_every,
        activations=policies,
        budgets=Budgets(
            device_bytes=device_bytes,
            window_bytes=window_bytes(layout, sizes.keys() - resident, config.prefetch_depth, policies),
        ),
    )
