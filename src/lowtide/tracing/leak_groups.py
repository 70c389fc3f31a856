"""Groups what survived by who holds it: one leak for each place in the code that a person has to change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lowtide.tracing.leak_report import ANY_PLACE, GRAPH, Birth, Chain, Holder, Leak, LeakKind
from lowtide.tracing.storage_births import Site

_Key = tuple[LeakKind, tuple[tuple[str, str, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """One leaked storage, as plain data."""

    kind: LeakKind
    site: Site
    step: int
    """The measured step of its birth, from 1."""
    bytes: int
    holders: Chain

    @property
    def is_saved(self) -> bool:
        """Whether only a graph holds it."""
        return any(holder.kind == GRAPH for holder in self.holders)


def group_survivors(survivors: Iterable[Survivor], *, steps: int) -> list[Leak]:
    """The leaks that the survivors of so many steps make, the fastest growing first."""
    groups: dict[_Key, list[Survivor]] = defaultdict(list)
    for survivor in survivors:
        groups[_key(survivor)].append(survivor)
    leaks = [_leak(members, steps) for members in _adopt_strays(list(groups.values()))]
    return sorted(leaks, key=lambda leak: leak.bytes_per_step, reverse=True)


def _key(survivor: Survivor) -> _Key:
    # Positions in a container and the shape of a tensor differ from step to step; the place does not.
    place = [(holder.kind, _generic(holder.name), holder.where) for holder in _down_to_graph(survivor.holders)]
    return survivor.kind, tuple(link for link in place if link[0] != GRAPH)


def _generic(name: str) -> str:
    return ANY_PLACE if name.startswith("[") else name


def _down_to_graph(holders: Sequence[Holder]) -> Chain:
    """Without what a graph holds inside: whoever holds the graph is the one to change."""
    for index, holder in enumerate(holders):
        if holder.kind == GRAPH:
            return tuple(holders[: index + 1])
    return tuple(holders)


def _adopt_strays(groups: list[list[Survivor]]) -> list[list[Survivor]]:
    """The last step's leftovers are often held by a variable too, which is nearer than the place that leaks.

    So survivors of a single step join those that were born at the same site and span several.
    """
    lasting = [members for members in groups if len({member.step for member in members}) > 1]
    home = {member.site: members for members in lasting for member in members}
    adopted = [members for members in groups if len({member.step for member in members}) == 1]
    alone = []
    for members in adopted:
        strays = [member for member in members if member.site not in home]
        for member in members:
            if member.site in home:
                home[member.site].append(member)
        if strays:
            alone.append(strays)
    return lasting + alone


def _leak(members: Sequence[Survivor], steps: int) -> Leak:
    total = sum(member.bytes for member in members)
    return Leak(
        kind=members[0].kind,
        bytes_per_step=round(total / steps),
        total_bytes=total,
        count=len(members),
        saved_bytes=sum(member.bytes for member in members if member.is_saved),
        holders=_common_chain(members),
        births=_births(members),
    )


def _common_chain(members: Sequence[Survivor]) -> Chain:
    # The first member founded the group; an adopted one may have come by another way.
    own = [member for member in members if _key(member) == _key(members[0])]
    chains = [_down_to_graph(member.holders) for member in own]
    longest = max(chains, key=len)
    names = [{chain[index].name for chain in chains if index < len(chain)} for index in range(len(longest))]
    return tuple(
        replace(holder, name=ANY_PLACE) if len(seen) > 1 else holder
        for holder, seen in zip(longest, names, strict=True)
    )


def _births(members: Sequence[Survivor]) -> tuple[Birth, ...]:
    by_site: dict[Site, list[Survivor]] = defaultdict(list)
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
