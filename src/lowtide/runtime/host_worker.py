"""HostWorker: one thread for the work on the host that must not hold up the training loop.

Note [Which work comes first]
A job names what it comes after: copies to the host, and other jobs. Only of those for which all of that has happened is one
chosen; where there is none, the oldest is waited for. The loop runs ahead of the device and gives the updates of all layers
long before their gradients arrive: who chose among those too would wait for the gradients of the first layer, which come
last, while all others lie there. The oldest never waits for a job that has not run, since it was given after it.

Of those that can run, sums of gradients come before updates, and of the updates those whose weights the next forward needs
first. In a backward these are the last to arrive: where the host is slower than the device, the updates of the first layers
overtake those of the last ones, and what is left over at the end of the backward belongs to layers that the next forward
reaches late. With the same place in that order, first come, first served.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from lowtide import compat

BEFORE_UPDATES = -1
"""The place of what updates depend on."""


class Awaited(Protocol):
    """What a job can come after: a copy's ticket, or another job."""

    def is_done(self) -> bool:
        """Whether it has happened."""

    def wait(self) -> None:
        """Wait on the host until it has."""


class Job:
    """A piece of work in the worker's thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Wait for it; raises what it raised."""
        try:
            with compat.waiting():
                self._future.result()
        finally:
            del self  # as in `_run`: the error's traceback holds this frame


@dataclass(order=True)
class _Entry:
    place: int
    number: int
    work: Callable[[], None] = field(compare=False)
    after: tuple[Awaited, ...] = field(compare=False)
    lastly: Callable[[], None] = field(compare=False)
    future: Future[None] = field(compare=False)

    def can_run(self) -> bool:
        """Whether all that it comes after has happened, or failed: then waiting for it says how."""
        return all(map(_is_over, self.after))


def _is_over(awaited: Awaited) -> bool:
    """Each for itself: behind a copy that cannot be asked there may be a job that has not run, and to wait for that one in
    the thread that runs it would never end.
    """
    try:
        return awaited.is_done()
    except Exception:  # whatever a device that has failed raises; `_run` waits for it, and there it is told
        return True


def _run(after: tuple[Awaited, ...], work: Callable[[], None], lastly: Callable[[], None]) -> None:
    """No method of the entry, and with nothing left in its frame: an error's traceback holds the frame, the entry's future
    and that of a job before it hold their errors, and a cycle would keep what the error's other frames hold.
    """
    failed: Exception | None = None
    try:
        try:
            while after:
                try:
                    after[0].wait()
                except Exception as error:
                    failed = failed or error
                # The others too: a copy must not write to what is given back below.
                after = after[1:]
            if failed is not None:
                raise failed
            work()
        finally:
            lastly()
    finally:
        del after, work, lastly, failed


class _Queue:
    """What the thread holds: not the worker, so that a forgotten one ends it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.given: deque[_Entry] = deque()
        """In the order of their numbers; each may have to wait."""
        self.ready: list[_Entry] = []
        """A heap."""
        self.num_open = 0
        """Jobs that wait or run."""
        self.num_done = 0
        self.error: BaseException | None = None
        self.is_closed = False

    def close(self) -> None:
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()

    def choose(self) -> _Entry:
        """See Note [Which work comes first]. Copies to the host end in the order in which they were given, so that behind one
        that has not ended nobody is asked.
        """
        while self.given and self.given[0].can_run():
            heapq.heappush(self.ready, self.given.popleft())
        return heapq.heappop(self.ready) if self.ready else self.given.popleft()


def _work(queue: _Queue) -> None:
    while True:
        with queue.condition:
            while not (queue.given or queue.ready or queue.is_closed):
                queue.condition.wait()
            if not (queue.given or queue.ready):
                return
            entry = queue.choose()
        error: BaseException | None = None
        try:
            _run(entry.after, entry.work, entry.lastly)
        except BaseException as caught:
            error = caught
        with queue.condition:
            queue.error = queue.error or error
            queue.num_open -= 1
            queue.num_done += 1
            # Inside: who is told that a job is done finds the counts right.
            if error is None:
                entry.future.set_result(None)
            else:
                entry.future.set_exception(error)
            queue.condition.notify_all()
        # What the work holds must not outlive it until the next one comes.
        del entry, error


class HostWorker:
    """Runs jobs one after the other; see Note [Which work comes first].

    One thread is enough: kernels use the other cores from inside each job, and release the interpreter's lock while they
    run. A job that fails is reported by its own `wait`, and by the next `check`, whichever comes first.
    """

    def __init__(self) -> None:
        self._queue = _Queue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, _Queue.close, self._queue)
        _OPEN.add(self)

    def submit(
        self,
        work: Callable[[], None],
        *,
        after: Iterable[Awaited] = (),
        lastly: Callable[[], None] = lambda: None,
        place: int = BEFORE_UPDATES,
    ) -> Job:
        """Put work in the queue.

        Args:
            work: Runs in the worker's thread.
            after: What must have happened before it; jobs among these are this worker's. Where one failed it does not run.
            lastly: Runs there in any case, when all of these are over: gives back what the work was lent.
            place: That its weights have in the order of a forward.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._queue,), name="lowtide host worker", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        with self._queue.condition:
            self._queue.given.append(_Entry(place, next(self._numbers), work, tuple(after), lastly, future))
            self._queue.num_open += 1
            self._queue.condition.notify_all()
        return Job(future)

    def wait_for_one(self) -> bool:
        """Wait until a job that waits or runs has finished; False where there is none. For the thread that submits.

        Raises:
            Exception: What a job raised, this one or one before it.
        """
        queue = self._queue
        with queue.condition:
            if not queue.num_open:
                return False
            num_done = queue.num_done
            with compat.waiting():
                while queue.num_done == num_done:
                    queue.condition.wait()
        self.check()
        return True

    def check(self) -> None:
        """Raise what a job raised since the last call."""
        with self._queue.condition:
            error, self._queue.error = self._queue.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: a cycle would keep what the error's other frames hold

    def close(self) -> None:
        """Let the jobs finish and end the thread."""
        self._end()
        if self._thread is not None:
            with compat.waiting():
                self._thread.join()


_OPEN: weakref.WeakSet[HostWorker] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """A process that ends without closing its sessions finishes their updates: the kernels must not outlive Python."""
    for worker in list(_OPEN):
        worker.close()
