"""What a plan needs of the host for one model, before anything is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowtide.errors import PlanError
from lowtide.memory.chunk_search import LARGEST_CHUNK_BYTES
from lowtide.memory.layout_types import Layout, ParameterSpec
from lowtide.optim.update_types import Numerics
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.runtime.state_size import state_bytes_by_parameter
from lowtide.units import format_bytes

MOST_STAGING_BYTES = 1 << 31
"""For gradients that wait for their updates in backward, unless the plan says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """Host bytes that a plan needs for one model, by what they are for."""

    weight_bytes: int
    gradient_bytes: int
    staging_bytes: int
    state_bytes: int
    """Of the optimizer, beside the parameters that the host updates: in memory of its own that is not locked."""
    paged_bytes: int
    """Of optimizer state that visits the device: locked, and not in the buffer."""
    table_bytes: int
    """Of weights that never leave the host, and of their gradients: not locked, and not in the buffer."""

    @property
    def total_bytes(self) -> int:
        """Of the locked buffer for weights, gradients and staging."""
        return self.weight_bytes + self.gradient_bytes + self.staging_bytes

    @property
    def everything_bytes(self) -> int:
        """What the host holds, locked or not."""
        return self.total_bytes + self.state_bytes + self.paged_bytes + self.table_bytes


def host_need(
    layout: Layout,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None,
    numerics: Numerics | None,
    parameters: Mapping[str, torch.Tensor],
) -> HostNeed:
    """What the host must hold: weights of streamed chunks, twins of resident ones, deferred gradients, staging, state.

    Args:
        layout: Of the model.
        plan: For it.
        optimizer: Each parameter's state is counted by its own param group; those that it does not hold have none.
        numerics: Of updates through our own kernels.
        parameters: The model's, by name.

    Raises:
        PlanError: The plan's staging is too small for its largest chunk.
    """
    weights = gradients = largest = largest_parameter = tables = 0
    updated: list[ParameterSpec] = []
    paged: list[ParameterSpec] = []
    for group in plan.groups:
        for chunk, site in zip(layout.chunks_of(group.name), group.sites, strict=True):
            is_updated = optimizer is not None and site is Site.HOST and chunk.spans[0].parameter.requires_grad
            if optimizer is not None and site is Site.PAGED and chunk.spans[0].parameter.requires_grad:
                paged += [span.parameter for span in chunk.spans]
            if group.weights is Weights.HOST:
                tables += (1 + is_updated) * chunk.nbytes
                updated += [span.parameter for span in chunk.spans if is_updated]
                continue
            if group.weights is Weights.STREAMED or is_updated:
                weights += chunk.nbytes
            if is_updated:
                updated += [span.parameter for span in chunk.spans]
                largest = max(largest, chunk.nbytes)
                largest_parameter = max(largest_parameter, *(span.parameter.nbytes for span in chunk.spans))
                if plan.schedule is Schedule.DEFERRED:
                    gradients += chunk.nbytes
    # Not asked where there is nothing: an optimizer that cannot say may still step on the device.
    sizes = state_bytes_by_parameter(optimizer, numerics) if optimizer is not None and updated + paged else {}

    def state_of(specs: Sequence[ParameterSpec]) -> int:
        return sum(sizes.get(id(parameters[spec.name]), 0) for spec in specs)

    state = state_of(updated)
    # One to be filled while another is used; beside a huge one a small one, so that it does not double the need.
    largest = largest if plan.schedule is Schedule.IN_BACKWARD else largest_parameter
    least = largest + min(largest, LARGEST_CHUNK_BYTES)
    return HostNeed(
        weight_bytes=weights,
        gradient_bytes=gradients,
        staging_bytes=_staging_bytes(plan, least, sum(spec.nbytes for spec in updated), is_slow=state > 0),
        state_bytes=state,
        paged_bytes=state_of(paged) + 4096 * len(paged),
        table_bytes=tables,
    )


def _staging_bytes(plan: Plan, least: int, updated_bytes: int, *, is_slow: bool) -> int:
    wanted = plan.budgets.staging_bytes
    if not least:
        return 0
    if wanted is not None and wanted < least:
        raise PlanError(
            f"staging_memory is {format_bytes(wanted)} ({wanted:,} bytes), and gradients on their way to the host need at least "
            f"{format_bytes(least)} ({least:,} bytes); give that much, or smaller chunks",
            needed_bytes=least,
        )
    if wanted is None:
        # Where the host is slower than the backward, gradients that may wait do not hold up the device.
        waits = is_slow and plan.schedule is Schedule.IN_BACKWARD
        wanted = max(least, min(MOST_STAGING_BYTES, updated_bytes) if waits else 0)
    return -(-wanted // 512) * 512 + 4096
