"""Plans written by hand: a word for all groups, or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lowtide.activations.policy import Policies
from lowtide.errors import ConfigError
from lowtide.memory.groups import find_named_groups
from lowtide.memory.layout import ChunkSpec, Layout, lay_out
from lowtide.planning.check_plan import check_plan
from lowtide.planning.group_settings import DEFAULT, activations_by_group, by_group
from lowtide.planning.placement import assemble, is_always_open, is_trained
from lowtide.planning.plan import Budgets, Plan, Schedule, Site, Weights, word_of
from lowtide.units import parse_bytes

Size = str | int


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
    layout = model if isinstance(model, Layout) else lay_out(find_named_groups(model, names))
    placed = _weights_by_group(layout, weights)
    sites = _sites_by_chunk(layout, update)
    for chunk in layout.chunks:
        if placed[chunk.group] is Weights.HOST:
            sites[chunk.name] = Site.HOST  # where the weights are
    plan = assemble(
        layout,
        resident={name for name, word in placed.items() if word is Weights.RESIDENT},
        on_device={name for name, site in sites.items() if site is Site.DEVICE},
        paged={name for name, site in sites.items() if site is Site.PAGED},
        on_host={name for name, word in placed.items() if word is Weights.HOST},
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


def _weights_by_group(layout: Layout, weights: Weights | str | Mapping[str, Weights | str]) -> dict[str, Weights]:
    named = weights if isinstance(weights, Mapping) else {DEFAULT: weights}
    words = {
        name: word_of(Weights, word, f"weights[{name!r}]") for name, word in by_group(layout, named, "weights").items()
    }
    default = words.get(DEFAULT, Weights.STREAMED)
    return {
        group.name: words.get(group.name, Weights.RESIDENT if is_always_open(group) else default)
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
