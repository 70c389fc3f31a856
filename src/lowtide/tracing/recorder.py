"""StorageRecorder: who allocated what, when, for which module, and when it was freed.

The mode that watches operators (ghost or real) tells the recorder of every operator and every new storage; the storages
tell of their own death through a weak reference. The recorder never holds a tensor. Roles say which tensors are weights,
optimizer state and gradients, and under which module's name: the prediction and the observation of a real step must call
the same bytes by the same name, or no comparison of the two would mean anything.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.tracing.step_trace import Category, Phase, Work

_OWN = str(Path(__file__).parent)
_STEP = str(Path(__file__).with_name("training_step.py"))
_POLICIES = str(Path(_OWN).parent / "activations" / "policy_call.py")
_SKIPPED = (str(Path(torch.__file__).parent), _OWN, _POLICIES, "<")
"""Frames of torch, of the tracer and of what takes a group's calls say nothing about the user's model."""
PLUMBING = (
    _OWN,
    *(str(Path(torch.__file__).parent / part) for part in ("utils/_python_dispatch.py", "_dynamo", "_compile.py")),
)
"""Frames between an operator and the mode that sees it."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor is for."""

    category: Category
    module: str
    op: str
    """Stands where an operator's name would: `parameter weight`, `state exp_avg`."""


BATCH = Role(Category.ACTIVATIONS, "(batch)", "batch")


def weight_roles(model: nn.Module, root: str) -> Iterator[tuple[Tensor, Role]]:
    """Every parameter and buffer; a tied one once for each name, so that the last name stands.

    Args:
        model: The model.
        root: Stands for the outermost module, whose own path is empty.
    """
    for path, module in model.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensor, Role(Category.WEIGHTS, path or root, f"{kind} {name}")


