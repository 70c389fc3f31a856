"""The record of a block in words that fit every block that is alike.

Pure work on a finished record. A real block's part of it (a segment: its forward or its backward) is put into words that are
free of the block's name and of its tensors' numbers. Equal words from three blocks are the proof; read with another block's
names, they are what that block would have left.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from lowtide.tracing.recorder import Life, Recorder
from lowtide.tracing.repeat_calls import Call, CannotRepeatError, Position
from lowtide.tracing.step_trace import Phase

Role = tuple[Any, ...]
"""Who a storage is to a block: ("own", turn, segment, index), ("weight", k), ("input", k), ("gradient",) or ("other", number)."""
SEGMENTS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Window:
    """A replaced call's place in the record."""

    run: str
    turn: int
    call: Call
    segment: str

    @property
    def start(self) -> Position:
        """Where it begins."""
        begin = self.call.enter if self.segment == "forward" else self.call.begin
        assert begin is not None
        return begin

    @property
    def stop(self) -> Position:
        """Where it is over."""
        end = self.call.leave if self.segment == "forward" else self.call.end
        if end is None:
            raise CannotRepeatError(f"{self.run}: a backward has no end")
        return end


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run's calls, turn by turn."""

    paths: list[str]
    weights: list[list[int]]
    """For each block the numbers of its weights' lives."""
    turns: list[list[Call]]

    def is_replaced(self, turn: int) -> bool:
        """Whether the turn has stand-ins."""
        return any(call.is_repeated for call in self.turns[turn])


@dataclass(slots=True)
class Words:
    """A segment in words."""

    names: list[str]
    modules: list[tuple[bool, str]]
    """Whether below the block, and the path from there."""
    sources: list[str]
    phases: list[Phase | None]
    seconds: list[float]
    events: list[tuple[Role, bool, int, Phase | None]]
    """Whose, whether freed, during which op (-1: before the first), in which phase."""
    lives: list[tuple[Any, ...]]
    uses: list[tuple[Role, int]]


class _Reader:
    """Puts the segments of one real block into words."""

    def __init__(self, recorder: Recorder, run: RunRecord, rank: int, users: dict[int, list[Life]]) -> None:
        self._recorder = recorder
        self._path = run.paths[rank]
        self._users = users
        self._weights = {number: index for index, number in reversed(list(enumerate(run.weights[rank])))}
        self._calls = [calls[rank] if rank < len(calls) else None for calls in run.turns]
        self._own: dict[int, Role] = {}
        self.spans: list[tuple[Position, Position]] = []
        for turn, call in enumerate(self._calls):
            for segment in SEGMENTS:
                span = _span(call, segment)
                if span is not None:
                    self.spans.append(span)
                    for index, number in enumerate(range(span[0].lives, span[1].lives)):
                        self._own[number] = ("own", turn, segment, index)

    def read(self, turn: int, segment: str) -> Words | None:
        call = self._calls[turn]
        span = _span(call, segment)
        if call is None or span is None:
            return None
        start, stop = span
        recorder, ops = self._recorder, slice(start.ops, stop.ops)
        inputs = {number: index for index, number in reversed(list(enumerate(call.inputs)))}
        events = []
        for index in range(start.events, stop.events):
            entry = recorder.log[index]
            role = self._role(entry if entry >= 0 else ~entry, call, inputs, segment)
            events.append((role, entry < 0, recorder.log_ops[index] - start.ops, recorder.log_phases[index]))
        uses = [
            (self._role(life.number, call, inputs, segment), op - start.ops)
            for op in range(start.ops, stop.ops)
            for life in self._users.get(op, ())
        ]
        return Words(
            names=recorder.op_names[ops],
            modules=[self._relative(module) for module in recorder.op_modules[ops]],
            sources=recorder.op_sources[ops],
            phases=recorder.op_phases[ops],
            seconds=recorder.op_seconds[ops],
            events=events,
            lives=[self._describe(life, start) for life in recorder.lives[start.lives : stop.lives]],
            uses=sorted(uses, key=lambda use: (use[1], str(use[0]))),
        )

    def late_deaths(self, stand_ins: set[Role]) -> dict[int, Role]:
        """The events in which tensors that the block made, and that nobody stands in for, die outside its segments."""
        deaths: dict[int, Role] = {}
        for number, role in self._own.items():
            life = self._recorder.lives[number]
            if role in stand_ins:
                continue
            if not all(self._is_inside(op, 1) for op in life.uses):
                raise CannotRepeatError(
                    f"{self._path}: a tensor of {life.op} in {life.module} is used outside the block"
                )
            is_counted = life.on_device and life.requested_bytes and life.is_logged
            if is_counted and life.died_event is not None and not self._is_inside(life.died_event, 0):
                deaths[life.died_event] = role
        return deaths

    def _is_inside(self, index: int, axis: int) -> bool:
        return any(start[axis] <= index < stop[axis] for start, stop in self.spans)

    def _role(self, number: int, call: Call, inputs: dict[int, int], segment: str) -> Role:
        role = self._own.get(number)
        if role is not None:
            return role
        if number in self._weights:
            return "weight", self._weights[number]
        if number in inputs:
            return "input", inputs[number]
        if segment == "backward" and number == call.gradient:
            return ("gradient",)
        return "other", number

    def _relative(self, module: str) -> tuple[bool, str]:
        if module == self._path or module.startswith(f"{self._path}."):
            return True, module[len(self._path) :]
        return False, module

    def _describe(self, life: Life, start: Position) -> tuple[Any, ...]:
        return (
            life.requested_bytes,
            life.shape,
            life.dtype,
            self._relative(life.module),
            life.op,
            life.source,
            life.phase,
            life.born_op - start.ops,
            life.category,
            life.in_recompute,
            life.is_logged,
            life.on_device,
        )


