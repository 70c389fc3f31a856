"""Write out the calls that stand-ins replaced: the record of a step with every block in it."""

from __future__ import annotations

from collections import defaultdict

from lowtide.tracing.recorder import Life, Recorder
from lowtide.tracing.repeat_calls import CannotRepeatError, Position
from lowtide.tracing.segment_words import Procession, Role, RunRecord, Window, Words, agree


def unroll(
    recorder: Recorder, runs: list[RunRecord], windows: list[Window], first_event: int, first_op: int
) -> tuple[Recorder, int, int]:
    """A record in which every window is filled with what the block would have left there.

    Args:
        recorder: The record with the windows; its lives go into the new one and are changed.
        runs: The runs the windows belong to.
        windows: In order of time.
        first_event: An event outside the windows, and
        first_op: an op: both are returned as they are numbered in the new record.

    Raises:
        CannotRepeatError: The record does not bear it out that the blocks do the same.
    """
    writer = _Writer(recorder, runs)
    cursor = Position(0, 0, 0)
    for window in windows:
        writer.copy(cursor, window.start)
        writer.fill(window)
        cursor = window.stop
    writer.copy(cursor, Position.of(recorder))
    new_event = writer.new_events.get(first_event, len(writer.log))
    new_op = writer.new_ops.get(first_op, len(writer.record.op_names))
    return writer.finish(), new_event, new_op


