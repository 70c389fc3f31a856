"""LeakReport: what survives from step to step, who holds it, and how fast it grows; and the names that it has for holders.

A path of Python objects becomes the chain of holders that a report shows. Dictionaries of attributes, closure cells, traceback
links and the like are how Python is built, not who holds what, so a step over them becomes one holder: the object behind them,
under the name its owner has for it. The result is text; it holds none of the objects.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import types
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from lowtide.compat import SavedTensor
from lowtide.tracing.leaks.holders import ObjectPath, frame_variables
from lowtide.units import format_bytes

GRAPH = "autograd graph"
"""Kind of the holder that stands for all nodes between a tensor's `grad_fn` and what they saved for the backward."""
CYCLE = "reference cycle"
"""Kind of the holder that stands for objects that hold each other and that nothing else holds."""
UNSEEN = "native code"
"""Kind of the holder that stands for a reference which no Python object shows."""

ANY_PLACE = "[...]"
"""Name of a holder that stands for several entries of the container before it."""


class LeakKind(enum.StrEnum):
    """Whether the memory is held, or only waits for the garbage collector."""

    HELD = "held"
    """Reachable: it stays until its holder lets go of it."""
    GARBAGE = "garbage"
    """Held by nothing but a reference cycle: it stays until the garbage collector happens to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One object in a chain of holders, and how the one before it knows it."""

    kind: str
    """What it is: its type's name (`list`, `LossLogger`, `Tensor`), `forward hook`, `autograd graph` and the like."""
    name: str = ""
    """Its variable, attribute, `[index]` or `['key']`; "" where it has none. `[...]` stands for several entries."""
    where: str = ""
    """The place of that name: `in function train (train.py:31)`, `of LossLogger`."""
    detail: str = ""
    """What else helps to recognise it: a tensor's shape, dtype and whether it has a graph."""

    def __str__(self) -> str:
        # `[...]` says nothing that the container before it does not say.
        name = self.name
        if name == ANY_PLACE:
            name = ""
        elif name and not name.startswith("["):
            name = f"'{name}'"
        return " ".join(part for part in (self.kind, name, self.detail, self.where) if part)


