"""Placement: which groups are resident, which chunks the device updates, and the device bytes that this takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lowtide.activations.policy import Keep, Policy
from lowtide.errors import ConfigError
from lowtide.memory.groups import REST
from lowtide.memory.layout_types import ChunkSpec, GroupSpec, Layout
from lowtide.planning.plan import Budgets, GroupPlan, Plan, Schedule, Site, Weights
from lowtide.planning.window_need import group_sizes, most_visitors, window_bytes_needed


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
    """Of chunks that the device updates: all of them, or under `in_backward` those of one group."""
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


def visitor_bytes_on_device(layout: Layout, plan: Plan, *, state_bytes_per_parameter_byte: float) -> int:
    """What optimizer state that lies on the host takes of the device while it visits, at most at once.

    Where it visits for one update after the other, that is the largest chunk's. In backward that of a whole group is sent
    for when its window opens; groups whose chunks all stay on the device have none. What is on its way home is kept
    within the mover's bytes, as gradients are, and not counted.
    """
    by_window: dict[str, int] = {}
    largest = 0
    for group in plan.groups:
        chunks = [
            chunk for chunk in zip(layout.chunks_of(group.name), group.sites, strict=True) if is_trained(chunk[0])
        ]
        needed = [
            state_bytes(chunk.nbytes, state_bytes_per_parameter_byte) for chunk, site in chunks if site is Site.PAGED
        ]
        has_window = group.weights is Weights.STREAMED or any(site is Site.HOST for _, site in chunks)
        if plan.schedule is Schedule.IN_BACKWARD and has_window and needed:
            by_window[group.name] = sum(needed)
        else:
            largest = max(largest, *needed, 0)
    return largest + most_visitors(layout, by_window)


def gradient_bytes(updated: dict[str, int], schedule: Schedule) -> int:
    """Device bytes of finished gradients, from the bytes of each group that the device updates."""
    return max(updated.values(), default=0) if schedule is Schedule.IN_BACKWARD else sum(updated.values())


def state_bytes(updated_bytes: int, state_bytes_per_parameter_byte: float) -> int:
    """Bytes of optimizer state beside so many bytes of parameters."""
    if not 0 <= state_bytes_per_parameter_byte < math.inf:
        raise ConfigError(
            f"state_bytes_per_parameter_byte is {state_bytes_per_parameter_byte}; give 0 or more, such as 2 for Adam in "
            "the parameters' own dtype",
            key="state_bytes_per_parameter_byte",
        )
    return math.ceil(updated_bytes * state_bytes_per_parameter_byte)


def assemble(
    layout: Layout,
    *,
    resident: Collection[str],
    on_device: Collection[str],
    paged: Collection[str] = (),
    on_host: Collection[str] = (),
    schedule: Schedule,
    budgets: Budgets,
    prefetch_depth: int = 1,
    cached_buffers: int = 2,
    defragment_every: int = 0,
    activations: Mapping[str, Policy] | None = None,
) -> Plan:
    """The plan in which these groups are resident, these chunks are updated on the device, and all else is the host's.

    Groups in `on_host` never come to the device; the other ones are streamed.
    """
    policies = activations or {}
    return Plan(
        groups=tuple(
            GroupPlan(
                name=group.name,
                weights=_weights(group.name, resident, on_host),
                sites=tuple(_site(chunk.name, on_device, paged) for chunk in layout.chunks_of(group.name)),
                activation=policies.get(group.name, Keep()),
                weight_bytes=group.nbytes,
            )
            for group in layout.groups
        ),
        fingerprint=layout.fingerprint,
        chunk_bytes=layout.chunk_bytes,
        schedule=schedule,
        prefetch_depth=prefetch_depth,
        cached_buffers=cached_buffers,
        defragment_every=defragment_every,
        budgets=budgets,
    )


def _site(name: str, on_device: Collection[str], paged: Collection[str]) -> Site:
    if name in on_device:
        return Site.DEVICE
    return Site.PAGED if name in paged else Site.HOST


def _weights(name: str, resident: Collection[str], on_host: Collection[str]) -> Weights:
    if name in resident:
        return Weights.RESIDENT
    return Weights.HOST if name in on_host else Weights.STREAMED


def by_first_use(layout: Layout) -> list[str]:
    """Names of the groups in the order in which a step first needs them: the rest of the model from its beginning."""
    return [group.name for group in sorted(layout.groups, key=lambda group: not is_always_open(group))]


def most_that_fit(names: list[str], needed: Callable[[frozenset[str]], int], room_bytes: int) -> frozenset[str] | None:
    """The longest beginning of `names` whose need is within the room; None where not even the empty one is.

    The need must not fall when a name is added: the search is by halves.
    """
    if needed(frozenset()) > room_bytes:
        return None
    fits, too_many = 0, len(names) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if needed(frozenset(names[:middle])) <= room_bytes:
            fits = middle
        else:
            too_many = middle
    return frozenset(names[:fits])


def is_always_open(group: GroupSpec) -> bool:
    """Whether the group is needed for as long as the model runs, so that streaming it saves nothing in a step."""
    return REST in group.windows


def is_trained(chunk: ChunkSpec) -> bool:
    """Whether the chunk's parameters have gradients; trained and frozen ones do not share a chunk."""
    return chunk.spans[0].parameter.requires_grad
