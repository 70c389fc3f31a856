"""What a plan needs of the host for one model, before anything is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowtide.activations.policy import Offload
from lowtide.memory.layout import LARGEST_CHUNK_BYTES, Layout, ParameterSpec
from lowtide.optim.update_types import Numerics
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.runtime.staging import granted, staging_for
from lowtide.runtime.state_size import state_bytes_by_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """Host bytes that a plan needs for one model, by what they are for."""

    weight_bytes: int
    gradient_bytes: int
    staging_bytes: int
    useful_staging_bytes: int
    """As much staging as makes a difference; see Note [Gradients that wait]."""
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

    def with_room(self, host_bytes: int, pinned_bytes: int) -> HostNeed:
        """The same with more staging, where that is of use and the host's memory, and what can be locked of it, allow it."""
        rest = min(host_bytes - self.everything_bytes, pinned_bytes - self.total_bytes - self.paged_bytes)
        return replace(
            self, staging_bytes=granted(self.staging_bytes, useful=self.useful_staging_bytes, rest_bytes=rest)
        )

    def without_room(self) -> HostNeed:
        """The same, of which `with_room` makes no more."""
        return replace(self, useful_staging_bytes=self.staging_bytes)


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
    weights = gradients = largest = largest_parameter = tables = on_host = on_device = 0
    held = set() if optimizer is None else {id(each) for group in optimizer.param_groups for each in group["params"]}
    updated: list[ParameterSpec] = []
    paged: list[ParameterSpec] = []
    for group in plan.groups:
        for chunk, site in zip(layout.chunks_of(group.name), group.sites, strict=True):
            is_updated = optimizer is not None and site is Site.HOST and chunk.spans[0].parameter.requires_grad
            if optimizer is not None and site is not Site.HOST and chunk.spans[0].parameter.requires_grad:
                on_device += chunk.nbytes
                paged += [span.parameter for span in chunk.spans if site is Site.PAGED]
            if group.weights is Weights.HOST:
                tables += (1 + is_updated) * chunk.nbytes
                updated += [span.parameter for span in chunk.spans if is_updated]
                continue
            if group.weights is Weights.STREAMED or is_updated:
                weights += chunk.nbytes
            if is_updated:
                updated += [span.parameter for span in chunk.spans]
                if any(id(parameters[span.parameter.name]) in held for span in chunk.spans):
                    on_host += chunk.nbytes  # and not tables: their gradients are made where they lie
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
    staging_bytes, useful_bytes = staging_for(
        plan.budgets.staging_bytes,
        least=least,
        on_host=on_host,
        on_device=on_device,
        waits=state > 0 and plan.schedule is Schedule.IN_BACKWARD,
    )
    if any(isinstance(group.activation, Offload) for group in plan.groups):
        useful_bytes = (
            staging_bytes  # what activations take of the host is known when they come: nothing of it is given away
        )
    return HostNeed(
        weight_bytes=weights,
        gradient_bytes=gradients,
        staging_bytes=staging_bytes,
        useful_staging_bytes=useful_bytes,
        state_bytes=state,
        paged_bytes=state_of(paged) + 4096 * len(paged),
        table_bytes=tables,
    )
