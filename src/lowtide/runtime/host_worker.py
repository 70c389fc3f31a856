"""HostWorker: one thread for the work on the host that must not hold up the training loop.

Note [Which work comes first]
Sums of gradients come before updates, in the order in which they were given: updates read them. Of the updates, those come
first whose weights the next forward needs first. In a backward these are the last to arrive: where the host is slower
than the device, the updates of the first layers overtake those of the last ones, and what is left over at the end of the
backward belongs to layers that the next forward reaches late. With the same place in that order, first come, first served.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from lowtide import compat

BEFORE_UPDATES = -1
"""The place of what updates depend on."""


class Job:
    """A piece of work in the worker's thread."""

    def __init__(self, future: Future[None], place: int = BEFORE_UPDATES) -> None:
        self._future = future
        self.place = place
        """In the queue: another job may wait for this one from inside only if it comes later."""

    def is_done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Wait for it; raises what it raised."""
        with compat.waiting():
            self._future.result()


@dataclass(order=True)
class _Entry:
    place: int
    number: int
    work: Callable[[], None] = field(compare=False)
    future: Future[None] = field(compare=False)


class _Queue:
    """What the thread holds: not the worker, so that a forgotten one ends it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.entries: list[_Entry] = []
        self.num_open = 0
        """Jobs that wait or run."""
        self.num_done = 0
        self.error: BaseException | None = None
        self.is_closed = False

    def close(self) -> None:
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()


def _work(queue: _Queue) -> None:
    while True:
        with queue.condition:
            while not queue.entries and not queue.is_closed:
                queue.condition.wait()
            if not queue.entries:
                return
            entry = heapq.heappop(queue.entries)
        error: BaseException | None = None
        try:
            entry.work()
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

    def submit(self, work: Callable[[], None], place: int = BEFORE_UPDATES) -> Job:
        """Put work in the queue, at the place that its weights have in the order of a forward."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._queue,), name="lowtide host worker", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        with self._queue.condition:
            heapq.heappush(self._queue.entries, _Entry(place, next(self._numbers), work, future))
            self._queue.num_open += 1
            self._queue.condition.notify_all()
        return Job(future, place)

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