Chain = tuple[Holder, ...]
"""Each holds the next; the last one owns the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Where leaked storages were allocated."""

    op: str
    """For example `aten.mm`; "" for a tensor that no operator made while the step was watched."""
    module: str
    """Path of the innermost module, its outermost class first: `GPT.blocks.0.mlp`; "" outside any module."""
    source: str
    """`file.py:line` of the innermost frame outside torch; "" when there is none."""
    device: str
    count: int
    bytes: int
    """What the `count` storages hold together at the end."""

    def __str__(self) -> str:
        op = self.op or "no operator"
        return op + (f" in {self.module}" if self.module else "") + (f" at {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Memory that grows with the steps, all held in one place."""

    kind: LeakKind
    bytes_per_step: int
    total_bytes: int
    """Everything that the measured steps left behind here."""
    count: int
    """How many storages that is; views of one storage count once."""
    saved_bytes: int
    """The part of `total_bytes` that is held only by an autograd graph, as saved for a backward."""
    holders: Chain
    """From the variable that a person can find down to the tensor or graph that owns the bytes."""
    births: tuple[Birth, ...]
    """Where the storages were allocated, most bytes first."""

    @property
    def op(self) -> str:
        """The operator that made most of the bytes."""
        return self.births[0].op

    @property
    def module(self) -> str:
        """The module that made most of the bytes."""
        return self.births[0].module

    @property
    def source(self) -> str:
        """The line that made most of the bytes."""
        return self.births[0].source

    @property
    def chain(self) -> str:
        """The holders in one line, outermost first, and what the last one keeps alive."""
        links = [str(holder) for holder in self.holders if holder.kind != GRAPH]
        what = "of saved activations " if self.saved_bytes * 2 > self.total_bytes else ""
        return " -> ".join([*links, f"keeps {format_bytes(self.total_bytes)} {what}alive"])

    def summary(self) -> str:
        """The leak as lines of text for people."""
        freed = "" if self.kind is LeakKind.HELD else " of garbage in a cycle, freed only when the collector runs"
        storages = "1 storage" if self.count == 1 else f"{self.count} storages"
        lines = [f"{format_bytes(self.bytes_per_step)} a step{freed}, {storages} so far", f"   {self.chain}"]
        lines += [f"   made by {birth}: {format_bytes(birth.bytes)}" for birth in self.births[:3]]
        if others := self.births[3:]:
            lines.append(f"   and {len(others)} more: {format_bytes(sum(birth.bytes for birth in others))}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakReport:
    """What `find_leaks` saw."""

    steps: int
    """How many steps were measured."""
    warmup: int
    """How many steps ran before, unmeasured."""
    leaks: tuple[Leak, ...]
    """The fastest growing first; empty for a clean step."""

    @property
    def bytes_per_step(self) -> int:
        """Growth of all leaks together."""
        return sum(leak.bytes_per_step for leak in self.leaks)

    def summary(self) -> str:
        """The report as text for people, one paragraph a leak."""
        measured = f"{self.steps} steps after {self.warmup} of warm-up"
        if not self.leaks:
            return f"No leak: nothing that {measured} allocated kept growing."
        places = "1 place" if len(self.leaks) == 1 else f"{len(self.leaks)} places"
        head = f"Memory grows by {format_bytes(self.bytes_per_step)} a step, in {places} ({measured})."
        return "\n\n".join([head, *(f"{index}. {leak.summary()}" for index, leak in enumerate(self.leaks, start=1))])


_MAX_KEY_CHARS = 40
_SUBMODULE = "of the module above"
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
_HOOK_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


class _Step(NamedTuple):
    length: int
    """How many links of the path it takes."""
    holder: Holder | None
    """What it shows; None for a link that says nothing of who holds what."""
    is_root: bool = False
    """Whether a person can find this without what leads to it: a module's variable."""


def describe(path: ObjectPath) -> tuple[Holder, ...]:
    """The holders along a path, outermost first."""
    holders: list[Holder] = []
    if not isinstance(path[0], types.FrameType | types.ModuleType):
        holders.append(_holder(path[0], "", ""))
    position = 0
    while position + 1 < len(path):
        step = _next_step(path, position)
        position += step.length
        if step.is_root:
            holders.clear()
        if step.holder is not None and (not holders or step.holder != holders[-1]):
            holders.append(step.holder)
    return tuple(_join_submodules(holders))


def _next_step(path: ObjectPath, position: int) -> _Step:
    owner, held = path[position], path[position + 1]
    match owner:
        case types.FrameType():
            is_traceback = position > 0 and isinstance(path[position - 1], types.TracebackType)
            return _Step(1, _variable(owner, held, ", kept by a traceback" if is_traceback else ""))
        case types.GeneratorType() if owner.gi_frame is not None:
            return _Step(1, _variable(owner.gi_frame, held, ", a generator"))
        case types.CoroutineType() if owner.cr_frame is not None:
            return _Step(1, _variable(owner.cr_frame, held, ", a coroutine"))
        case types.FunctionType():
            return _from_function(owner, path, position)
        case types.MethodType():
            return _Step(1, _holder(held, "self" if held is owner.__self__ else "", "bound to the method"))
        case types.TracebackType():
            return _Step(1, None)
        case types.ModuleType():
            step = _from_namespace(path, position, f"in module {_module_place(_attributes(owner))}")
            return step._replace(is_root=True)
        case type():
            return _from_namespace(path, position, f"of class {owner.__qualname__}")
        case dict():
            return _Step(1, _holder(held, f"[{_key_text(owner, held)}]", ""))
        case list() | tuple() | deque():
            place = next((f"[{index}]" for index, entry in enumerate(owner) if entry is held), "")
            return _Step(1, _holder(held, place, ""))
        case Node() if isinstance(held, Node):
            return _Step(1, None)
        case Node() if isinstance(held, dict) and held is _attributes(owner):
            return _from_namespace(path, position, f"of the ctx of {owner.name()}")
        case Node() | SavedTensor():
            return _Step(1, _holder(held, "", "saved for the backward"))
        case torch.Tensor() if isinstance(held, Node):
            return _Step(1, Holder(kind=GRAPH, name=held.name()))
        case torch.Tensor() if isinstance(held, torch.Tensor):
            # The other tensor is the one that it is a view of, or a part of a sparse one.
            return _Step(1, _holder(held, "grad", "of the tensor") if owner.is_leaf and owner.grad is held else None)
        case BaseException() if isinstance(held, types.TracebackType):
            return _Step(1, None)
        case _:
            return _from_instance(owner, path, position)


def _from_function(owner: types.FunctionType, path: ObjectPath, position: int) -> _Step:
    held = path[position + 1]
    after = path[position + 2] if position + 2 < len(path) else None
    code = owner.__code__
    if held is owner.__closure__ and held is not None:
        cells = dict(zip(code.co_freevars, held, strict=True))
        return _Step(3, _holder(path[position + 3], _name_in(cells, after), "closed over by it"))
    if held is owner.__defaults__ and held is not None:
        last_arguments = code.co_varnames[: code.co_argcount][-len(held) :]
        defaults = dict(zip(last_arguments, held, strict=True))
        return _Step(2, _holder(after, _name_in(defaults, after), "as a default argument"))
    if held is owner.__kwdefaults__ and isinstance(held, dict):
        return _Step(2, _holder(after, _name_in(held, after), "as a default argument"))
    if held is owner.__globals__ and isinstance(held, dict):
        where = f"in module {_module_place(owner.__globals__)}"
        return _Step(2, _holder(after, _name_in(held, after), where), is_root=True)
    return _from_instance(owner, path, position)


def _from_namespace(path: ObjectPath, position: int, where: str) -> _Step:
    held = path[position + 1]
    if isinstance(held, dict) and position + 2 < len(path):
        value = path[position + 2]
        return _Step(2, _holder(value, _name_in(held, value), where))
    return _Step(1, _holder(held, "", where))


def _from_instance(owner: object, path: ObjectPath, position: int) -> _Step:
    """An attribute: its value may lie in the instance, in its `__dict__` or in a slot."""
    length, name, value = 1, "", path[position + 1]
    if value is _attributes(owner) and position + 2 < len(path):
        length, value = 2, path[position + 2]
    name = _name_in(_attributes(owner), value) or _name_in(_slots(owner), value)
    where = f"of {_type_name(owner)}"
    if isinstance(value, dict) and position + length + 1 < len(path):
        inner = path[position + length + 1]
        if isinstance(owner, nn.Module) and name in _MODULE_TABLES:
            table_where = _SUBMODULE if name == "_modules" else where
            return _Step(length + 1, _holder(inner, _name_in(value, inner), table_where))
        if isinstance(owner, nn.Module) and name in _HOOK_TABLES:
            return _Step(length + 1, Holder(kind=_HOOK_TABLES[name], where=where, detail=_definition(inner)))
        if isinstance(owner, torch.Tensor) and not name:
            return _Step(length + 1, Holder(kind="tensor hook", where="of the tensor", detail=_definition(inner)))
    return _Step(length, _holder(value, name, where if name else f"inside {_type_name(owner)}"))


def _variable(frame: types.FrameType, value: object, suffix: str) -> Holder:
    code = frame.f_code
    name = next((name for name, candidate in frame_variables(frame) if candidate is value), "")
    if code.co_name == "<module>":
        place = f"in module {_module_place(frame.f_globals)}"
    else:
        place = f"in function {code.co_qualname} ({Path(code.co_filename).name}:{_line_of(code, name)})"
    return _holder(value, name, place + suffix if name else f"a temporary {place}{suffix}")


def _line_of(code: types.CodeType, variable: str) -> int:
    """The line that first assigns the variable; the function's own for an argument."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("STORE_") and instruction.argval == variable and instruction.positions:
            return instruction.positions.lineno or code.co_firstlineno
    return code.co_firstlineno


def _holder(thing: object, name: str = "", where: str = "") -> Holder:
    detail = ""
    if isinstance(thing, torch.Tensor):
        graph = " with grad_fn" if thing.grad_fn is not None else ""
        detail = f"{list(thing.shape)} {str(thing.dtype).removeprefix('torch.')}{graph}"
    elif isinstance(thing, types.FunctionType | types.MethodType | type):
        detail = _definition(thing)
    return Holder(kind=_type_name(thing), name=name, where=where, detail=detail)


def _type_name(thing: object) -> str:
    return "class" if isinstance(thing, type) else type(thing).__name__


def _definition(thing: object) -> str:
    """The thing's own name and where it is defined, for whatever can be called."""
    inner = thing.__func__ if isinstance(thing, types.MethodType) else thing
    if isinstance(inner, types.FunctionType):
        return f"{inner.__qualname__} ({Path(inner.__code__.co_filename).name}:{inner.__code__.co_firstlineno})"
    return inner.__qualname__ if isinstance(inner, type) else type(inner).__qualname__


def _module_place(variables: Mapping[str, object]) -> str:
    file, name = variables.get("__file__"), variables.get("__name__", "?")
    return f"{name} ({Path(file).name})" if isinstance(file, str) else str(name)


def _attributes(thing: object) -> dict[str, object]:
    # Not `vars`: a class may answer attribute reads with code of its own.
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _slots(owner: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for base in type(owner).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # never set
                    found.setdefault(name, slot.__get__(owner))
    return found


def _name_in(namespace: Mapping[str, object], value: object) -> str:
    return next((str(name) for name, candidate in list(namespace.items()) if candidate is value), "")


def _key_text(container: Mapping[object, object], held: object) -> str:
    key = next((key for key, value in list(container.items()) if value is held), None)
    # The repr of anything else may be long, or run code of the user's.
    plain = isinstance(key, str | int | float | tuple) and all(
        isinstance(part, str | int | float) for part in (key if isinstance(key, tuple) else ())
    )
    if not plain:
        return f"<{type(key).__name__}>"
    text = repr(key)
    return text if len(text) <= _MAX_KEY_CHARS else text[:_MAX_KEY_CHARS] + "..."


def _join_submodules(holders: Sequence[Holder]) -> list[Holder]:
    """`GPT 'model'`, then its submodule `Linear 'head'`, becomes `Linear 'model.head'`."""
    joined: list[Holder] = []
    for holder in holders:
        if joined and holder.where == _SUBMODULE:
            above = joined.pop()
            name = f"{above.name}.{holder.name}" if above.name else holder.name
            joined.append(replace(holder, name=name, where=above.where))
        else:
            joined.append(holder)
    return joined
