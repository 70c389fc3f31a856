"""The part of a recipe that says how a session spreads the model: by hand, as a static partition, or after a warm-up step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lowtide.activations.policy import check_policies
from lowtide.errors import ConfigError
from lowtide.lab.bounds import at_least
from lowtide.memory.groups import find_named_groups
from lowtide.memory.layout import lay_out
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.hand_plan import make_plan, names_in
from lowtide.planning.plan import Plan, Schedule, Site, Weights, require_sizes
from lowtide.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecipe:
    """How the managed run spreads the model; `lowtide.planning.hand_plan.make_plan` turns it into a plan."""

    DEFAULT_KIND: ClassVar[str] = "by-hand"
    weights: Weights | dict[str, Weights] = Weights.STREAMED
    """Of all groups, or by group name, pattern ("blocks.*") or module path, with "*" for the others: resident or streamed;
    `host` for an embedding by name."""
    update: Site | float | dict[str, Site | float] = Site.HOST
    """Where chunks are updated: host, device, or the share (0 to 1) that the host updates; likewise by group name."""
    schedule: Schedule = Schedule.DEFERRED
    activations: str | dict[str, str] | None = None
    """What becomes of what blocks save for their backward: `keep`, `selective`, `recompute`, `recompute/4`, `offload`,
    `offload/all`, `compile-budget/0.5`; by group name too."""
    prefetch_depth: int = 1
    """Groups ahead of the running one that are copied to the device."""
    device_memory: str | int | None = None
    """Budget of the device, such as `14GiB`; None: what it has."""
    chunk_memory: str | int | None = None
    """Largest chunk: what is updated, and what gradients wait for in backward, at a time; None: found by search."""
    host_memory: str | int | None = None
    """Budget of the host for weights, gradients, optimizer state and staging; None: what it has."""
    window_memory: str | int | None = None
    """Device bytes for streamed groups; None: what the largest group and its prefetched successors need."""
    cached_buffers: int | None = None
    """The allocation cache: released buffers kept per size class, 0 for none; None: as `make_plan` has it."""
    defragment_every: int | None = None
    """Steps between two defragmentations of the host arena; None or 0: only when a request fails for fragmentation."""

    def __post_init__(self) -> None:
        for key in ("prefetch_depth", "cached_buffers", "defragment_every"):
            if (count := getattr(self, key)) is not None:
                at_least(key, count, 0)
        for update in self.update.values() if isinstance(self.update, dict) else (self.update,):
            if isinstance(update, float) and not 0.0 <= update <= 1.0:
                raise ConfigError(f"an update share of {update} is not between 0 and 1", key="update")
        check_policies(self.activations)
        require_sizes(self, "device_memory", "host_memory", "window_memory", "chunk_memory")


def plan_of(recipe: PlanRecipe, model: nn.Module) -> Plan:
    """The plan by hand for a model."""
    counts = {key: getattr(recipe, key) for key in ("cached_buffers", "defragment_every")}
    return make_plan(
        lay_out(
            find_named_groups(model, names_in(recipe.weights, recipe.update, recipe.activations)),
            chunk_bytes=None if recipe.chunk_memory is None else parse_bytes(recipe.chunk_memory),
        ),
        weights=recipe.weights,
        update=recipe.update,
        schedule=recipe.schedule,
        activations=recipe.activations,
        prefetch_depth=recipe.prefetch_depth,
        device_memory=recipe.device_memory,
        host_memory=recipe.host_memory,
        window_memory=recipe.window_memory,
        **{key: count for key, count in counts.items() if count is not None},
    )


def session_plan(recipe: PlanRecipe | StaticPartition | WarmUp, model: nn.Module) -> Plan | StaticPartition | WarmUp:
    """What `manage` is given: a plan by hand; the other two make theirs when the session begins."""
    return plan_of(recipe, model) if isinstance(recipe, PlanRecipe) else recipe
