"""Holders of a storage: the shortest chain of references to it from a place that a person can find.

A breadth-first walk over everything alive, from the variables of running functions and the modules on. References come
from the garbage collector's view of each object, plus those that only C++ knows: from a tensor to its graph, from there
to what was saved. The walk holds what it has visited, so that an `id` stays unique, and lets go of all of it when it
returns. It costs about four microseconds and 100 bytes for each object in the process.

What the walk does not reach hangs on a reference cycle, or on something Python cannot see. That is searched backwards, from
the tensor to its referrers, which is slow: each level looks through every object in the process.
"""

from __future__ import annotations

import enum
import gc
import inspect
import os
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.graph import Node

from lowtide.compat import autograd_references, has_autograd_references
from lowtide.tracing.leaks.births import storage_of

ObjectPath = tuple[object, ...]
"""Each object holds the next; the last is a tensor or a storage."""

# The frames of the search itself hold what it has found so far.
_FOLDER = str(Path(__file__).parent) + os.sep
_MAX_LEVELS = 24
_MAX_OBJECTS = 2000


class _Sort(enum.Enum):
    LEAF = enum.auto()
    """An object that holds nothing worth following."""
    PLAIN = enum.auto()
    TENSOR = enum.auto()
    AUTOGRAD = enum.auto()
    """A node of a graph, or what it saved."""
    FRAME = enum.auto()
    STORAGE = enum.auto()


_LEAF_TYPES = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(types.CodeType, types.BuiltinFunctionType, torch.dtype, torch.device),
)


def running_frames() -> list[types.FrameType]:
    """The frames of every thread, the caller's innermost first, without the ones that look for leaks."""
    # This function's own frame must never lie in one of its variables: that is a cycle, and would keep every frame
    # above it, with all their variables, until the collector runs.
    frames = _from_here_up(sys._getframe(1))
    for thread, innermost in sys._current_frames().items():
        if thread != threading.get_ident():
            frames += _from_here_up(innermost)
        del innermost
    return frames


def _from_here_up(innermost: types.FrameType) -> list[types.FrameType]:
    return [frame for frame, _ in traceback.walk_stack(innermost) if not frame.f_code.co_filename.startswith(_FOLDER)]


def frame_variables(frame: types.FrameType) -> list[tuple[str, object]]:
    """Names and values of a frame's variables, leaving no copy of them behind."""
    variables: Mapping[str, object] = frame.f_locals
    found = list(variables.items())
    # Up to Python 3.12 a function's `f_locals` is a snapshot that its frame keeps: it would hold the values for as long
    # as the function runs, after the function has let go of them. Emptied, unless something else (a `locals()`) has it:
    # the frame, this variable and the argument of getrefcount are three.
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_function and isinstance(variables, dict) and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


def starting_points() -> list[Sequence[object]]:
    """Where a search begins, in stages: the frames of running functions, then the modules, `__main__` first.

    Most of what leaks is a few references away from a running function, and then the modules need not be searched.
    """
    main = sys.modules.get("__main__")
    return [running_frames(), [main, *(module for module in sys.modules.values() if module is not main)]]


def shortest_paths(stages: Iterable[Sequence[object]], wanted: AbstractSet[int]) -> dict[int, ObjectPath]:
    """For each wanted storage that can be reached, the objects from a start to a tensor or storage that owns it.

    Args:
        stages: Where to begin. A later stage is used for what the ones before it do not reach; within a stage the
            shortest path wins, and of equally short ones that from the earliest start.
        wanted: The `id`s of storages.
    """
    walk = _Walk(wanted)
    for starts in stages:
        walk.run(starts)
    return {key: walk.path_to(index) for key, index in walk.found.items()}


class _Walk:
    def __init__(self, wanted: AbstractSet[int]) -> None:
        self.found: dict[int, int] = {}
        self._wanted = wanted
        self._objects: list[object] = []
        self._holders: list[int] = []
        """For each object the index of the one it was reached from; -1 for a start."""
        self._position = 0
        """The next object whose references are to be followed."""
        self._seen: set[int] = set()
        # By type, and only for the length of this walk: kept any longer it would keep classes alive.
        self._sorts: dict[type, _Sort] = dict.fromkeys(_LEAF_TYPES, _Sort.LEAF)

    def run(self, starts: Sequence[object]) -> None:
        if len(self.found) == len(self._wanted):
            return
        for start in starts:
            if id(start) not in self._seen:
                self._visit(start, -1)
        objects, sorts, seen = self._objects, self._sorts, self._seen
        while self._position < len(objects) and len(self.found) < len(self._wanted):
            for reference in self._references(self._position):
                if id(reference) not in seen and sorts.get(type(reference)) is not _Sort.LEAF:
                    self._visit(reference, self._position)
            self._position += 1

    def path_to(self, index: int) -> ObjectPath:
        path = []
        while index >= 0:
            path.append(self._objects[index])
            index = self._holders[index]
        return tuple(reversed(path))

    def _visit(self, thing: object, holder: int) -> None:
        sort = self._sort(thing)
        if sort in (_Sort.TENSOR, _Sort.STORAGE):
            storage = storage_of(thing)
            if storage is not None and id(storage) in self._wanted:
                self.found.setdefault(id(storage), len(self._objects))
        elif sort is _Sort.PLAIN and not gc.is_tracked(thing):  # the collector knows that it holds nothing
            return
        self._seen.add(id(thing))
        self._objects.append(thing)
        self._holders.append(holder)

    def _references(self, position: int) -> Sequence[object]:
        holder = self._objects[position]
        sort = self._sorts[type(holder)]
        if sort is _Sort.PLAIN:
            return gc.get_referents(holder)
        if sort is not _Sort.FRAME:
            return [*gc.get_referents(holder), *autograd_references(holder)]
        assert isinstance(holder, types.FrameType)
        if self._holders[position] < 0:  # a start: it runs, and the collector does not look into it
            return [value for _, value in frame_variables(holder)]
        # Not on to the calling frame: a traceback holds it, but it is a place of its own.
        return [value for value in gc.get_referents(holder) if self._sort(value) is not _Sort.FRAME]

    def _sort(self, thing: object) -> _Sort:
        kind = type(thing)  # `isinstance` would ask `__class__`, which a lazy proxy answers with code of its own
        sort = self._sorts.get(kind)
        if sort is None:
            sort = self._sorts[kind] = _sort_of(kind)
        return sort


def _sort_of(kind: type) -> _Sort:
    if issubclass(kind, torch.Tensor):
        return _Sort.TENSOR
    if issubclass(kind, torch.UntypedStorage):
        return _Sort.STORAGE
    if issubclass(kind, types.FrameType):
        return _Sort.FRAME
    return _Sort.AUTOGRAD if has_autograd_references(kind) else _Sort.PLAIN


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
