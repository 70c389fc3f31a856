"""Who holds a storage: the shortest chain of references to it from a place that a person can find.

A breadth-first walk over everything alive, from the variables of running functions and the modules on. References come
from the garbage collector's view of each object, plus those that only C++ knows: tensor to graph, graph to saved tensor.
The walk holds what it has visited, so that an `id` stays unique, and lets go of all of it when it returns. It costs
about two microseconds and 100 bytes for each object in the process.
"""

from __future__ import annotations

import enum
import gc
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch.autograd.graph import Node

from lowtide.compat import autograd_references
from lowtide.tracing.storage_births import storage_of

ObjectPath = tuple[object, ...]
"""Each object holds the next; the last is a tensor or a storage."""

_OWN_MODULES = ("lowtide.tracing.leak", "lowtide.tracing.storage_births")


class _Sort(enum.Enum):
    LEAF = enum.auto()
    """Holds nothing worth following."""
    PLAIN = enum.auto()
    TENSOR = enum.auto()
    NODE = enum.auto()
    STORAGE = enum.auto()


_LEAF_TYPES = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(types.CodeType, types.BuiltinFunctionType, torch.dtype, torch.device),
)


def running_frames() -> list[types.FrameType]:
    """The frames of every thread, the caller's innermost first, without the ones that look for leaks."""
    current = sys._current_frames()
    innermost = [current.pop(threading.get_ident()), *current.values()]
    frames: list[types.FrameType] = []
    for start in innermost:
        frame: types.FrameType | None = start
        while frame is not None:
            if not str(frame.f_globals.get("__name__", "")).startswith(_OWN_MODULES):
                frames.append(frame)
            frame = frame.f_back
    return frames


def frame_variables(frame: types.FrameType) -> list[tuple[str, object]]:
    """Names and values of a frame's variables, leaving no copy of them behind."""
    variables = frame.f_locals
    found = list(variables.items())
    # Up to Python 3.12 a function's `f_locals` is a snapshot that its frame keeps: it would hold the values for as long
    # as the function runs, after the function has let go of them. Emptied, unless somebody else (a `locals()`) has it:
    # the frame, this variable and the argument of getrefcount are three.
    is_snapshot = isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_snapshot and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


def starting_points(step: Callable[[], object]) -> list[object]:
    """Where a search begins: running functions, the step itself, and the modules, `__main__` first."""
    main = sys.modules.get("__main__")
    others = [module for module in sys.modules.values() if module is not main]
    return [*running_frames(), step, *([main] if main is not None else []), *others]


def shortest_paths(starts: Iterable[object], wanted: AbstractSet[int]) -> dict[int, ObjectPath]:
    """For each wanted storage that can be reached, the objects from a start to a tensor or storage that owns it.

    Args:
        starts: Where to begin; of equally short paths the one from the earliest start wins.
        wanted: The `id`s of storages.
    """
    walk = _Walk(starts, wanted)
    walk.run()
    return {key: walk.path_to(index) for key, index in walk.found.items()}


class _Walk:
    def __init__(self, starts: Iterable[object], wanted: AbstractSet[int]) -> None:
        self.found: dict[int, int] = {}
        self._wanted = wanted
        self._objects: list[object] = []
        self._holders: list[int] = []
        """For each object the index of the one it was reached from."""
        self._seen: set[int] = set()
        # By type, and only for the length of this walk: kept any longer it would keep classes alive.
        self._sorts: dict[type, _Sort] = dict.fromkeys(_LEAF_TYPES, _Sort.LEAF)
        for start in starts:
            self._visit(start, -1)
        self._num_starts = len(self._objects)

    def run(self) -> None:
        position = 0
        while position < len(self._objects) and len(self.found) < len(self._wanted):
            for reference in self._references(position):
                self._visit(reference, position)
            position += 1

    def path_to(self, index: int) -> ObjectPath:
        path = []
        while index >= 0:
            path.append(self._objects[index])
            index = self._holders[index]
        return tuple(reversed(path))

    def _visit(self, thing: object, holder: int) -> None:
        sort = self._sort(thing)
        if sort is _Sort.LEAF or id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if sort in (_Sort.TENSOR, _Sort.STORAGE):
            storage = storage_of(thing)
            if storage is not None and id(storage) in self._wanted:
                self.found.setdefault(id(storage), len(self._objects))
        self._objects.append(thing)
        self._holders.append(holder)

    def _references(self, position: int) -> Sequence[object]:
        holder = self._objects[position]
        sort = self._sort(holder)
        if sort in (_Sort.TENSOR, _Sort.NODE):
            return [*gc.get_referents(holder), *autograd_references(holder)]
        if not isinstance(holder, types.FrameType):
            return gc.get_referents(holder)
        if position < self._num_starts:  # the collector does not look into a frame that runs
            return [value for _, value in frame_variables(holder)]
        # Not on to the calling frame: a traceback holds it, but it is a place of its own.
        return [value for value in gc.get_referents(holder) if not isinstance(value, types.FrameType)]

    def _sort(self, thing: object) -> _Sort:
        kind = type(thing)
        sort = self._sorts.get(kind)
        if sort is None:
            sort = self._sorts[kind] = _sort_of(kind)
        return sort


def _sort_of(kind: type) -> _Sort:
    if issubclass(kind, torch.Tensor):
        return _Sort.TENSOR
    if issubclass(kind, torch.UntypedStorage):
        return _Sort.STORAGE
    return _Sort.NODE if issubclass(kind, Node) else _Sort.PLAIN
