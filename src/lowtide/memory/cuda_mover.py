"""The mover of a CUDA device: two streams for copies beside the computation's, and events between them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from lowtide import compat
from lowtide.errors import BudgetError
from lowtide.memory.chunk import POISON
from lowtide.memory.mover import MAX_KEPT_BYTES, Copied, Exchange, Ticket
from lowtide.units import format_bytes

ORIGIN_LASTS_S = 60.0
"""Then fp32 milliseconds have a resolution of 4 microseconds."""


class Origin:
    """An event from which others are timed. CUDA gives differences as fp32 milliseconds, so that spans would lose their
    digits after hours: every so often a new origin is set, timed from the one before.
    """

    def __init__(self, stream: torch.cuda.Stream, before: Origin | None = None) -> None:
        if before is None:
            # Behind work that is still queued the event would happen long after the host's clock was read.
            stream.synchronize()
        self.event = compat.timed_event(stream)
        self.set_at_s = time.perf_counter()
        self._before = before
        self._time_s = 0.0

    @property
    def time_s(self) -> float:
        """Seconds from the first origin. Waits for the event."""
        if self._before is not None:
            self._time_s = self._before.time_of(self.event)
            self._before = None
        return self._time_s

    def time_of(self, event: compat.CudaEvent) -> float:
        """When another event happened, in seconds. Waits for it."""
        event.synchronize()
        return self.time_s + float(self.event.elapsed_time(event)) / 1000


class CudaTicket:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream, origin: Origin) -> None:
        self.event = compat.timed_event(stream)
        self._origin = origin

    def is_done(self) -> bool:
        """Whether the stream has passed the event."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Wait on the host."""
        self.event.synchronize()

    def time_s(self) -> float:
        """Seconds from the mover's start, by the device's clock."""
        return self._origin.time_of(self.event)


class CopyStart:
    """The point where a copy starts: when the last of the tickets before it has happened. It needs no event of its own."""

    def __init__(self, after: tuple[Ticket, ...]) -> None:
        self._after = after

    def is_done(self) -> bool:
        """Whether all of the tickets have happened."""
        return all(ticket.is_done() for ticket in self._after)

    def wait(self) -> None:
        """Wait on the host."""
        for ticket in self._after:
            ticket.wait()

    def time_s(self) -> float:
        """When the last of the tickets happened, in seconds."""
        return max(ticket.time_s() for ticket in self._after)


