"""Which activation policy each group has, from a word for all or one for each."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.activations.policy import KEEP, Policies, Policy, policy_of
from lowtide.errors import ConfigError
from lowtide.memory.layout_types import GroupSpec, Layout
from lowtide.planning.group_names import DEFAULT as OTHERS
from lowtide.planning.group_names import by_group


def activations_by_group(layout: Layout, policies: Policies | None) -> dict[str, Policy]:
    """The policy of each group.

    One policy alone, or "*" in a mapping, is for the repeated blocks, as in `lowtide.activations.apply`. Embeddings, heads
    and the rest of the model keep what they save unless they are named.

    Raises:
        UnknownNameError: A mapping names a group that there is not, or a pattern that fits none.
        ConfigError: A policy is for the rest of the model or for parameters that several modules share, or "*" is for
            blocks and there are none.
    """
    given: Mapping[str, Policy | str] = policies if isinstance(policies, Mapping) else {OTHERS: policies or KEEP}
    named = by_group(layout, given, "activations")
    groups = {group.name: group for group in layout.groups}
    for name in named:
        if name != OTHERS and (name not in groups or not is_one_module(groups[name])):
            raise ConfigError(
                f"group {name or '(rest of the model)'!r} is not one module's call, so nothing of it can be recomputed or "
                "offloaded by itself; name the blocks, or '*' for all of them",
                key="activations",
            )
    others = policy_of(named.get(OTHERS, KEEP))
    if others != KEEP and not any(group.is_block for group in groups.values()):
        raise ConfigError(
            f"activations={others!r} is for repeated blocks, and none of the groups ({', '.join(map(repr, groups))}) is one; "
            "name groups, or modules that hold some: activations={'MODULE': 'recompute'}",
            key="activations",
        )
    return {
        name: policy_of(named[name]) if name in named else others if group.is_block else KEEP
        for name, group in groups.items()
    }


def is_one_module(group: GroupSpec) -> bool:
    """Whether the group is what one call of its module needs, so that the call can have a policy."""
    return group.name != "" and group.windows == (group.name,)