def state_roles(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Tensor, Role]]:
    """Every tensor that the optimizer keeps for a parameter, under the name of the parameter's module."""
    if optimizer is None:
        return
    paths = {id(parameter): name.rpartition(".")[0] or name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        module = paths.get(id(parameter), type(optimizer).__name__)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                yield value, Role(Category.OPTIMIZER, module, f"state {name}")


@dataclass(slots=True, eq=False)
class Life:
    """One storage from birth to death; mutable while the trace runs."""

    number: int
    requested_bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    op: str
    source: str
    phase: Phase | None
    born_event: int
    born_op: int
    category: Category | None = None
    """Set when known by role (a weight, a gradient...); the rest is told apart by when it dies."""
    in_recompute: bool = False
    is_logged: bool = True
    died_event: int | None = None
    on_device: bool = True
    stream: int = 0
    """Whose pool of the allocator it comes from."""
    version: int = 0
    """Counts writes, so that values computed ahead are not believed after them."""
    content: Any = None
    """Values of the whole storage and their dtype, where known (see `ghost.tensor`)."""
    content_version: int = 0
    """The version they belong to."""
    uses: list[int] = field(default_factory=list)
    reference: weakref.ref[torch.UntypedStorage] | None = None

    def take_role(self, role: Role) -> None:
        """The storage is a weight, optimizer state, a gradient or the batch: take that category and name."""
        self.category = role.category
        self.rename(role.module, role.op)

    def rename(self, module: str, op: str, source: str | None = None) -> None:
        """Change who made it; None leaves the line of code as it is."""
        self.module, self.op = module, op
        self.source = self.source if source is None else source

    def classify(self, category: Category) -> None:
        """Say what it is for."""
        self.category = category

    def describe(self, shape: tuple[int, ...], dtype: str) -> None:
        """Give it the form of a tensor in it."""
        self.shape, self.dtype = shape, dtype

    def mark_recomputed(self) -> None:
        """A forward made it that runs again in the backward."""
        self.in_recompute = True

    @property
    def is_counted(self) -> bool:
        """Whether it takes memory of the device, and its allocation is in the log."""
        return self.on_device and self.is_logged and self.requested_bytes > 0

    @property
    def known_content(self) -> Any:
        """The content, unless it has been written over; None where it is not known."""
        return self.content if self.content_version == self.version else None

    def write(self, content: Any) -> None:
        """The storage is written to; `content` is its new content, None if that is not known."""
        self.version += 1
        self.fill(content)

    def fill(self, content: Any) -> None:
        """The content of the storage becomes known."""
        self.content, self.content_version = content, self.version


class StorageRecorder:
    """The growing record of a run: operators, and storages from birth to death.

    Args:
        root: Stands for the outermost module, whose own path is empty.
        updater: Name of the optimizer: the "module" of what an update allocates.
    """

    def __init__(self, root: str = "", updater: str = "") -> None:
        self.phase: Phase | None = None
        """The running phase; None while the model and the batch are being placed."""
        self.lives: list[Life] = []
        self.log: list[int] = []
        """Life number for an allocation, its complement for a free."""
        self.log_ops: list[int] = []
        self.log_phases: list[Phase | None] = []
        # Columns, not records: the collector would look through an object for each operator again and again.
        self.op_names: list[str] = []
        self.op_modules: list[str] = []
        self.op_sources: list[str] = []
        self.op_phases: list[Phase | None] = []
        self.op_seconds: list[float] = []
        self.op_works: list[Work | None] = []
        self.root, self.updater = root, updater
        self._is_detailed = True
        self._is_closed = False
        self._forward_stacks: dict[int, list[str]] = {}
        self._loss_start: tuple[int, int] | None = None
        self._forward_nodes: dict[int, tuple[str, str]] = {}
        self._rerun_nodes: dict[tuple[int, int], tuple[str, str]] = {}
        """By the thread too: a device's backward has its own thread, and each thread numbers its nodes from 0."""
        self._outer_backward: int | None = None

    def name_after(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The outermost module and the update go by the names of these classes."""
        self.root = type(model).__name__
        self.updater = type(optimizer).__name__ if optimizer is not None else ""

    def begin_step(self, *, is_detailed: bool) -> tuple[int, int]:
        """A step begins; returns the numbers of its first event and its first op.

        Details are the lines of code, which take time to find: a warm-up step, which is not shown, goes without.
        """
        self._is_detailed = is_detailed
        return len(self.log), len(self.op_names)

    def close(self) -> None:
        """The run is over: what the garbage collector finds later belongs to no step."""
        self._is_closed = True
        for life in self.lives:
            life.reference = None  # its callback holds the recorder

    def enter_module(self, path: str) -> None:
        """A module's forward begins (also during a recomputation, in the backward's thread)."""
        self._forward_stacks.setdefault(threading.get_ident(), []).append(path or self.root)

    def leave_module(self, *, has_weights: bool = False) -> None:
        """The innermost module's forward ends."""
        stack = self._forward_stacks[threading.get_ident()]
        stack.pop()
        if has_weights and stack and self.phase is Phase.FORWARD:
            self._loss_start = (len(self.log), len(self.op_names))

    def begin_phase(self, phase: Phase) -> None:
        """A phase of the step begins.

        A model that computes its loss itself does so after the last of its modules that has weights: what came after
        that is called loss when the forward has ended.
        """
        if self.phase is Phase.FORWARD and phase is not Phase.FORWARD and self._loss_start is not None:
            event, op = self._loss_start
            self.log_phases[event:] = [Phase.LOSS] * (len(self.log) - event)
            self.op_phases[op:] = [Phase.LOSS] * (len(self.op_names) - op)
            for life in reversed(self.lives):
                if life.born_op < op:
                    break
                life.phase = Phase.LOSS
        self._loss_start = None
        self._outer_backward = None
        self.phase = phase

    @property
    def module(self) -> str:
        """Path of the innermost module whose forward runs in this thread."""
        return self._stack[-1] if self._stack else self.root

    @property
    def _stack(self) -> list[str]:
        return self._forward_stacks.get(threading.get_ident(), [])

    def begin_op(self, name: str) -> int:
        """An operator runs; returns its number."""
        return self.add_op(name, *self._place())

    def add_op(self, name: str, module: str, source: str) -> int:
        """An operator runs that belongs to a module and a line; returns its number."""
        self.op_names.append(name)
        self.op_modules.append(module)
        self.op_sources.append(source)
        self.op_phases.append(self.phase)
        self.op_seconds.append(0.0)
        self.op_works.append(None)
        return len(self.op_names) - 1

    def locate_op(self, op: int, source: str) -> None:
        """The line of an operator is known only now."""
        self.op_sources[op] = source

    def time_op(self, seconds: float, work: Work) -> None:
        """How long the running operator takes, and what for."""
        self.op_seconds[-1], self.op_works[-1] = seconds, work

    def _place(self) -> tuple[str, str]:
        """The module and the source line the running operator belongs to."""
        stack = self._stack
        if self.phase is Phase.UPDATE:
            return self.updater, self.line() if self._is_detailed else ""
        if self.phase is Phase.BACKWARD and not stack:
            node = compat.current_node_number()
            if node is not None:
                return self._place_of_node(node)
        place = (stack[-1] if stack else self.root), self.line() if self._is_detailed else ""
        # The node of this operator was numbered just before the operator was dispatched.
        # An operator without a node of its own finds its predecessor's number there: the first one to claim it is right.
        number = compat.next_node_number() - 1
        if self.phase is Phase.BACKWARD:
            self._rerun_nodes.setdefault((threading.get_ident(), number), place)
        elif self.phase is not None:
            self._forward_nodes.setdefault(number, place)
        return place

    def _place_of_node(self, node: int) -> tuple[str, str]:
        """The module and the line of the operator that made the node which runs.

        What a backward runs again has nodes that only a backward inside of it runs.
        """
        backward = compat.backward_number()
        if self._outer_backward is None:
            self._outer_backward = backward
        rerun = self._rerun_nodes.get((threading.get_ident(), node))
        if rerun is not None and (backward != self._outer_backward or node not in self._forward_nodes):
            return rerun
        return self._forward_nodes.get(node, (self.root, ""))

    def line(self) -> str:
        """`file.py:line` of the innermost frame that is neither torch's nor the tracer's; "" where there is none."""
        return users_line((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))

    def allocate(
        self,
        nbytes: int,
        shape: tuple[int, ...],
        dtype: str,
        *,
        storage: torch.UntypedStorage | None = None,
        category: Category | None = None,
        on_device: bool = True,
        is_logged: bool = True,
        stream: int = 0,
    ) -> Life:
        """A storage is born in the running operator. Without `storage`, the caller frees it by hand.

        One that is not logged costs nothing until `log_birth`: a model is unpacked in one order and placed in another.
        """
        op = len(self.op_names) - 1
        life = Life(
            number=len(self.lives),
            requested_bytes=nbytes,
            shape=shape,
            dtype=dtype,
            module=self.op_modules[op] if op >= 0 else "",
            op=self.op_names[op] if op >= 0 else "",
            source=self.op_sources[op] if op >= 0 else "",
            phase=self.phase,
            born_event=len(self.log),
            born_op=op,
            category=category,
            is_logged=is_logged,
            in_recompute=self.phase is Phase.BACKWARD and bool(self._stack),
            on_device=on_device,
            stream=stream,
        )
        self.lives.append(life)
        if life.is_counted:
            self._append(life.number)
        if storage is not None:
            self.follow(life, storage)
        return life

    def follow(self, life: Life, storage: torch.UntypedStorage) -> None:
        """The life ends when this storage does, and no longer with the one it began with."""
        life.reference = weakref.ref(storage, lambda _: self.free(life))

    def free(self, life: Life) -> None:
        """A storage was freed: end its life."""
        if life.died_event is None and not self._is_closed:
            life.died_event = len(self.log)
            if life.is_counted:
                self._append(~life.number)

    def end(self, life: Life) -> None:
        """A life ends though its storage lives on, with other memory."""
        life.reference = None
        self.free(life)

    def log_birth(self, life: Life) -> None:
        """The allocation of a storage that was made without one."""
        if not life.is_logged and life.on_device and life.requested_bytes:
            life.is_logged, life.born_event = True, len(self.log)
            self._append(life.number)

    def _append(self, entry: int) -> None:
        self.log.append(entry)
        self.log_ops.append(len(self.op_names) - 1)
        self.log_phases.append(self.phase)

    def use(self, life: Life, op: int) -> None:
        """An operator reads or writes a storage."""
        if not life.uses or life.uses[-1] != op:
            life.uses.append(op)


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """`file.py:line` of the innermost frame that is neither torch's nor the tracer's; "" where there is none.

    Args:
        frames: File and line of each, the innermost first.
    """
    for file, line in frames:
        if file == _STEP:
            break  # what called the step is not part of it
        if not file.startswith(_SKIPPED):
            return f"{file.rsplit('/', 1)[-1]}:{line}"
    return ""
