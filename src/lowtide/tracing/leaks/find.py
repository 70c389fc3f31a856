"""`find_leaks`: runs a training step a few times and reports the memory that survives from step to step.

Note [What counts as a leak]
    A storage that is alive after its step is not yet a leak: gradients, caches, a queue of recent losses and the last
    output all are. What they have in common is that the number of *different steps* they still hold memory of stops
    growing. So storages are counted by the line of their birth, and after each step its depth is noted: how many of the
    measured steps it still holds something of. A line leaks when its depth reaches a new height in each third of the
    measured steps. Sizes do not matter for that, so that batches of varying length do not mislead.
    What grows for longer than the steps last (a deque of 100 under 12 steps) does look like a leak, and what grows
    more rarely than once in a third of the steps is missed: more `steps` settle both.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.autograd.graph import Node

from lowtide.compat import autograd_references
from lowtide.errors import ConfigError, ObserveError
from lowtide.tracing.leaks.births import BirthLog, BirthSite, Born, living_tensors, storage_of
from lowtide.tracing.leaks.holders import Anchor, ObjectPath, find_anchor, shortest_paths, starting_points
from lowtide.tracing.leaks.names import (
    ANY_PLACE,
    CYCLE,
    GRAPH,
    UNSEEN,
    Birth,
    Chain,
    Holder,
    Leak,
    LeakKind,
    LeakReport,
    describe,
)

MIN_STEPS = 6
"""Two steps for each third: with fewer, one hiccup is a trend."""

_GONE: Chain = (Holder(kind=CYCLE, detail="that was gone before it could be examined"),)

Depths = dict[str, list[int]]
"""For each line of birth, after each step: of how many measured steps it still holds memory."""
_NATIVE: Chain = (Holder(kind=UNSEEN, where="which Python cannot see into"),)
_Key = tuple[LeakKind, tuple[tuple[str, str, str], ...]]


def find_leaks(
    step: Callable[[], object], *, steps: int = 12, warmup: int = 3, min_bytes_per_step: int = 64
) -> LeakReport:
    """Memory on any device that a training step leaves behind, time after time, and who holds it.

    Calls `step()` `warmup + steps` times. Optimizer state, caches that fill up, gradients that stay at one size and the
    last step's own leftovers are not reported; Note [What counts as a leak] says how they are told apart. Nothing that
    the step owns is kept alive. A watched step costs some 20 microseconds more for each operator, and a look through
    the objects of the process, some 150 milliseconds for a million of them; when something leaks, one search through
    all of them comes on top, about four seconds for a million. Compiled code stays compiled; what it allocates inside
    is known without its operator.

    Args:
        step: Runs one training step; takes no arguments, and its result is dropped.
        steps: How many steps to measure. More find slower leaks and tell longer queues from leaks.
        warmup: How many to run before: the first ones allocate what stays (optimizer state, workspaces).
        min_bytes_per_step: Growth below this is not reported; by default one detached scalar a step may be kept.

    Raises:
        ConfigError: Fewer than six steps, or a negative number.
        ObserveError: The step ran out of data.

    Example:
        >>> history = []
        >>> model = torch.nn.Linear(256, 256)
        >>> report = find_leaks(lambda: history.append(model(torch.randn(8, 256)).square().mean()))
        >>> report.leaks[0].holders[0].name
        'history'
    """
    if steps < MIN_STEPS:
        raise ConfigError(f"steps is {steps}, but growth shows only over {MIN_STEPS} or more; raise it", key="steps")
    for key, value in (("warmup", warmup), ("min_bytes_per_step", min_bytes_per_step)):
        if value < 0:
            raise ConfigError(f"{key} is {value}; it cannot be negative", key=key)
    for index in range(warmup):
        _call(step, index + 1, warmup + steps)
    with BirthLog() as log:
        depths = _measure(step, log, steps=steps, warmup=warmup)
        survivors = _survivors(step, log, depths)
    leaks = _group_survivors(survivors, steps=steps)
    return LeakReport(
        steps=steps, warmup=warmup, leaks=tuple(leak for leak in leaks if leak.bytes_per_step >= min_bytes_per_step)
    )


def keeps_growing(depths: Sequence[int]) -> bool:
    """Whether a depth reached a new height in each third of the steps, and is at its highest now.

    Example:
        >>> keeps_growing([1, 2, 3, 4, 5, 6]), keeps_growing([1, 2, 3, 3, 3, 3]), keeps_growing([1, 0, 1, 0, 1, 0])
        (True, False, False)
    """
    first, second = len(depths) // 3, 2 * len(depths) // 3
    return 0 < max(depths[:first]) < max(depths[:second]) < depths[-1]


def in_every_third(births: Iterable[int], steps: int) -> bool:
    """Whether there is a birth in each third of the steps, which count from 1."""
    return {3 * (birth - 1) // steps for birth in births} == {0, 1, 2}


def _call(step: Callable[[], object], number: int, total: int) -> None:
    try:
        step()
    except StopIteration as error:
        raise ObserveError(
            f"the step ran out of data at call {number} of {total}; let it start over, or ask for fewer steps"
        ) from error


def _measure(step: Callable[[], object], log: BirthLog, *, steps: int, warmup: int) -> Depths:
    depths: Depths = defaultdict(lambda: [0] * steps)
    for index in range(steps):
        # Without the collector in the last step, so that a cycle which it would free is there to be examined.
        with _collector_paused() if index == steps - 1 else nullcontext(), log.watch(index + 1):
            _call(step, warmup + index + 1, warmup + steps)
        for line, depth in _depths_now(log).items():
            depths[line][index] = depth
    return depths


def _depths_now(log: BirthLog) -> dict[str, int]:
    births: dict[str, set[int]] = defaultdict(set)
    for born in list(log.alive.values()):
        births[born.site.line].add(born.step)
    return {line: len(steps) for line, steps in births.items()}


def _survivors(step: Callable[[], object], log: BirthLog, depths: Depths) -> list[_Survivor]:
    """What leaks, with its holders; frees the garbage among it, to tell it from what is held."""
    steps = len(next(iter(depths.values()), []))
    suspected = {line for line, history in depths.items() if keeps_growing(history)}
    suspected |= {collected.site.line for collected in log.collected}
    suspects = {key: born for key, born in list(log.alive.items()) if born.site.line in suspected}
    with _collector_paused():
        chains, unreachable = _chains(step, suspects)
    if unreachable:
        gc.collect()
    now = _depths_now(log)
    survivors = [
        _Survivor(kind=LeakKind.HELD, site=born.site, step=born.step, bytes=born.bytes, holders=chains[key])
        for key, born in suspects.items()
        if log.alive.get(key) is born and keeps_growing([*depths[born.site.line][:-1], now[born.site.line]])
    ]
    births: dict[str, list[int]] = defaultdict(list)
    for collected in log.collected:
        births[collected.site.line].append(collected.step)
    survivors += [
        _Survivor(
            kind=LeakKind.GARBAGE,
            site=collected.site,
            step=collected.step,
            bytes=collected.bytes,
            holders=unreachable.get(collected.site, _GONE),
        )
        for collected in log.collected
        if in_every_third(births[collected.site.line], steps)
    ]
    return survivors


def _chains(step: Callable[[], object], suspects: dict[int, Born]) -> tuple[dict[int, Chain], dict[BirthSite, Chain]]:
    """The holders of each suspect, and those of the unreachable by the site of their birth."""
    # The step itself last: where a variable of the caller's holds it too, that has a name.
    paths = shortest_paths([*starting_points(), [step]], suspects.keys()) if suspects else {}
    chains = {key: describe(path) for key, path in paths.items()}
    del paths  # before the search backwards, which would find it
    unreached = {key: born for key, born in suspects.items() if key not in chains}
    by_site = _chains_of_unreachable(unreached) if unreached else {}
    return chains | {key: by_site[born.site] for key, born in unreached.items()}, by_site


@contextmanager
def _collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _chains_of_unreachable(unreached: dict[int, Born]) -> dict[BirthSite, Chain]:
    """The holders of storages that no search from a starting point has reached, by the site of their birth."""
    # One for each site, of the youngest: a search backwards is slow, and what comes from one site shares its fate.
    samples = {born.site: key for key, born in sorted(unreached.items(), key=lambda entry: entry[1].step)}
    # They may have no Python object of their own, only a graph that hangs on one.
    owners = [
        tensor for tensor in living_tensors() if tensor.grad_fn is not None or id(storage_of(tensor)) in unreached
    ]
    outer = _not_saved_by_others(owners)
    paths = shortest_paths([outer, owners], set(samples.values()))
    chains: dict[BirthSite, Chain] = dict.fromkeys(samples, _NATIVE)
    anchors: dict[int, Anchor] = {}
    for site, key in samples.items():
        if key in paths:
            owner = paths[key][0]
            assert isinstance(owner, torch.Tensor)
            if id(owner) not in anchors:
                anchors[id(owner)] = find_anchor(owner, ignored=_containers(owners, outer, paths, anchors))
            chains[site] = _anchored_chain(paths[key], anchors[id(owner)])
    return chains


def _not_saved_by_others(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that no graph holds, other than the very node that made them."""
    nodes = list({id(tensor.grad_fn): tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}.values())
    seen = {id(node) for node in nodes}
    savers: dict[int, set[int]] = defaultdict(set)
    for node in nodes:  # grows while it is read
        for reference in autograd_references(node):
            if isinstance(reference, torch.Tensor):
                savers[id(storage_of(reference))].add(id(node))
            elif isinstance(reference, Node) and id(reference) not in seen:
                seen.add(id(reference))
                nodes.append(reference)
    return [tensor for tensor in tensors if savers[id(storage_of(tensor))] <= {id(tensor.grad_fn)}]


