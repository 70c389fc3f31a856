"""Plans written by hand: a word for all groups, or one for each.

A name in a mapping is that of a group, of a module with tied weights, or a pattern such as "blocks.*".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from lowtide.activations.policy import KEEP, Policies, Policy, policy_of
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.chunk import ChunkSpec, Layout, lay_out
from lowtide.memory.groups import REST, find_named_groups
from lowtide.planning.placement import assemble, check_plan, is_always_open, is_one_module, is_trained
from lowtide.planning.plan import Budgets, Plan, Schedule, Sharding, Site, Weights, word_of
from lowtide.units import parse_bytes

Size = str | int
DEFAULT = "*"
"""The key of a mapping that stands for all groups that it does not name."""
_REST_LABEL = "'' (the rest of the model)"
V = TypeVar("V")


def make_plan(
    model: nn.Module | Layout,
    *,
    weights: Weights | str | Mapping[str, Weights | str] = Weights.STREAMED,
    update: Site | str | float | Mapping[str, Site | str | float] = Site.HOST,
    schedule: Schedule | str = Schedule.DEFERRED,
    activations: Policies | None = None,
    prefetch_depth: int = 1,
    cached_buffers: int = 2,
    defragment_every: int = 0,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    pinned_memory: Size | None = None,
    window_memory: Size | None = None,
    staging_memory: Size | None = None,
    sharding: Sharding | None = None,
) -> Plan:
    """A plan from a few words, checked against the model.

    Args:
        model: The model, or its layout where the groups or the chunk size were chosen by hand.
        weights: `resident` or `streamed`, for all groups or by name, "*" for those not named. A name is that of a group, a
            pattern such as "blocks.*", or the path of any module that is called, which then is a group of its own. The
            rest group "", and tied groups that it shares, are open for the whole step and are resident unless they are
            named. `host`, for an embedding by name: it is looked up and updated on the host.
        update: `device`, `host` or `paged`, likewise. A number from 0 to 1 is the share of the trained bytes that the host
            updates, those whose gradients come first in backward: the last ones. For a group by name, the share of
            that group.
        schedule: When the updates run.
        activations: `keep`, `selective`, `recompute` or `offload`, or a policy of `lowtide.activations`: for all repeated
            blocks, or by group, "*" for the blocks that are not named.
        prefetch_depth: How many groups ahead are copied to the device.
        cached_buffers: Released buffers kept per size class.
        defragment_every: Steps between two defragmentations of the host arena.
        device_memory: What may be reserved on the device, such as "14GiB"; likewise the other budgets.
        host_memory: What may be used on the host for weights, gradients, optimizer state and staging.
        pinned_memory: The part of the host's that may be locked.
        window_memory: The part of the device's for the windows of streamed groups.
        staging_memory: The part of the host's in which gradients wait for their updates.
        sharding: Spread the groups over several ranks: `streamed` ones on their hosts, where they are updated, `sharded` ones on
            their devices. A group that is not named is spread too, also one that is open for the whole step. Budgets are
            those of one rank.

    Raises:
        UnknownNameError: A mapping names a group that the model does not have.
        ConfigError: A word, a share or a size is not one, or a name is that of several groups.
        PlanError: The budgets cannot hold the weights.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        >>> plan = make_plan(model, weights={"*": "streamed", "0": "resident"}, device_memory="1MiB")
        >>> [(group.name, group.weights.value) for group in plan.groups]
        [('0', 'resident'), ('1', 'streamed')]
    """
    names = names_in(weights, update, activations)
    shards = 1 if sharding is None else sharding.shards
    layout = model if isinstance(model, Layout) else lay_out(find_named_groups(model, names), shards=shards)
    if layout.shards != shards:
        raise ConfigError(
            f"the layout was made for {layout.shards} shards, and sharding= is for {shards}; give lay_out(shards={shards})",
            key="sharding",
        )
    placed = _weights_by_group(layout, weights, is_sharded=sharding is not None)
    sites = _sites_by_chunk(layout, update)
    for chunk in layout.chunks:
        if placed[chunk.group] is Weights.HOST:
            sites[chunk.name] = Site.HOST  # where the weights are
        if (
            placed[chunk.group] is Weights.SHARDED
            and sites[chunk.name] is Site.HOST
            and not isinstance(update, Mapping)
        ):
            sites[chunk.name] = Site.DEVICE
    plan = assemble(
        layout,
        weights=placed,
        sites=sites,
        schedule=word_of(Schedule, schedule, "schedule"),
        activations=activations_by_group(layout, activations),
        prefetch_depth=prefetch_depth,
        cached_buffers=cached_buffers,
        defragment_every=defragment_every,
        budgets=Budgets(
            device_bytes=_size(device_memory),
            host_bytes=_size(host_memory),
            pinned_bytes=_size(pinned_memory),
            window_bytes=_size(window_memory),
            staging_bytes=_size(staging_memory),
        ),
        sharding=sharding,
    )
    check_plan(plan, layout)
    return plan


def names_in(*settings: object) -> list[str]:
    """What the settings that are mappings name, for `find_named_groups`."""
    return [name for setting in settings if isinstance(setting, Mapping) for name in setting]


def host_chunks(chunks: Iterable[ChunkSpec], share: float) -> set[str]:
    """Names of the last chunks that together hold at least `share` of the trained bytes; frozen ones do not count."""
    trained = [chunk for chunk in chunks if is_trained(chunk)]
    wanted = share * sum(chunk.nbytes for chunk in trained)
    found: set[str] = set()
    taken = 0
    for chunk in reversed(trained):
        if taken >= wanted:
            break
        found.add(chunk.name)
        taken += chunk.nbytes
    return found


def _weights_by_group(
    layout: Layout, weights: Weights | str | Mapping[str, Weights | str], *, is_sharded: bool
) -> dict[str, Weights]:
    named = weights if isinstance(weights, Mapping) else {DEFAULT: weights}
    words = {
        name: word_of(Weights, word, f"weights[{name!r}]") for name, word in by_group(layout, named, "weights").items()
    }
    default = words.get(DEFAULT, Weights.STREAMED)
    # Beside other ranks, also what is open for the whole step is worth being spread.
    return {
        group.name: words.get(group.name, Weights.RESIDENT if is_always_open(group) and not is_sharded else default)
        for group in layout.groups
    }


def _sites_by_chunk(layout: Layout, update: Site | str | float | Mapping[str, Site | str | float]) -> dict[str, Site]:
    named = by_group(layout, update if isinstance(update, Mapping) else {DEFAULT: update}, "update")
    sites: dict[str, Site] = {}
    unnamed = [chunk for chunk in layout.chunks if chunk.group not in named]
    choices: dict[str, object] = {DEFAULT: Site.HOST, **named}
    for name, choice in choices.items():
        chunks = unnamed if name == DEFAULT else layout.chunks_of(name)
        if isinstance(choice, str) and choice in set(Site):
            sites |= {chunk.name: Site(choice) for chunk in chunks}
            continue
        if isinstance(choice, bool) or not isinstance(choice, int | float) or not 0 <= choice <= 1:
            where = f"update[{name!r}]" if isinstance(update, Mapping) else "update"
            words = ", ".join(repr(site.value) for site in Site)
            raise ConfigError(
                f"{where} is {choice!r}; give {words} or the share of the host, from 0 to 1", key="update"
            )
        on_host = host_chunks(chunks, choice)
        sites |= {
            chunk.name: Site.HOST if chunk.name in on_host or not is_trained(chunk) else Site.DEVICE for chunk in chunks
        }
    return sites


def _size(size: Size | None) -> int | None:
    return None if size is None else parse_bytes(size)


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