class _Writer:
    """Builds the new record from the old, span by span."""

    def __init__(self, old: Recorder, runs: list[RunRecord]) -> None:
        self._old = old
        self._runs = {run.paths[0]: run for run in runs}
        replaced = [run for run in runs if any(map(run.is_replaced, range(len(run.turns))))]
        self._agreements = {run.paths[0]: agree(old, run) for run in replaced}
        self._gaps: dict[int, list[tuple[RunRecord, Procession]]] = defaultdict(list)
        for run in replaced:
            for procession in self._agreements[run.paths[0]].processions:
                self._gaps[procession.event].append((run, procession))
        self._made: dict[tuple[str, int, int, str], list[Life]] = {}
        """The lives of each filled window, by run, rank, turn and segment."""
        self.new_events: dict[int, int] = {}
        self.new_ops: dict[int, int] = {}
        self._more_uses: dict[Life, list[int]] = defaultdict(list)
        self.log: list[tuple[Life, bool]] = []
        self.record = Recorder()
        self.record.root, self.record.updater = old.root, old.updater

    def copy(self, start: Position, stop: Position) -> None:
        """A span in which everything was real."""
        old, new = self._old, self.record
        shift = len(new.op_names) - start.ops
        ops = slice(start.ops, stop.ops)
        for op in range(start.ops, stop.ops):
            self.new_ops[op] = op + shift
        new.op_names += old.op_names[ops]
        new.op_modules += old.op_modules[ops]
        new.op_sources += old.op_sources[ops]
        new.op_phases += old.op_phases[ops]
        new.op_seconds += old.op_seconds[ops]
        new.lives += old.lives[start.lives : stop.lives]
        for event in range(start.events, stop.events):
            entry, op, phase = old.log[event], old.log_ops[event] + shift, old.log_phases[event]
            self.new_events[event] = len(self.log)
            for run, procession in self._gaps.get(event, ()):
                deaths = self._deaths(run, procession)
                self.log += [(life, True) for life in deaths]
                new.log_ops += [op] * len(deaths)
                new.log_phases += [phase] * len(deaths)
            self.log.append((old.lives[entry if entry >= 0 else ~entry], entry < 0))
            new.log_ops.append(op)
            new.log_phases.append(phase)

    def _deaths(self, run: RunRecord, procession: Procession) -> list[Life]:
        ranks = range(2, len(run.paths) - 3)
        return [
            self._made[run.paths[0], rank, turn, segment][index]
            for rank in (ranks if procession.is_ascending else reversed(ranks))
            for _, turn, segment, index in procession.roles
        ]

    def fill(self, window: Window) -> None:
        """A window: what the block's alike did, in this block's names."""
        run = self._runs[window.run]
        words = self._agreements[window.run].words.get((window.turn, window.segment))
        if words is None:
            raise CannotRepeatError(f"{window.run}: there is no template for a {window.segment}")
        call, new = window.call, self.record
        path, base = run.paths[call.rank], len(new.op_names)
        new.op_names += words.names
        new.op_modules += [path + module if is_below else module for is_below, module in words.modules]
        new.op_sources += words.sources
        new.op_phases += words.phases
        new.op_seconds += words.seconds
        lives = [self._life(words, index, window, path, base) for index in range(len(words.lives))]
        self._made[window.run, call.rank, window.turn, window.segment] = lives
        new.lives += lives
        resolved: dict[Role, Life] = {}
        for role, op in words.uses:
            life = resolved.get(role) or resolved.setdefault(role, self._find(role, window, run))
            self._more_uses[life].append(base + op)
        real_frees = set()
        for role, is_free, op, phase in words.events:
            life = resolved.get(role) or resolved.setdefault(role, self._find(role, window, run))
            self.log.append((life, is_free))
            new.log_ops.append(base + op)
            new.log_phases.append(phase)
            if is_free and life.number >= 0:
                real_frees.add(life)
        self._check(window, real_frees)

    def finish(self) -> Recorder:
        """Number everything anew."""
        new = self.record
        for life in self._old.lives:
            life.uses = [self.new_ops[op] for op in life.uses if op in self.new_ops]
            life.born_op = self.new_ops.get(life.born_op, life.born_op)
        for life, more in self._more_uses.items():
            life.uses = sorted({*life.uses, *more})
        for number, life in enumerate(new.lives):
            life.number = number
        for event, (life, is_free) in enumerate(self.log):
            if is_free:
                life.died_event = event
            else:
                life.born_event, life.died_event = event, None
            new.log.append(~life.number if is_free else life.number)
        return new

    def _life(self, words: Words, index: int, window: Window, path: str, base: int) -> Life:
        described = words.lives[index]
        (
            nbytes,
            shape,
            dtype,
            (is_below, module),
            op,
            source,
            phase,
            born,
            category,
            in_recompute,
            is_logged,
            on_device,
        ) = described
        stand_in = window.call.stand_ins.get((window.segment, index))
        life = Life(
            number=-1,
            requested_bytes=nbytes,
            shape=shape,
            dtype=dtype,
            module=path + module if is_below else module,
            op=op,
            source=source,
            phase=phase,
            born_event=len(self.log),
            born_op=base + born,
            category=category,
            in_recompute=in_recompute,
            is_logged=is_logged,
            on_device=on_device,
        )
        if stand_in is None:
            return life
        real = self._old.lives[stand_in]
        if real.requested_bytes != nbytes:
            raise CannotRepeatError(f"{path}: a stand-in has {real.requested_bytes} bytes in place of {nbytes}")
        real.shape, real.dtype, real.module, real.op, real.source = shape, dtype, life.module, op, source
        real.phase, real.category, real.in_recompute = phase, category, in_recompute
        return real

    def _find(self, role: Role, window: Window, run: RunRecord) -> Life:
        """Whose role it is in this window."""
        call = window.call
        match role:
            case ("own", turn, segment, index):
                return self._made[window.run, call.rank, turn, segment][index]
            case ("weight", index):
                number = run.weights[call.rank][index]
            case ("input", index):
                number = call.inputs[index]
            case ("gradient",):
                number = call.gradient
            case (_, number):
                pass
        return self._old.lives[number]

    def _check(self, window: Window, expected: set[Life]) -> None:
        """In a window nothing real may happen but the deaths that the words tell of."""
        old, start, stop = self._old, window.start, window.stop
        entries = old.log[start.events : stop.events]
        died = {old.lives[~entry] for entry in entries if entry < 0}
        num_lives = stop.lives - start.lives
        num_stand_ins = sum(segment == window.segment for segment, _ in window.call.stand_ins)
        if stop.ops != start.ops or len(died) != len(entries) or died != expected or num_lives != num_stand_ins:
            path = self._runs[window.run].paths[window.call.rank]
            raise CannotRepeatError(f"{path}: tensors do not die in its {window.segment} as they should")
