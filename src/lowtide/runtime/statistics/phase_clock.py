"""PhaseClock: to which phase of a step each moment of the training loop belongs.

Phases follow each other without gaps: each begins where the one before it ends, so that together they are the time from
the first to the last of these marks. A mark is one ticket of the mover: the host's clock, read in the loop's thread, on
an emulated device; an event on the computation's stream on CUDA. Nothing waits for an event before somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lowtide import compat
from lowtide.activations.group_call import tensors_in
from lowtide.memory.mover import Mover, Ticket
from lowtide.runtime.statistics.session_stats import PhaseSeconds

REST = "rest"
"""What is none of the other three: data, a loss outside of the model, `zero_grad`, logging."""


class PhaseClock:
    """Told when phases begin and end; one may lie inside another, and time counts for the innermost."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._is_on_cuda = mover.device.type == "cuda"
        self._inside: list[str] = []
        self._backwards: Counter[int] = Counter()
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
        """It has ended, and whatever was inside of it; the one around it goes on."""
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
                self._change([*self._inside, "backward"])

    def backward_ends(self, number: int) -> None:
        """See `backward_begins`. Of a backward that was given up, nothing happens."""
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
    for tensor in tensors_in(output):
        node = tensor.grad_fn if tensor.requires_grad else None
        if node is not None:
            # On the node, not on the tensor: torch warns of hooks when the user saves a tensor that has some.
            node.register_prehook(on_gradients)