def _span(call: Call | None, segment: str) -> tuple[Position, Position] | None:
    if call is None:
        return None
    start, stop = (call.enter, call.leave) if segment == "forward" else (call.begin, call.end)
    return None if start is None or stop is None else (start, stop)


@dataclass(frozen=True, slots=True)
class Procession:
    """Deaths of tensors that some holder outside the blocks lets go of, block after block (a cache of keys and values)."""

    event: int
    """Before which event of the record the deaths of the replaced blocks belong."""
    roles: tuple[Role, ...]
    """What each block loses, in order."""
    is_ascending: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the real blocks of a run have in common."""

    words: dict[tuple[int, str], Words]
    """By turn and segment."""
    processions: list[Procession]


def agree(recorder: Recorder, run: RunRecord) -> Agreement:
    """What the blocks that ran for real tell about those that were replaced.

    Raises:
        CannotRepeatError: They do not agree.
    """
    users: dict[int, list[Life]] = defaultdict(list)
    for life in recorder.lives:
        for op in life.uses:
            users[op].append(life)
    count = len(run.paths)
    readers = [_Reader(recorder, run, rank, users) for rank in (1, count - 3, count - 2)]
    words: dict[tuple[int, str], Words] = {}
    stand_ins: set[Role] = set()
    for turn, calls in enumerate(run.turns):
        if not run.is_replaced(turn):
            continue
        if len(calls) != count:
            raise CannotRepeatError(f"{run.paths[0]}: {len(calls)} of {count} blocks were called")
        for call in calls:
            stand_ins |= {("own", turn, segment, index) for segment, index in call.stand_ins}
        for segment in SEGMENTS:
            first, *others = (reader.read(turn, segment) for reader in readers)
            if any(other != first for other in others):
                raise CannotRepeatError(f"{run.paths[0]}: the {segment} of its blocks is not the same")
            if first is not None:
                words[turn, segment] = first
    deaths = [reader.late_deaths(stand_ins) for reader in readers]
    return Agreement(words, _processions(recorder, run.paths[0], *deaths))


def _processions(
    recorder: Recorder, path: str, first: dict[int, Role], middle: dict[int, Role], last: dict[int, Role]
) -> list[Procession]:
    """The deaths of block 1, N-3 and N-2 in events that follow each other directly, in this order or in the reverse one."""
    found: list[Procession] = []
    covered = 0
    for start in sorted(first):
        if start - 1 in first:
            continue
        size = next(n for n in range(1, len(first) + 1) if start + n not in first)
        for is_ascending in (True, False):
            begin = start if is_ascending else start - 2 * size
            order = (first, middle, last) if is_ascending else (last, middle, first)
            parts = [[part.get(begin + k * size + i) for i in range(size)] for k, part in enumerate(order)]
            events = range(max(begin, 0), begin + 3 * size)
            is_whole = None not in parts[0] and parts[0] == parts[1] == parts[2]
            if is_whole and len({(recorder.log_ops[event], recorder.log_phases[event]) for event in events}) == 1:
                gap = begin + size if is_ascending else start
                found.append(Procession(gap, tuple(role for role in parts[0] if role is not None), is_ascending))
                covered += size
                break
    if not covered == len(first) == len(middle) == len(last):
        raise CannotRepeatError(f"{path}: tensors outlive its blocks, and not in the blocks' order")
    return found
