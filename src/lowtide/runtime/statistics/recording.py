"""Recorder: what the session did, as tickets while it runs and as plain data when somebody asks.

Reading the time of a CUDA event waits for it, so nothing is read while training goes on: sums are kept as counts, and
spans as pairs of tickets of the last steps.

`PhaseClock` says to which phase of a step the time of the training loop belongs. Phases follow each other without gaps:
each begins where the one before it ends, so that together they are the time from the first to the last of these marks.
A mark is one ticket of the mover: the host's clock, read in the loop's thread, on an emulated device; an event on the
computation's stream on CUDA. Nothing waits for an event before somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from lowtide import compat
from lowtide.memory.chunk import Chunk, ChunkState, StoredGroup
from lowtide.memory.mover import Copied, Mover, Ticket
from lowtide.planning.timeline import WAIT_PREFIX, Lane, LaneSpan, Reason, ResidencySpan, Timeline
from lowtide.runtime.statistics.session_stats import MovedRow, PhaseSeconds

KEPT_STEPS = 3
"""Steps whose spans are kept: enough to see a whole cycle, little enough to forget."""

_REASONS = {"weights": Reason.FETCH_WEIGHTS, "write back": Reason.WRITE_BACK, "upload": Reason.UPLOAD}
_LANES = {
    Reason.FETCH_WEIGHTS: Lane.TO_DEVICE,
    Reason.UPLOAD: Lane.TO_DEVICE,
    Reason.WRITE_BACK: Lane.TO_HOST,
    Reason.GRADIENTS: Lane.TO_HOST,
    Reason.OFFLOAD: Lane.TO_HOST,
    Reason.BRING_BACK: Lane.TO_DEVICE,
    Reason.PAGE_IN: Lane.TO_DEVICE,
    Reason.PAGE_OUT: Lane.TO_HOST,
}


_Span = tuple[int, Lane, str, str, Ticket, tuple[Ticket, ...], int, Reason | None]
"""Step, lane, name, phase, where it started, what it ended with, bytes and reason. Bare tuples, because a window makes several:
the constructor of a named one is a call, and that of a dataclass takes ten times as long."""
_Presence = tuple[int, Chunk, Ticket, Ticket]
"""Step, chunk, and where its stay on the device began and ended."""


class Recorder:
    """Gathers what happens. Host jobs report from their own thread."""

    def __init__(self, mover: Mover) -> None:
        self.phases = PhaseClock(mover)
        """Where the time of the loop goes. Spans cannot tell: modules lie inside others, and lanes run side by side."""
        self.step = 0
        """Counts forwards of the whole model: what the spans are numbered by."""
        self.num_updates = 0
        """Counts calls of `optimizer.step`."""
        self.phase = "forward"
        """The phase to which new spans belong."""
        self._spans: deque[_Span] = deque()
        self._host_spans: deque[LaneSpan] = deque()
        self._presences: deque[_Presence] = deque()
        self._present: dict[str, tuple[Chunk, Ticket]] = {}
        self._moved: defaultdict[Reason, list[int]] = defaultdict(lambda: [0, 0])
        self._waited_s = 0.0
        self._host_update_s = 0.0
        self._step_at_update = -1
        self._backwards_at_update = 0
        self._lock = threading.Lock()

    # -- told by the store ---------------------------------------------------------------------------------------------

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        """A copy of a chunk's weights."""
        self._copy(chunk.spec.name, copied, _REASONS[reason], chunk.spec.nbytes)

    def on_gradient(self, chunk: Chunk, copied: Copied, num_bytes: int, *, num_copies: int = 1) -> None:
        """Copies of gradients to the host, one after the other."""
        self._copy(chunk.spec.name, copied, Reason.GRADIENTS, num_bytes, num_copies)

    def on_activation(self, copied: Copied, reason: Reason, num_bytes: int) -> None:
        """A copy of what a forward saved."""
        self._copy("activations", copied, reason, num_bytes)

    def on_state(self, copied: Copied, reason: Reason, num_bytes: int) -> None:
        """A copy of optimizer state."""
        self._copy("state", copied, reason, num_bytes)

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """The chunk has bytes on the device from here."""
        self._present[chunk.spec.name] = (chunk, at)

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        """The chunk has none from here."""
        known = self._present.pop(chunk.spec.name, None)
        if known is not None:
            self._presences.append((self.step, chunk, known[1], at))

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        """The computation reached this point and goes on when the copies are done."""
        ended = tuple([copy.ended for copy in copied])
        self._spans.append((self.step, Lane.COMPUTE, WAIT_PREFIX + group.name, self.phase, reached, ended, 0, None))

    # -- told by the session -------------------------------------------------------------------------------------------

    def on_compute(self, group: str, phase: str, started: Ticket, ended: Ticket) -> None:
        """The computation worked on a group."""
        self._spans.append((self.step, Lane.COMPUTE, group, phase, started, (ended,), 0, None))
        if phase == "update":
            self.phases.insert(phase, started, ended)

    def on_host_update(self, chunk: str, step: int, start_s: float, end_s: float, num_bytes: int) -> None:
        """The host updated a chunk."""
        with self._lock:
            self._host_update_s += max(0.0, end_s - start_s)
            self._host_spans.append(
                LaneSpan(
                    step=step,
                    lane=Lane.HOST_UPDATE,
                    name=chunk,
                    phase="update",
                    start_s=start_s,
                    end_s=max(start_s, end_s),
                    num_bytes=num_bytes,
                )
            )

    def count_update(self) -> None:
        """The optimizer has taken a step."""
        self.num_updates += 1
        self.forget_backward()
        if self._step_at_update == self.step:
            # The model itself is never called, only parts of it: nobody else would begin a step.
            self.begin_step()
        self._step_at_update = self.step

    def forget_backward(self) -> None:
        """What backwards have left was used, or given up."""
        self._backwards_at_update = self.phases.num_backwards

    @property
    def has_backward(self) -> bool:
        """Whether there was a backward since the last step of the optimizer."""
        return self.phases.num_backwards != self._backwards_at_update

    def begin_step(self) -> None:
        """A new step; what is older than the kept ones is forgotten."""
        self.step += 1
        oldest = self.step - KEPT_STEPS
        while self._spans and self._spans[0][0] < oldest:
            _, lane, name, _, started, ended, _, _ = self._spans.popleft()
            if lane is Lane.COMPUTE and name.startswith(WAIT_PREFIX):
                # Steps ago: its events have long passed, and reading them waits for nothing.
                self._waited_s += max([ticket.time_s() for ticket in ended]) - started.time_s()
        while self._presences and self._presences[0][0] < oldest:
            self._presences.popleft()
        with self._lock:
            while self._host_spans and self._host_spans[0].step < oldest:
                self._host_spans.popleft()

    # -- asked ---------------------------------------------------------------------------------------------------------

    def moved(self) -> tuple[MovedRow, ...]:
        """Bytes and copies since the start."""
        return tuple(
            MovedRow(direction=_LANES[reason].value, reason=reason, num_bytes=total, num_copies=count)
            for reason, (total, count) in self._moved.items()
        )

    def timeline(self, now: Ticket, *, is_emulated: bool, resident: Sequence[Chunk]) -> Timeline:
        """The spans of the last steps. Waits for what they stand for."""
        now_s = now.time_s()
        spans = [_lane_span(span) for span in self._spans]
        with self._lock:
            spans += self._host_spans
        stays = [(chunk, started.time_s(), ended.time_s()) for _, chunk, started, ended in self._presences]
        stays += [(chunk, at.time_s(), now_s) for chunk, at in self._present.values()]
        uses: dict[str, list[tuple[float, float]]] = {}
        for span in sorted(spans, key=lambda span: span.start_s):
            if span.lane is Lane.COMPUTE and span.waits_for is None:
                uses.setdefault(span.name, []).append((span.start_s, span.end_s))
        residency = [
            _residency(chunk, from_s, to_s, state)
            for chunk, start_s, end_s in stays
            for from_s, to_s, state in _split(start_s, max(start_s, end_s), uses.get(chunk.spec.group, ()))
        ]
        started_s = min((span.start_s for span in spans), default=0.0)
        residency += [_residency(chunk, started_s, max(now_s, started_s), "resident") for chunk in resident]
        return Timeline(spans=tuple(spans), residency=tuple(residency), is_emulated=is_emulated)

    def exposed_copy_s(self, timeline: Timeline) -> float:
        """Time of all steps in which compute stood still: that of the forgotten spans, and of the timeline's."""
        return self._waited_s + timeline.exposed_copy_s()

    def host_update_s(self) -> float:
        """Time of all steps in which the worker updated chunks on the host."""
        with self._lock:
            return self._host_update_s

    def _copy(self, name: str, copied: Copied, reason: Reason, num_bytes: int, num_copies: int = 1) -> None:
        total = self._moved[reason]
        total[0] += num_bytes
        total[1] += num_copies
        started, ended = copied
        self._spans.append((self.step, _LANES[reason], name, self.phase, started, (ended,), num_bytes, reason))