class CudaMover:
    """The mover of a CUDA device. It is made in the thread of the training loop, with that device current.

    Args:
        device: The CUDA device.
        max_kept_bytes: Sources of copies to the host that may wait; beyond it the computation waits for the oldest.
        poison: Fill memory with NaN when it comes and when it goes: a missing event then shows in the loss.
    """

    def __init__(self, device: torch.device, *, max_kept_bytes: int = MAX_KEPT_BYTES, poison: bool = False) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._device = device
        self._poison = poison
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._between = torch.cuda.Stream(device)
        """For exchanges with other ranks."""
        self._index = self._in.device_index
        self._origin = Origin(torch.cuda.current_stream(device))
        self._last_out = CudaTicket(self._out, self._origin)
        """Where the last copy to the host ends."""
        self._locked: dict[int, weakref.finalize[[int], torch.Tensor]] = {}
        self._before_next_fetch: list[Ticket] = []
        # Activations come back in autograd's thread, beside what the session moves.
        self._lock = threading.Lock()
        self._kept: deque[tuple[CudaTicket, tuple[torch.Tensor, ...]]] = deque()
        self._kept_bytes = 0

    @property
    def device(self) -> torch.device:
        """The CUDA device."""
        return self._device

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory from the copy stream's own pool, which no activation ever uses."""
        with compat.OnStream(self._in):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # Under deterministic algorithms torch fills new memory, on the stream where it was taken.
        self._current().wait_stream(self._in)
        return buffer

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Locked memory of exactly this size: torch's own locked allocations are rounded up to a power of two."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if num_bytes and (fault := compat.lock_host_memory(buffer)):
            raise BudgetError(
                f"{format_bytes(num_bytes)} of host memory could not be locked for copies ({fault}); "
                "give a smaller pinned_memory, or keep more groups resident",
                tier="pinned",
                needed_bytes=num_bytes,
                free_bytes=0,
                budget_bytes=0,
            )
        if num_bytes:
            # A session that is forgotten without an end must not leave memory locked that is no longer its own.
            unlock = weakref.finalize(buffer, compat.unlock_host_memory, buffer.data_ptr())
            unlock.atexit = False  # the driver is gone by then, and the memory with the process
            self._locked[buffer.data_ptr()] = unlock
        return buffer

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Unlock the buffer."""
        unlock = self._locked.pop(buffer.data_ptr(), None) if buffer.numel() else None
        if unlock is not None:
            unlock()

    def grow(self, buffer: torch.Tensor) -> None:
        """Take memory from the same pool."""
        with compat.OnStream(self._in):
            buffer.untyped_storage().resize_(buffer.nbytes)
            if self._poison:
                self._pass_barrier()
                buffer.fill_(POISON)

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """Free the memory. Its next use comes after `after`."""
        with self._lock:
            self._before_next_fetch.extend(after)
        with compat.OnStream(self._in):
            # Before the memory goes, not with the next copy: the allocator may give it back to the system at any time,
            # and waits for this stream alone then.
            self._pass_barrier()
            if self._poison:
                buffer.fill_(POISON)
            buffer.untyped_storage().resize_(0)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Copy on the stream of copies to the device."""
        with compat.OnStream(self._in), torch.no_grad():
            self._pass_barrier()
            for ticket in after:
                _event(ticket).wait(self._in)
            started = CudaTicket(self._in, self._origin)
            target.copy_(source, non_blocking=True)
            return Copied(started, CudaTicket(self._in, self._origin))

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """Copy on the stream of copies to the host, after all that the computation was told so far."""
        return self._to_host((target,), (source,), after, keep=keep)

    def all_to_host(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Sequence[Ticket] = ()
    ) -> Copied:
        """See `GradientCarrier`."""
        return self._to_host(targets, sources, after, keep=True)

    def exchange(self, begin: Callable[[], Exchange], after: Sequence[Ticket]) -> Copied:
        """Begin it on a stream of its own, which waits for the end: NCCL works on a stream that follows the current one."""
        for ticket in after:
            _event(ticket).wait(self._between)
        with compat.OnStream(self._between):
            started = CudaTicket(self._between, self._origin)
            begin().wait()
            return Copied(started, CudaTicket(self._between, self._origin))

    def expect(self, num_bytes: int) -> None:
        """Make the computation wait for the oldest copies, if too many bytes would wait."""
        while self._kept and self._kept_bytes + num_bytes > self._max_kept_bytes:
            self._forget_oldest()

    def queue(self) -> object:
        """The current stream."""
        return self._current()

    def point_in(self, queue: object) -> CudaTicket:
        """An event on that stream."""
        assert isinstance(queue, torch.cuda.Stream)
        return CudaTicket(queue, self._origin)

    def _to_host(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: Sequence[Ticket],
        *,
        keep: bool,
    ) -> Copied:
        for ticket in after:
            _event(ticket).wait(self._out)
        with compat.OnStream(self._out), torch.no_grad():
            # The start needs no event of its own: it is the later of the previous copy's end and `after`.
            started = CopyStart((self._last_out, *after)) if after else CudaTicket(self._out, self._origin)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            ended = self._last_out = CudaTicket(self._out, self._origin)
        if keep:
            self._keep(ended, tuple(sources))
        return Copied(started, ended)

    def now(self) -> CudaTicket:
        """An event on the current stream."""
        if time.perf_counter() - self._origin.set_at_s > ORIGIN_LASTS_S:
            # Read now, long after it has passed: origins that nobody asks about would form a chain without end.
            self._origin.time_s  # noqa: B018  # a property that computes once
            self._origin = Origin(self._current(), self._origin)
        return CudaTicket(self._current(), self._origin)

    def compute_after(self, ticket: Ticket) -> None:
        """Make the current stream wait."""
        _event(ticket).wait(self._current())

    def drain(self) -> None:
        """Wait for both streams, and for the computation: memory of the copy stream's pool that it reads may go next."""
        self._current().synchronize()
        self._in.synchronize()
        self._out.synchronize()
        self._between.synchronize()
        self._kept.clear()
        self._kept_bytes = 0

    def _current(self) -> torch.cuda.Stream:
        return compat.current_stream(self._index)

    def _pass_barrier(self) -> None:
        with self._lock:
            tickets, self._before_next_fetch = self._before_next_fetch, []
        for ticket in tickets:
            _event(ticket).wait(self._in)

    def _keep(self, ended: CudaTicket, sources: tuple[torch.Tensor, ...]) -> None:
        # A source belongs to the computation's stream: freed before the copy has read it, the computation would
        # write over it. If too many bytes wait, the computation waits for the oldest copy, and the host does not.
        self._kept.append((ended, sources))
        self._kept_bytes += sum(source.nbytes for source in sources)
        while self._kept and (self._kept[0][0].is_done() or self._kept_bytes > self._max_kept_bytes):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        ticket, oldest = self._kept.popleft()
        self.compute_after(ticket)
        self._kept_bytes -= sum(source.nbytes for source in oldest)


def _event(ticket: Ticket) -> compat.CudaEvent:
    assert isinstance(ticket, CudaTicket), "a ticket of another mover"
    return ticket.event
