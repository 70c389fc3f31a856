"""Who holds a tensor that cannot be reached: the reference cycle it hangs on, or the last object that Python can see.

Searches backwards, from the tensor to its referrers. Only for what no forward search has found, because each level
looks through every object in the process.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from lowtide.compat import autograd_references
from lowtide.tracing.leak_holders import ObjectPath

_MAX_LEVELS = 24
_MAX_OBJECTS = 2000


@dataclass(frozen=True, slots=True)
class Anchor:
    """What an unreachable tensor hangs on."""

    cycle: ObjectPath
    """The objects of a reference cycle, the first repeated at the end; empty where there is none."""
    path: ObjectPath
    """From an object of the cycle, or from the last that Python can see, down to the tensor."""


def find_anchor(tensor: torch.Tensor, *, ignored: Collection[int]) -> Anchor:
    """The nearest cycle that holds the tensor, or else its outermost visible holder.

    Args:
        tensor: A tensor that no search from a starting point has reached.
        ignored: The `id`s of containers of the caller's own that hold it too.
    """
    holders, holds = _everything_above(tensor, ignored)
    for key in holders:  # nearest first
        cycle = _shortest(holds, start=key, goal=key)
        if cycle:
            path = _shortest(holds, start=key, goal=id(tensor)) if key != id(tensor) else [key]
            return Anchor(tuple(holders[link] for link in cycle), tuple(holders[link] for link in path))
    outermost = list(holders)[-1]
    path = _shortest(holds, start=outermost, goal=id(tensor)) if outermost != id(tensor) else [outermost]
    return Anchor((), tuple(holders[link] for link in path))


def _everything_above(tensor: torch.Tensor, ignored: Collection[int]) -> tuple[dict[int, object], dict[int, set[int]]]:
    holders: dict[int, object] = {id(tensor): tensor}
    holds: dict[int, set[int]] = {}
    frontier: list[object] = [tensor]
    ours = {id(holders), id(frontier), *ignored}
    for _ in range(_MAX_LEVELS):
        referrers = gc.get_referrers(*frontier)
        ours.add(id(referrers))
        keys = {id(thing) for thing in frontier}
        frontier.clear()
        for referrer in referrers:
            if id(referrer) in ours:
                continue
            holds.setdefault(id(referrer), set()).update(keys & {id(thing) for thing in gc.get_referents(referrer)})
            if id(referrer) not in holders:
                holders[id(referrer)] = referrer
                frontier.append(referrer)
        ours.discard(id(referrers))
        del referrers
        if not frontier or len(holders) > _MAX_OBJECTS:
            break
    for key, thing in list(holders.items()):
        if isinstance(thing, torch.Tensor):
            holds.setdefault(key, set()).update(_nodes_under(thing) & holders.keys())
    return holders, holds


def _nodes_under(tensor: torch.Tensor) -> set[int]:
    """The `id`s of the tensor's graph nodes; stable for those that Python code owns, the only ones compared."""
    nodes: dict[int, object] = {}
    waiting: list[object] = [tensor]
    while waiting:
        for reference in autograd_references(waiting.pop()):
            if isinstance(reference, Node) and id(reference) not in nodes:
                nodes[id(reference)] = reference
                waiting.append(reference)
    return set(nodes)


def _shortest(holds: dict[int, set[int]], *, start: int, goal: int) -> list[int]:
    """The shortest way of at least one link from start to goal; empty where there is none."""
    came_from: dict[int, int] = {}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for there in holds.get(here, ()):
            if there not in came_from:
                came_from[there] = here
                if there == goal:
                    return _unwind(came_from, start, goal)
                waiting.append(there)
    return []


def _unwind(came_from: dict[int, int], start: int, goal: int) -> list[int]:
    way = [goal]
    while True:
        way.append(came_from[way[-1]])
        if way[-1] == start:
            return way[::-1]
