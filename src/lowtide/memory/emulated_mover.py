"""The mover of an emulated device: both tiers are host memory, and every copy happens as late as it may.

A copy is put in its queue and runs when something that must come after it asks for it, in the order of its queue. So a
ticket that nobody waits for is a copy that has not happened, and its reader finds poison: what a GPU would do once in
a thousand steps happens here every time. With `eagerness` copies also run early, at random.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from lowtide.memory.chunk import POISON
from lowtide.memory.mover import MAX_KEPT_BYTES, Copied, Exchange, Ticket


class EmulatedTicket:
    """Done when the copy that it stands for has run; the computation itself runs at once, so its tickets are done."""

    def __init__(self, mover: EmulatedMover, *, is_done: bool = False) -> None:
        self._mover = mover
        self._is_done = is_done
        self._time_s = mover.clock_s() if is_done else 0.0

    def is_done(self) -> bool:
        """Whether the copy has run."""
        return self._is_done

    def wait(self) -> None:
        """Run the copies up to this one."""
        if not self._is_done:
            self._mover.run_until(self)

    def time_s(self) -> float:
        """When the copy ran, which it does now at the latest."""
        self.wait()
        return self._time_s

    def happen(self) -> None:
        """Called by the mover when the point is reached."""
        self._time_s = self._mover.clock_s()
        self._is_done = True


class ExchangeTicket:
    """Done when an exchange with other ranks is over."""

    def __init__(self, mover: EmulatedMover, exchange: Exchange) -> None:
        self._mover = mover
        self._exchange = exchange
        self._time_s: float | None = None

    def is_done(self) -> bool:
        """Whether it is over."""
        return self._exchange.is_done()

    def wait(self) -> None:
        """Wait for the other ranks."""
        self._exchange.wait()
        if self._time_s is None:
            self._time_s = self._mover.clock_s()

    def time_s(self) -> float:
        """When it was waited for, which it is now at the latest."""
        self.wait()
        assert self._time_s is not None
        return self._time_s


class _Copy:
    def __init__(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Ticket],
        started: EmulatedTicket,
        ended: EmulatedTicket,
    ) -> None:
        self.target, self.source, self.after = target, source, tuple(after)
        self.started, self.ended = started, ended


class EmulatedMover:
    """The mover of an emulated device. Thread-safe: host updates wait for tickets in their own thread.

    Args:
        max_kept_bytes: Sources of copies to the host that may wait on the device: beyond it the oldest copy runs.
        eagerness: Chance of running the oldest waiting copy at each call; 0 runs each as late as it may.
        seed: Seeds the chance.
    """

    def __init__(self, *, max_kept_bytes: int = MAX_KEPT_BYTES, eagerness: float = 0.0, seed: int = 0) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._started_s = time.perf_counter()
        self._lock = threading.RLock()
        self._queues: dict[str, deque[_Copy]] = {"to device": deque(), "to host": deque()}
        self._before_next_fetch: list[Ticket] = []
        self._eagerness, self._random = eagerness, random.Random(seed)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def clock_s(self) -> float:
        """Seconds since the mover was made."""
        return time.perf_counter() - self._started_s

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """Ordinary memory, poisoned."""
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Ordinary memory, poisoned."""
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Leave the buffer: a state dictionary that the user took may show it, and keeps it alive."""

    def grow(self, buffer: torch.Tensor) -> None:
        """Give the buffer memory full of poison."""
        storage = buffer.untyped_storage()
        assert storage.nbytes() == 0, "the buffer has memory already"
        storage.resize_(buffer.nbytes)
        buffer.fill_(POISON)

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """Poison the buffer and free it. Copies in `after` run first; any other copy that still reads the buffer fails later."""
        for ticket in after:
            ticket.wait()
        self._before_next_fetch.extend(after)
        buffer.fill_(POISON)
        buffer.untyped_storage().resize_(0)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Queue the copy."""
        with self._lock:
            after = [*after, *self._before_next_fetch]
            self._before_next_fetch.clear()
        return self._queue("to device", target, source, after)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """Queue the copy; the source stays on the device until it runs, whoever keeps it."""
        del keep
        copied = self._queue("to host", target, source, after)
        self.expect(0)
        return copied

    def all_to_host(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Sequence[Ticket] = ()
    ) -> Copied:
        """Queue the copies."""
        copies = [self.to_host(target, source, after) for target, source in zip(targets, sources, strict=True)]
        return Copied(copies[0].started, copies[-1].ended)

    def expect(self, num_bytes: int) -> None:
        """Run the oldest copies, if too many bytes would wait."""
        with self._lock:
            queue = self._queues["to host"]
            while queue and sum(copy.source.nbytes for copy in queue) + num_bytes > self._max_kept_bytes:
                self._run_first(queue)

    def queue(self) -> object:
        """None: the computation has a single queue."""
        return None

    def point_in(self, queue: object) -> EmulatedTicket:
        """The present point: computation on the host is done when it is queued."""
        del queue
        return self.now()

    def exchange(self, begin: Callable[[], Exchange], after: Sequence[Ticket]) -> Copied:
        """Run the copies that come first, and begin."""
        for ticket in after:
            ticket.wait()
        return Copied(self.now(), ExchangeTicket(self, begin()))

    def now(self) -> EmulatedTicket:
        """The computation runs at once: this point has been reached."""
        self._maybe_run_some()
        return EmulatedTicket(self, is_done=True)

    def compute_after(self, ticket: Ticket) -> None:
        """Run the copies up to the ticket, because the next operator may read their result."""
        ticket.wait()

    def drain(self) -> None:
        """Run all copies."""
        with self._lock:
            for queue in self._queues.values():
                while queue:
                    self._run_first(queue)

    def run_until(self, ticket: EmulatedTicket) -> None:
        """Run the copies of the ticket's queue up to it."""
        with self._lock:
            for queue in self._queues.values():
                if any(ticket in (copy.started, copy.ended) for copy in queue):
                    while not ticket.is_done():
                        self._run_first(queue)
                    return
            assert ticket.is_done(), "a ticket of another mover"

    def _queue(self, name: str, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket]) -> Copied:
        started, ended = EmulatedTicket(self), EmulatedTicket(self)
        with self._lock:
            self._queues[name].append(_Copy(target, source, after, started, ended))
        self._maybe_run_some()
        return Copied(started, ended)

    def _run_first(self, queue: deque[_Copy]) -> None:
        # Dependencies first: they may be in the other queue, and never behind this one in its own.
        copy = queue[0]
        for ticket in copy.after:
            ticket.wait()
        if not queue or queue[0] is not copy:
            return
        copy.started.happen()
        # torch would write to address 0, and take the process down with it.
        for tensor, what in ((copy.target, "to"), (copy.source, "from")) if not copy.ended.is_done() else ():
            assert tensor.untyped_storage().nbytes() or not tensor.numel(), f"a copy {what} memory that was released"
        if not copy.ended.is_done():
            with torch.no_grad():
                copy.target.copy_(copy.source)
        copy.ended.happen()
        # Not before: where an exception breaks this off, the copy is made again, and not forgotten.
        queue.popleft()

    def _maybe_run_some(self) -> None:
        if not self._eagerness:
            return
        with self._lock:
            for queue in self._queues.values():
                if queue and self._random.random() < self._eagerness:
                    self._run_first(queue)
