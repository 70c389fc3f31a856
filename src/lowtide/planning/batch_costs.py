"""Costs of a step at a batch size that was not traced, on the straight line through two that were.

Activations, temporaries and the work of large operators grow with the batch; weights, their updates and what an operator takes
to start do not. So each cost is nearly a constant and a part for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.errors import PlanError
from lowtide.planning.step_costs import StepCosts, UseCost


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCosts:
    """A step's costs by the number of samples."""

    sizes: tuple[int, int]
    costs: tuple[StepCosts, StepCosts]
    beyond: tuple[int, int]
    """Bytes of tensors beyond the estimate, at both."""

    def __post_init__(self) -> None:
        first, second = ([(use.window, use.phase) for use in costs.uses] for costs in self.costs)
        if first != second:
            small, large = self.sizes
            raise PlanError(
                f"the step runs other modules for {large} samples than for {small}, so what a batch takes cannot be told from "
                "two sizes; plan each size by itself"
            )

    def at(self, num_samples: int) -> tuple[StepCosts, int]:
        """The costs at a size, and the bytes beyond them."""
        small, large = self.sizes
        share = (num_samples - small) / (large - small)
        first, second = self.costs

        def between(low: float, high: float) -> float:
            return (1 - share) * low + share * high  # exact at both ends

        def cost(low: UseCost, high: UseCost) -> UseCost:
            return replace(
                low,
                device_s=max(0.0, between(low.device_s, high.device_s)),
                # Small tensors are not sent to the host, and those of more samples are larger.
                num_ops=round(between(low.num_ops, high.num_ops)),
                num_watched_ops=round(between(low.num_watched_ops, high.num_watched_ops)),
                grown_bytes=round(between(low.grown_bytes, high.grown_bytes)),
                peak_bytes=round(max(0.0, between(low.peak_bytes, high.peak_bytes))),
            )

        uses = tuple(
            replace(use, costs={policy: cost(low, other.under(policy)) for policy, low in use.costs.items()})
            for use, other in zip(first.uses, second.uses, strict=True)
        )
        groups = {
            name: replace(
                group,
                stashed_bytes={
                    policy: round(max(0.0, between(sent, second.groups[name].stashed_bytes.get(policy, 0))))
                    for policy, sent in group.stashed_bytes.items()
                },
            )
            for name, group in first.groups.items()
        }
        start = round(max(0.0, between(first.start_bytes, second.start_bytes)))
        return StepCosts(uses=uses, groups=groups, start_bytes=start), round(between(*self.beyond))
