"""The tiers of one plan, charged with what it needs of the host before anything is taken."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.memory.capacity import HostMemory, host_capacity_bytes, pinned_capacity_bytes, resolve_budget
from lowtide.memory.tier import Tier
from lowtide.planning.plan import Budgets
from lowtide.runtime.host_need import HostNeed

_ENDLESS_BYTES = 1 << 62
"""Of a device without a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """See the module's docstring."""

    host: Tier
    pinned: Tier
    """What is locked of the host."""
    device: Tier
    """Of chunks alone; an emulated device keeps books of its own."""
    need: HostNeed
    """What the host was charged with: all of the staging that there is room for."""


def charged_tiers(budgets: Budgets, need: HostNeed) -> Tiers:
    """The plan's tiers, with the host's need on their books.

    Raises:
        BudgetError: A tier has not the bytes.
    """
    host = Tier("host", resolve_budget(budgets.host_bytes, host_capacity_bytes(), what="host budget"))
    pinned_bytes = resolve_budget(
        budgets.pinned_bytes, pinned_capacity_bytes(), what="pinned budget", limit="what can be pinned"
    )
    pinned = Tier("pinned", pinned_bytes)
    # Of what nobody has yet: other processes, and what the loop keeps beside the model, go before what is of use alone.
    need = need.with_room(min(host.budget_bytes, HostMemory().available_bytes()), pinned.budget_bytes)
    for tier in (host, pinned):
        tier.charge(need.weight_bytes, "weights")
        tier.charge(need.gradient_bytes, "gradients")
        tier.charge(need.staging_bytes, "staging")
    host.charge(need.state_bytes, "optimizer state")
    for tier in (host, pinned):
        tier.charge(need.paged_bytes, "optimizer state that visits the device")
    host.charge(need.table_bytes, "tables that stay, and their gradients")
    device_bytes = budgets.device_bytes if budgets.device_bytes is not None else _ENDLESS_BYTES
    return Tiers(host=host, pinned=pinned, device=Tier("device", device_bytes), need=need)
