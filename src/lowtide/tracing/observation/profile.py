"""The profiler's event tree, flattened into what a record of memory needs: marks, operators, and changes of memory.

The profiler notes each allocation with the true size of its block and what the allocator reserves after it, under the
operator that asked for it, in every thread. Phases, modules and gradients it does not know, so a step under observation
leaves marks for them in the same stream: empty ranges whose names say what happened.

Which operators count: the innermost that autograd knows of (`aten.addmm`, not `aten.linear` around it nor `aten.empty`
inside it), and in code without autograd the outermost. That is where a dispatch mode would see them, so the names are
those of a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.step_trace import Phase

_MARK = "lowtide."
_ENGINE = "autograd::engine::evaluate_function: "
_NOT_OPERATORS = ("autograd::", "torch::autograd::", "profiler::")


class Marks:
    """Leaves the marks; also remembers the last place for an error message, which needs no profiler."""

    def __init__(self) -> None:
        self._is_on = False
        self.phase: Phase | None = None
        self.last_module = ""

    @contextmanager
    def on(self) -> Iterator[None]:
        """While active, marks are left."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def begin_phase(self, phase: Phase) -> None:
        """Take what follows as part of the phase."""
        self.phase = phase
        self._leave(f"phase {phase.value}")

    def enter_module(self, path: str) -> None:
        """A module's forward begins."""
        self.last_module = path
        self._leave(f"enter {path}")

    def leave_module(self, *, has_weights: bool) -> None:
        """The innermost module's forward ends."""
        self._leave(f"leave {int(has_weights)}")

    def mark_gradient(self, gradient: Tensor) -> None:
        """A gradient is complete."""
        if self._is_on and gradient.layout is torch.strided:
            self._leave(f"gradient {gradient.untyped_storage().data_ptr()}")

    def _leave(self, text: str) -> None:
        if self._is_on:
            with torch.profiler.record_function(_MARK + text):
                pass


@dataclass(slots=True)
class Mark:
    """Something the step said about itself."""

    time_ns: int
    thread: int
    kind: str
    """`phase`, `enter`, `leave` or `gradient`."""
    text: str


@dataclass(slots=True, eq=False)
class Running:
    """One operator, or a range that made an autograd node."""

    time_ns: int
    thread: int
    name: str
    is_listed: bool
    """Whether it is an operator of the trace; the others only tell which module a node belongs to."""
    sequence: int
    """Number of the autograd node that it made or was about to make; -1 if none."""
    node: int | None
    """Number of the autograd node that it runs for in a backward, -1 for one without a number."""
    is_nested: bool
    """Whether that node runs inside another one: the backward of a reentrant checkpoint."""
    is_update: bool
    """Whether an optimizer's step called it."""
    number: int = -1
    """Position among the listed ones, in order of time."""
    module: str = ""
    source: str = ""

    def attribute_to(self, module: str, source: str) -> None:
        """Say which module and line of code the operator belongs to."""
        self.module, self.source = module, source


@dataclass(slots=True)
class Touch:
    """Tensors that an operator was given."""

    time_ns: int
    op: Running
    tensors: list[tuple[int, tuple[int, ...], str]]
    """Address of the storage, shape, dtype."""


@dataclass(slots=True)
class Change:
    """One allocation or free."""

    time_ns: int
    thread: int
    address: int
    bytes: int
    """Size of the block; negative for a free."""
    reserved_bytes: int
    op: Running | None
    inside: str
    """Name of the innermost range where no operator is known."""


@dataclass(slots=True)
class ProfiledStep:
    """Everything that happened, each list in order of time."""

    marks: list[Mark] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class _Context:
    """What surrounds an event."""

    op: Running | None = None
    inside: str = ""
    node: int | None = None
    is_nested: bool = False
    is_update: bool = False


def read_profile(roots: Iterable[Any], device: torch.device) -> ProfiledStep:
    """Flatten the event trees of a `compat.MemoryProfile`, keeping the changes of one device's memory."""
    profile = ProfiledStep()
    # On a stack of our own, because a deep model nests deeper than Python recurses.
    stack = [(root, _Context()) for root in roots]
    while stack:
        event, context = stack.pop()
        inner = _read(event, context, device, profile)
        stack.extend((child, inner) for child in event.children)
    for part in (profile.marks, profile.running, profile.touches, profile.changes):
        part.sort(key=lambda item: item.time_ns)
    listed = (running for running in profile.running if running.is_listed)
    for number, running in enumerate(listed):
        running.number = number
    return profile


def _read(event: Any, context: _Context, device: torch.device, profile: ProfiledStep) -> _Context:
    kind, details = event.tag.name, event.typed[1]
    if kind == "Allocation":
        if details.device == device:
            profile.changes.append(
                Change(
                    time_ns=event.start_time_ns,
                    thread=event.start_tid,
                    address=details.ptr,
                    bytes=details.alloc_size,
                    reserved_bytes=details.total_reserved,
                    op=context.op,
                    inside=context.inside,
                )
            )
        return context
    if kind != "TorchOp":
        return context
    name: str = event.name
    if name.startswith(_MARK):
        word, _, text = name.removeprefix(_MARK).partition(" ")
        profile.marks.append(Mark(event.start_time_ns, event.start_tid, word, text))
        return context
    if name.startswith(_ENGINE):
        inside, is_nested = name.removeprefix(_ENGINE).rpartition("::")[2], context.node is not None
        return replace(context, op=None, inside=inside, node=details.sequence_number, is_nested=is_nested)
    if name.startswith("Optimizer.step#"):
        return replace(context, op=None, inside=name, is_update=True)
    if context.op is not None:
        profile.touches.append(Touch(event.start_time_ns, context.op, list(_tensors(details.inputs))))
        return context
    if name.startswith(_NOT_OPERATORS):
        return context
    return _read_operator(event, context, profile)


def _read_operator(event: Any, context: _Context, profile: ProfiledStep) -> _Context:
    details = event.typed[1]
    is_operator = "::" in event.name
    is_composite = any(child.tag.name == "TorchOp" and child.typed[1].sequence_number >= 0 for child in event.children)
    running = Running(
        time_ns=event.start_time_ns,
        thread=event.start_tid,
        name=event.name.replace("::", "."),
        is_listed=is_operator and not is_composite,
        sequence=details.sequence_number,
        node=context.node,
        is_nested=context.is_nested,
        is_update=context.is_update,
    )
    profile.running.append(running)
    if running.is_listed:
        profile.touches.append(Touch(event.start_time_ns, running, list(_tensors(details.inputs))))
    return replace(context, op=running if running.is_listed else None, inside=running.name)


def _tensors(inputs: Iterable[Any]) -> Iterator[tuple[int, tuple[int, ...], str]]:
    for value in inputs:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif (address := getattr(value, "storage_data_ptr", None)) is not None:  # a tensor with memory
            yield address, tuple(value.sizes), str(value.dtype).removeprefix("torch.")
