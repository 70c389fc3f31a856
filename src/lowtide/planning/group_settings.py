"""Settings by group: what the names in a mapping mean, and which activation policy each group has.

A name is that of a group, of a module with tied weights, or a pattern such as "blocks.*".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TypeVar

from lowtide.activations.policy import KEEP, Policies, Policy, policy_of
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.groups import REST
from lowtide.memory.layout import GroupSpec, Layout

DEFAULT = "*"
"""The key of a mapping that stands for all groups that it does not name."""
_REST_LABEL = "'' (the rest of the model)"
V = TypeVar("V")


def by_group(layout: Layout, named: Mapping[str, V], key: str) -> dict[str, V]:
    """The mapping with one entry for each group that it names; "*" stays as it is.

    A group's own name goes before a pattern, and of several patterns the last. The path of a module whose weights are all
    tied stands for the group of these weights, whose name is that of a parameter.

    Args:
        layout: Has the groups.
        named: By name or pattern.
        key: Names the setting in errors.

    Raises:
        UnknownNameError: A name is that of no group, or a pattern fits none.
        ConfigError: A name is that of a module that holds several groups, or two names are those of one group.
    """
    groups = [group.name for group in layout.groups]
    found: dict[str, V] = {name: value for name, value in named.items() if name == DEFAULT}
    for name, value in named.items():
        if name != DEFAULT and _is_pattern(name):
            matched = [group for group in groups if fnmatch.fnmatchcase(group, name)]
            if not matched:
                raise UnknownNameError(f"group ({key})", name, _shown(groups))
            found |= dict.fromkeys(matched, value)
    exact: dict[str, str] = {}
    for name, value in named.items():
        if not _is_pattern(name):
            group = _group_of(layout, groups, name, key)
            if exact.setdefault(group, name) != name:
                raise ConfigError(
                    f"{key} has {exact[group]!r} and {name!r}, which are both the group {group!r}; give one of them",
                    key=key,
                )
            found[group] = value
    return found


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _group_of(layout: Layout, groups: list[str], name: str, key: str) -> str:
    # The rest may be named though every parameter has a group of its own: it is then empty.
    if name in groups or name == REST:
        return name
    tied = [group.name for group in layout.groups if name in group.modules]
    if len(tied) == 1:
        return tied[0]
    inside = [group for group in groups if group.startswith(f"{name}.")]
    if inside:
        raise ConfigError(
            f"{key}[{name!r}]: it holds {len(inside)} groups, {inside[0]!r} the first; name them, or all of them by "
            f"'{name}.*'",
            key=key,
        )
    rest = next((group for group in layout.groups if group.name == REST), None)
    if rest is not None and any(f"{parameter.name}.".startswith(f"{name}.") for parameter in rest.parameters):
        raise ConfigError(
            f"{key}[{name!r}]: it has no group of its own here and belongs to the group {_REST_LABEL}, because its call "
            "cannot be told from that of the model, or because the layout was made without it; name '', or lay the model "
            "out by find_named_groups",
            key=key,
        )
    raise UnknownNameError(f"group ({key})", name, _shown(groups))


def _shown(groups: list[str]) -> list[str]:
    return [group or _REST_LABEL for group in groups]


def activations_by_group(layout: Layout, policies: Policies | None) -> dict[str, Policy]:
    """The policy of each group.

    One policy alone, or "*" in a mapping, is for the repeated blocks, as in `lowtide.activations.apply`. Embeddings, heads
    and the rest of the model keep what they save unless they are named.

    Raises:
        UnknownNameError: A mapping names a group that there is not, or a pattern that fits none.
        ConfigError: A policy is for the rest of the model or for parameters that several modules share, or "*" is for
            blocks and there are none.
    """
    given: Mapping[str, Policy | str] = policies if isinstance(policies, Mapping) else {DEFAULT: policies or KEEP}
    named = by_group(layout, given, "activations")
    groups = {group.name: group for group in layout.groups}
    for name in named:
        if name != DEFAULT and (name not in groups or not is_one_module(groups[name])):
            raise ConfigError(
                f"group {name or '(rest of the model)'!r} is not one module's call, so nothing of it can be recomputed or "
                "offloaded by itself; name the blocks, or '*' for all of them",
                key="activations",
            )
    others = policy_of(named.get(DEFAULT, KEEP))
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
    return group.name != "" and group.modules == (group.name,)
