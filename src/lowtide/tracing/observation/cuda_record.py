"""Turn the profile of a real step into a recorder's log: phases, modules, lifetimes and roles by address.

An address names a block from its allocation to its free, so walking everything in order of time tells which block each
operator read, and which of them is a weight, a gradient or optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.tracing.assemble import MemoryLog
from lowtide.tracing.observation.profile import Change, Mark, ProfiledStep, Running, Touch
from lowtide.tracing.recorder import Life, Role, StorageRecorder
from lowtide.tracing.step_trace import Category, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block that was in use before the step."""

    address: int
    bytes: int
    requested_bytes: int
    role: Role
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the allocator's history knows it."""

    address: int
    bytes: int
    source: str


class StepRecord:
    """Walks a profile once and fills a recorder with it."""

    def __init__(self, recorder: StorageRecorder, blocks: list[Block], start_reserved_bytes: int) -> None:
        self.recorder = recorder
        self.memory = MemoryLog()
        self.num_unknown_frees = 0
        self._alive: dict[int, Life] = {}
        self._makers: dict[int, Running | None] = {}
        self._stacks: dict[int, list[str]] = {}
        self._forward_places: dict[int, tuple[str, Running]] = {}
        self._recompute_places: dict[tuple[int, int], tuple[str, Running]] = {}
        self._last_places: dict[int, tuple[str, Running | None]] = {}
        self._allocated = 0
        for block in blocks:
            life = self._begin(block.requested_bytes, block.bytes, block.address, start_reserved_bytes)
            life.take_role(block.role)
            life.describe(block.shape, block.dtype)
        self.first_event = len(recorder.log)

    def walk(self, profile: ProfiledStep, requests: list[Request] | None) -> None:
        """Take in all that happened.

        Args:
            profile: What the profiler saw.
            requests: The same allocations in the same order from the allocator's history; None where it has no such.
        """
        phases = phase_starts(profile.marks)
        waiting = iter(requests or ())
        items: list[Mark | Running | Touch | Change] = [
            *profile.marks,
            *profile.running,
            *profile.touches,
            *profile.changes,
        ]
        items.sort(key=lambda item: item.time_ns)
        next_phase = 0
        for item in items:
            while next_phase < len(phases) and phases[next_phase][0] <= item.time_ns:
                self.recorder.begin_phase(phases[next_phase][1])
                next_phase += 1
            match item:
                case Mark():
                    self._mark(item)
                case Running():
                    self._run(item)
                case Touch():
                    self._touch(item)
                case Change(bytes=size) if size > 0:
                    self._allocate(item, next(waiting, None))
                case Change():
                    self._free(item)

    def finish(self, roles: Mapping[int, Role]) -> None:
        """Give what is alive at the end and has no role yet the one of its address, and every life a shape."""
        for address, life in self._alive.items():
            role = roles.get(address)
            if role is not None and life.category is None:
                life.take_role(role)
        for life in self.recorder.lives:
            if not life.dtype:  # no operator ever read it
                life.describe((life.requested_bytes,), "uint8")

    def _mark(self, mark: Mark) -> None:
        stack = self._stacks.setdefault(mark.thread, [])
        if mark.kind == "enter":
            stack.append(mark.text or self.recorder.root)
        elif mark.kind == "leave" and stack:
            stack.pop()
        elif mark.kind == "gradient" and (life := self._alive.get(int(mark.text))) is not None:
            life.classify(Category.GRADIENTS)

    def _run(self, running: Running) -> None:
        module, maker = self._place(running)
        running.attribute_to(module, maker.source if maker is not None else "")
        phase = self.recorder.phase
        if running.sequence >= 0:
            # The last operator to start under a number is the one that makes the node.
            if phase is not Phase.BACKWARD:
                self._forward_places[running.sequence] = (module, running)
            elif self._stacks.get(running.thread):
                self._recompute_places[running.thread, running.sequence] = (module, running)
        if running.is_listed:
            number = self.recorder.add_op(running.name, module, running.source)
            assert running.number == number, "operators come in order of time"

    def _place(self, running: Running) -> tuple[str, Running | None]:
        """The module an operator belongs to, and the operator of the forward that it is the backward of."""
        stack = self._stacks.get(running.thread)
        if running.is_update or self.recorder.phase is Phase.UPDATE:
            return self.recorder.updater or self.recorder.root, None
        if stack:
            return stack[-1], None
        if self.recorder.phase is not Phase.BACKWARD or running.node is None:
            return self.recorder.root, None
        place: tuple[str, Running | None] | None = None
        if running.is_nested:
            place = self._recompute_places.get((running.thread, running.node))
        if place is None:
            place = self._forward_places.get(running.node)
        if place is None:
            # A node without a number accumulates a gradient, right after the node that made it.
            return self._last_places.get(running.thread, (self.recorder.root, None))
        self._last_places[running.thread] = place
        return place

    def _touch(self, touch: Touch) -> None:
        for address, shape, dtype in touch.tensors:
            life = self._alive.get(address)
            if life is None:
                continue
            if not life.dtype:
                life.describe(shape, dtype)
            self.recorder.use(life, touch.op.number)

    def _allocate(self, change: Change, request: Request | None) -> None:
        is_same = request is not None and request.address == change.address
        requested = request.bytes if request is not None and is_same else change.bytes
        life = self._begin(requested, change.bytes, change.address, change.reserved_bytes)
        op = change.op
        stack = self._stacks.get(change.thread)
        if self.recorder.phase is Phase.BACKWARD and stack:
            life.mark_recomputed()
        source = request.source if request is not None and is_same else ""
        if op is None:
            life.rename(stack[-1] if stack else self.recorder.root, change.inside, source)
        else:
            if source and not op.source:
                op.attribute_to(op.module, source)
                if op.is_listed:
                    self.recorder.locate_op(op.number, source)
            life.rename(op.module, op.name, op.source)
        self._makers[life.number] = op

    def _begin(self, requested: int, size: int, address: int, reserved: int) -> Life:
        life = self.recorder.allocate(requested, (), "")
        self.memory.block_bytes[life.number] = size
        self._alive[address] = life
        self._count(size, reserved)
        return life

    def _free(self, change: Change) -> None:
        life = self._alive.pop(change.address, None)
        if life is None:
            self.num_unknown_frees += 1
            return
        self.recorder.free(life)
        maker = self._makers.pop(life.number, None)
        if life.category is None and maker is not None and maker is change.op:
            life.classify(Category.WORKSPACE)  # never left the operator that made it: the kernel's own scratch
        self._count(-self.memory.block_bytes[life.number], change.reserved_bytes)

    def _count(self, change: int, reserved: int) -> None:
        self._allocated += change
        self.memory.allocated.append(self._allocated)
        self.memory.reserved.append(reserved)


def phase_starts(marks: list[Mark]) -> list[tuple[int, Phase]]:
    """When each phase begins, in ns.

    As in a prediction, a loss that a model computes itself begins where the last module with weights ended.
    """
    starts: list[tuple[int, Phase]] = []
    depths: dict[int, int] = {}
    loss_ns: int | None = None
    for mark in marks:
        phase = starts[-1][1] if starts else None
        depth = depths.get(mark.thread, 0)
        if mark.kind == "enter":
            depths[mark.thread] = depth + 1
        elif mark.kind == "leave":
            depths[mark.thread] = depth - 1
            if mark.text == "1" and depth > 1 and phase is Phase.FORWARD:
                loss_ns = mark.time_ns
        elif mark.kind == "phase":
            if phase is Phase.FORWARD and mark.text != Phase.FORWARD.value and loss_ns is not None:
                starts.append((loss_ns, Phase.LOSS))
            loss_ns = None
            starts.append((mark.time_ns, Phase(mark.text)))
    return starts