def _lane_span(span: _Span) -> LaneSpan:
    step, lane, name, phase, started, ended, num_bytes, reason = span
    start_s = started.time_s()
    return LaneSpan(
        step=step,
        lane=lane,
        name=name,
        phase=phase,
        start_s=start_s,
        end_s=max(start_s, *(ticket.time_s() for ticket in ended)),
        num_bytes=num_bytes,
        reason=reason,
    )


def _split(start_s: float, end_s: float, uses: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, str]]:
    """A stay on the device, cut where its group was in use; the uses are in the order of their start."""
    for use_start_s, use_end_s in uses:
        begin_s, finish_s = max(start_s, use_start_s), min(end_s, use_end_s)
        if finish_s <= begin_s:
            continue
        if begin_s > start_s:
            yield start_s, begin_s, "fetched"
        yield begin_s, finish_s, "in use"
        start_s = finish_s
    if end_s > start_s:
        yield start_s, end_s, "fetched"


def _residency(chunk: Chunk, start_s: float, end_s: float, state: str) -> ResidencySpan:
    return ResidencySpan(
        chunk=chunk.spec.name,
        group=chunk.spec.group,
        start_s=start_s,
        end_s=max(start_s, end_s),
        num_bytes=chunk.spec.nbytes,
        state=state,
    )


