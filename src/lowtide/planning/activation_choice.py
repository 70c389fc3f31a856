"""Which activation policy each group has, from a word for all or one for each."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.activations.policy import Keep, Policies, Policy, policy_of
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.layout_types import GroupSpec, Layout

OTHERS = "*"


def activations_by_group(layout: Layout, policies: Policies | None) -> dict[str, Policy]:
    """The policy of each group.

    One policy alone, or "*" in a mapping, is for the repeated blocks: groups that are members of a list of modules.
    Embeddings, heads and the rest of the model keep what they save unless they are named.

    Raises:
        UnknownNameError: A mapping names a group that there is not.
        ConfigError: A policy is for the rest of the model, or for parameters that several modules share.
    """
    named: Mapping[str, Policy | str] = policies if isinstance(policies, Mapping) else {OTHERS: policies or Keep()}
    groups = {group.name: group for group in layout.groups}
    for name in named:
        if name != OTHERS and name not in groups:
            raise UnknownNameError("group (activations)", name, groups)
        if name != OTHERS and not _is_one_module(groups[name]):
            raise ConfigError(
                f"group {name or '(rest of the model)'!r} is not one module's call, so nothing of it can be recomputed or "
                "offloaded by itself; name the blocks, or '*' for all of them",
                key="activations",
            )
    others = policy_of(named.get(OTHERS, Keep()))
    return {
        name: policy_of(named[name]) if name in named else others if _is_block(group) else Keep()
        for name, group in groups.items()
    }


def _is_one_module(group: GroupSpec) -> bool:
    return group.name != "" and group.windows == (group.name,)


def _is_block(group: GroupSpec) -> bool:
    return _is_one_module(group) and group.name.rpartition(".")[2].isdecimal()
