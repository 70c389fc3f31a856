"""The part of a recipe that says how a session spreads the model."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.activations.policy import policy_of
from lowtide.errors import ConfigError
from lowtide.lab.bounds import at_least
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecipe:
    """How the managed run spreads the model; `lowtide.planning.hand_plan.make_plan` turns it into a plan."""

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

    def __post_init__(self) -> None:
        at_least("prefetch_depth", self.prefetch_depth, 0)
        for update in self.update.values() if isinstance(self.update, dict) else (self.update,):
            if isinstance(update, float) and not 0.0 <= update <= 1.0:
                raise ConfigError(f"an update share of {update} is not between 0 and 1", key="update")
        for word in self.activations.values() if isinstance(self.activations, dict) else (self.activations,):
            if word is not None:
                policy_of(word)
        for key in ("device_memory", "host_memory", "window_memory", "chunk_memory"):
            if (size := getattr(self, key)) is not None:
                try:
                    parse_bytes(size)
                except ConfigError as error:
                    raise ConfigError(f"{key}: {error}", key=key) from error
