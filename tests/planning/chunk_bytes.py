"""The device bytes that a plan's chunks take, counted from the plan alone: what plans are checked against."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.memory.chunk import Layout
from lowtide.planning.placement import (
    gradient_bytes,
    group_sizes,
    is_trained,
    state_bytes,
    visitor_bytes_on_device,
    window_bytes_needed,
)
from lowtide.planning.plan import Plan, Site, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Device bytes that chunks take at once under a plan. Activations, and gradients on their way to the host, do not
    belong to them.
    """

    resident_bytes: int
    """Weights of resident groups."""
    window_bytes: int
    """What the windows of streamed groups may take."""
    gradient_bytes: int
    """Gradients of chunks that the device updates: all of them, or under `in_backward` those of one group."""
    state_bytes: int
    """Optimizer state of chunks that the device updates, and that stays there."""
    visitor_bytes: int = 0
    """Optimizer state that lies on the host and visits the device for its updates, at most at once."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.resident_bytes + self.window_bytes + self.gradient_bytes + self.state_bytes + self.visitor_bytes


def chunk_bytes_on_device(layout: Layout, plan: Plan, *, state_bytes_per_parameter_byte: float) -> ChunkBytes:
    """What a plan's chunks take of the device."""
    sites = {(group.name, number): site for group in plan.groups for number, site in enumerate(group.sites)}
    resident = {group.name for group in plan.groups if group.weights is Weights.RESIDENT}
    sizes = group_sizes(layout)

    def updated(*wanted: Site) -> dict[str, int]:
        return {
            group.name: sum(
                chunk.nbytes
                for number, chunk in enumerate(layout.chunks_of(group.name))
                if is_trained(chunk) and sites[group.name, number] in wanted
            )
            for group in layout.groups
        }

    windows = plan.budgets.window_bytes
    return ChunkBytes(
        resident_bytes=sum(sizes[name] for name in resident),
        window_bytes=window_bytes_needed(layout, plan) if windows is None else windows,
        gradient_bytes=gradient_bytes(updated(Site.DEVICE, Site.PAGED), plan.schedule),
        state_bytes=state_bytes(sum(updated(Site.DEVICE).values()), state_bytes_per_parameter_byte),
        visitor_bytes=visitor_bytes_on_device(
            layout, plan, state_bytes_per_parameter_byte=state_bytes_per_parameter_byte
        ),
    )