def _containers(
    owners: list[torch.Tensor], outer: list[torch.Tensor], paths: dict[int, ObjectPath], anchors: dict[int, Anchor]
) -> set[int]:
    """The `id`s of what holds the owners on our behalf."""
    anchored = [part for anchor in anchors.values() for part in (anchor, anchor.cycle, anchor.path)]
    return {id(container) for container in (owners, outer, paths, *paths.values(), *anchored)}


def _anchored_chain(path: ObjectPath, anchor: Anchor) -> Chain:
    chain = describe((*anchor.path[:-1], *path))
    if not anchor.cycle:
        return _NATIVE + chain
    around = " -> ".join(str(holder) for holder in describe(anchor.cycle))
    # The chain starts with the object that the cycle ends with.
    return (Holder(kind=CYCLE, detail=f"({around})"), *chain[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survivor:
    """One leaked storage, as plain data."""

    kind: LeakKind
    site: BirthSite
    step: int
    """The measured step of its birth, from 1."""
    bytes: int
    holders: Chain


def _group_survivors(survivors: Iterable[_Survivor], *, steps: int) -> list[Leak]:
    """The leaks of so many steps, the fastest growing first: one for each place in the code that a person has to change."""
    groups: dict[_Key, list[_Survivor]] = defaultdict(list)
    for survivor in survivors:
        groups[_key(survivor)].append(survivor)
    leaks = [_leak(members, steps) for members in _adopt_strays(list(groups.values()))]
    return sorted(leaks, key=lambda leak: leak.bytes_per_step, reverse=True)


def _key(survivor: _Survivor) -> _Key:
    # Positions in a container and the shape of a tensor differ from step to step; the place does not.
    return survivor.kind, tuple(
        (holder.kind, ANY_PLACE if holder.name.startswith("[") else holder.name, holder.where)
        for holder in _down_to_graph(survivor.holders)
        if holder.kind != GRAPH
    )


def _down_to_graph(holders: Sequence[Holder]) -> Chain:
    """Without what a graph holds inside: the holder of the graph is the one to change."""
    for index, holder in enumerate(holders):
        if holder.kind == GRAPH:
            return tuple(holders[: index + 1])
    return tuple(holders)


def _adopt_strays(groups: list[list[_Survivor]]) -> list[list[_Survivor]]:
    """The last step's leftovers are often held by a variable too, which is nearer than the place that leaks.

    So survivors of a single step join those that were born at the same site and span several.
    """
    lasting = [members for members in groups if len({member.step for member in members}) > 1]
    home = {member.site: members for members in lasting for member in members}
    alone = []
    for members in [members for members in groups if len({member.step for member in members}) == 1]:
        strays = [member for member in members if member.site not in home]
        for member in members:
            if member.site in home:
                home[member.site].append(member)
        if strays:
            alone.append(strays)
    return lasting + alone


def _leak(members: Sequence[_Survivor], steps: int) -> Leak:
    total = sum(member.bytes for member in members)
    return Leak(
        kind=members[0].kind,
        bytes_per_step=round(total / steps),
        total_bytes=total,
        count=len(members),
        saved_bytes=sum(member.bytes for member in members if any(held.kind == GRAPH for held in member.holders)),
        holders=_common_chain(members),
        births=_births(members),
    )


def _common_chain(members: Sequence[_Survivor]) -> Chain:
    # The first member founded the group; an adopted one may have come by another way.
    own = [member for member in members if _key(member) == _key(members[0])]
    chains = [_down_to_graph(member.holders) for member in own]
    longest = max(chains, key=len)
    names = [{chain[index].name for chain in chains if index < len(chain)} for index in range(len(longest))]
    return tuple(
        replace(holder, name=ANY_PLACE) if len(seen) > 1 else holder
        for holder, seen in zip(longest, names, strict=True)
    )


def _births(members: Sequence[_Survivor]) -> tuple[Birth, ...]:
    by_site: dict[BirthSite, list[_Survivor]] = defaultdict(list)
    for member in members:
        by_site[member.site].append(member)
    births = [
        Birth(
            op=site.op,
            module=site.module,
            source=site.source,
            device=site.device,
            count=len(born),
            bytes=sum(member.bytes for member in born),
        )
        for site, born in by_site.items()
    ]
    return tuple(sorted(births, key=lambda birth: birth.bytes, reverse=True))