def is_resident(chunk: Chunk) -> bool:
    """Whether the chunk stays on the device."""
    return chunk.state is ChunkState.RESIDENT


REST = "rest"
"""What is none of the other three: data, a loss outside of the model, `zero_grad`, logging."""


class PhaseClock:
    """Told when phases begin and end; one may lie inside another, and time counts for the innermost."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._is_on_cuda = mover.device.type == "cuda"
        self._inside: list[str] = []
        self._backwards: Counter[int] = Counter()
        self.num_backwards = 0
        """Those that were noticed, since the beginning."""
        self._marks: deque[tuple[str, Ticket]] = deque()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._read_s: float | None = None
        # A model may be called from several threads, and autograd's reports the start of a backward.
        self._lock = threading.RLock()

    @property
    def phase(self) -> str:
        """The phase that the loop is in."""
        return self._inside[-1] if self._inside else REST

    def enter(self, phase: str) -> None:
        """A phase begins in the thread of the loop, where no backward is running: one that did has broken off."""
        with self._lock:
            if compat.backward_number() is None and self._backwards:
                self._backwards.clear()
                self._inside = [other for other in self._inside if other != "backward"]
            self._change([*self._inside, phase])

    def leave(self, phase: str) -> None:
        """A phase has ended, with every phase inside of it; the one around it goes on."""
        with self._lock:
            if phase in self._inside:
                last = len(self._inside) - 1 - self._inside[::-1].index(phase)
                self._change(self._inside[:last])

    def insert(self, phase: str, started: Ticket, ended: Ticket) -> None:
        """A phase inside of the present one is over: an update in a backward. Its tickets were taken anyway."""
        with self._lock:
            if phase != self.phase and not self._is_capturing():
                self._marks += [(phase, started), (self.phase, ended)]

    def backward_begins(self, number: int) -> None:
        """A backward was noticed; whoever calls this calls `backward_ends`, and the last of them ends it."""
        with self._lock:
            self._backwards[number] += 1
            if self._backwards[number] == 1:
                self.num_backwards += 1
                self._change([*self._inside, "backward"])

    def backward_ends(self, number: int) -> None:
        """See `backward_begins`. The end of a backward that was given up changes nothing."""
        with self._lock:
            if number not in self._backwards:
                return
            self._backwards[number] -= 1
            if not self._backwards[number]:
                del self._backwards[number]
                self.leave("backward")

    def is_in_backward(self) -> bool:
        """Whether this thread runs a backward that was noticed."""
        return bool(self._backwards) and compat.backward_number() in self._backwards

    def watch_backward(self, output: object) -> None:
        """A backward begins when it reaches what the model has returned. Costs one hook for each such tensor."""
        watch_nodes(output, self._on_output_gradient)

    def seconds(self) -> PhaseSeconds:
        """Time by phase up to the last mark: what is under way does not count. Waits for the marks."""
        with self._lock:
            while len(self._marks) > 1:
                self._read_first()
            return PhaseSeconds(**{f"{phase}_s": seconds for phase, seconds in self._sums.items()})

    def _on_output_gradient(self, gradients: object) -> None:
        del gradients
        number = compat.backward_number()
        if number is not None and number not in self._backwards:
            self.backward_begins(number)
            compat.call_after_backward(partial(self.backward_ends, number))

    def _change(self, inside: list[str]) -> None:
        before, self._inside = self.phase, inside
        if self.phase == before or self._is_capturing():
            return
        self._marks.append((self.phase, self._mover.now()))
        # Those that have passed are read without a wait, so that they do not pile up.
        while len(self._marks) > 2 and self._marks[1][1].is_done():
            self._read_first()

    def _is_capturing(self) -> bool:
        """Whether the work is written down for a CUDA graph, not done: events would say nothing, and asking is forbidden."""
        return self._is_on_cuda and torch.cuda.is_current_stream_capturing()

    def _read_first(self) -> None:
        phase, started = self._marks.popleft()
        from_s = started.time_s() if self._read_s is None else self._read_s
        # Streams that the user changes between marks may pass them in another order; the sum stays the whole.
        self._read_s = max(from_s, self._marks[0][1].time_s())
        self._sums[phase] += self._read_s - from_s


def watch_nodes(output: object, on_gradients: Callable[[Any], None]) -> None:
    """Call this with the gradients of each tensor in the output when a backward reaches it."""
    for tensor in compat.tensors_in(output):
        node = tensor.grad_fn if tensor.requires_grad else None
        if node is not None:
            # On the node, not on the tensor: torch warns of hooks when the user saves a tensor that has some.
            node.register_prehook(on_gradients)
