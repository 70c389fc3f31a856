"""HostWorker: one thread for the work on the host that must not hold up the training loop.

Note [Which work comes first]
A job names what it comes after: copies to the host, and other jobs. The worker chooses among jobs for which all of that has
happened; if there are none, it waits for the oldest. It must not choose by place among the others: the loop submits the
updates of all layers early, and the first layer has the best place but its gradients arrive last, so that the worker would
idle. The oldest job never waits for one that has not run, because it was submitted after those.

Among jobs that can run, sums of gradients come before updates, and updates come in the order in which the next forward needs
their weights. In a backward these are the last to arrive: where the host is slower than the device, the updates of the first layers
overtake those of the last ones, and what is left over at the end of the backward belongs to layers that the next forward
reaches late. With the same place in that order, first come, first served.

Note [How many threads the kernels use]
torch and MKL keep the number for each thread: a new one takes what was last set, and does not follow later changes. The
worker takes the number of the loop's thread before each job. So `torch.set_num_threads` in the loop counts for the updates
too, and a matrix product in an update is split, and rounded, as it would be in the loop. Nothing is set that the loop did
not set: torch's setting is also the default of threads that come later.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lowtide import compat
from lowtide.errors import SessionError
from lowtide.runtime.passes.lock import Process

BEFORE_UPDATES = -1
"""The place of what updates depend on."""

FAILED = (
    "This came from the thread that updates weights on the host, beside the loop: some groups may have taken this step, and "
    "others not. Load a checkpoint before you go on"
)
"""Noted at whatever a job raised."""


class Awaited(Protocol):
    """What a job can come after: a copy's ticket, or another job."""

    def is_done(self) -> bool:
        """Whether it has happened."""

    def wait(self) -> None:
        """Wait on the host until it has."""


class Job:
    """A piece of work in the worker's thread; waits there from `submit` on."""

    def __init__(self, queue: _Queue) -> None:
        self.future: Future[None] = Future()
        self._queue = queue
        self._process = Process()

    @property
    def is_given(self) -> bool:
        """Whether it waits, runs or has finished."""
        return self.future.done() or self._queue.has(self.future)

    def is_done(self) -> bool:
        """Whether it has finished, well or not."""
        return self.future.done()

    def wait(self) -> None:
        """Wait for it; raises what it raised.

        Raises:
            SessionError: The worker itself would wait, and never run the job.
        """
        self._process.require()
        try:
            if not self.future.done():
                self._queue.refuse_in_its_thread("it waits for another update, or for itself")
            with compat.waiting():
                self.future.result()
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
        self.running: _Entry | None = None
        self.num_done = 0
        self.error: BaseException | None = None
        self.is_closed = False
        self.num_threads = torch.get_num_threads()
        """The number that the loop's thread has; see Note [How many threads the kernels use]."""
        self.thread: int | None = None

    @property
    def num_open(self) -> int:
        """Jobs that wait or run."""
        return len(self.given) + len(self.ready) + (self.running is not None)

    def has(self, future: Future[None]) -> bool:
        """Whether that job waits or runs."""
        with self.condition:
            entries = [*self.given, *self.ready, *([] if self.running is None else [self.running])]
            return any(entry.future is future for entry in entries)

    def refuse_in_its_thread(self, why: str) -> None:
        """Refuse a wait that could never end."""
        if threading.get_ident() == self.thread:
            raise SessionError(
                f"an update on the host cannot go on: {why}, and the one thread that runs these updates would wait for itself "
                "for ever. An optimizer whose step() calls another managed optimizer's, or reads a parameter of the model, does "
                "this: update on the device (make_plan(update='device')), or use an optimizer that touches what it is given alone"
            )

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

    def finish(self, error: BaseException | None) -> None:
        """The job that was running has ended; where the thread stumbled between two jobs, there is none."""
        # Once: jobs that come after a failed one raise the same.
        if error is not None and FAILED not in getattr(error, "__notes__", ()):
            error.add_note(FAILED)
        with self.condition:
            self.error = self.error or error
            # Inside: who is told that a job is done finds the counts right. Repeated where it breaks off.
            if self.running is not None and not self.running.future.done():
                if error is None:
                    self.running.future.set_result(None)
                else:
                    self.running.future.set_exception(error)
            self.running = None
            self.num_done += 1
            self.condition.notify_all()


def _keep_working(queue: _Queue) -> None:
    try:
        queue.thread = threading.get_ident()
        _work(queue)
    except BaseException as error:
        # Between two jobs, where nothing raises but what a debugger brings. Nobody would ever run the others.
        queue.finish(error)
        _work(queue)


def _work(queue: _Queue) -> None:
    is_over = False
    while not is_over:
        try:
            is_over = _work_once(queue)
        except BaseException as error:
            # Whoever waits for the job must hear of it, and the others must get their turn.
            queue.finish(error)


def _work_once(queue: _Queue) -> bool:
    """Run the next job; True where none will come. What the work holds must not outlive it until the next one comes."""
    with queue.condition:
        while not (queue.given or queue.ready or queue.is_closed):
            queue.condition.wait()
        if not (queue.given or queue.ready):
            return True
        queue.running = queue.choose()
        entry = queue.running
    try:
        if torch.get_num_threads() != queue.num_threads:
            torch.set_num_threads(queue.num_threads)
        _run(entry.after, entry.work, entry.lastly)
    except BaseException:
        del queue  # as in `_run`: it holds the error until somebody asks
        raise
    finally:
        del entry
    queue.finish(None)
    return False


class HostWorker:
    """Runs jobs one after the other; see Note [Which work comes first].

    One thread is enough: kernels use the other cores from inside each job, and release the interpreter's lock while they
    run. A job that fails is reported by its own `wait`, and by the next `check`, whichever comes first.
    """

    def __init__(self) -> None:
        self._queue = _Queue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._loop = threading.get_ident()
        weakref.finalize(self, _Queue.close, self._queue)
        _OPEN.add(self)

    def submit(
        self,
        work: Callable[[], None],
        *,
        after: Iterable[Awaited] = (),
        lastly: Callable[[], None] = lambda: None,
        place: int = BEFORE_UPDATES,
        job: Job | None = None,
    ) -> Job:
        """Put work in the queue.

        Args:
            work: Runs in the worker's thread.
            after: What must have happened before it; jobs among these are this worker's. Where one failed it does not run.
            lastly: Runs there in any case, when all of these are over: gives back what the work was lent.
            place: That its weights have in the order of a forward.
            job: Of `new_job`, where somebody must know of the job before it is given.
        """
        job = job or self.new_job()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_keep_working, args=(self._queue,), name="lowtide host worker", daemon=True
            )
        if self._thread.ident is None:  # also where an exception came before the start
            self._thread.start()
        self._note_threads()
        entry = _Entry(place, next(self._numbers), work, tuple(after), lastly, job.future)
        with self._queue.condition:
            # In this order: the thread looks when the lock is free, and an exception in between has given nothing.
            self._queue.condition.notify_all()
            self._queue.given.append(entry)
        return job

    def new_job(self) -> Job:
        """A job that is not given yet."""
        return Job(self._queue)

    def refuse_in_its_thread(self, what: str) -> None:
        """Refuse to settle something in the worker's own thread, which settling may have to wait for.

        Raises:
            SessionError: This is the worker's thread.
        """
        self._queue.refuse_in_its_thread(f"it looks at {what}, which waits for updates")

    def drain(self) -> None:
        """Wait until no job waits or runs. What they raised is told by `check`."""
        queue = self._queue
        queue.refuse_in_its_thread("it waits for all updates")
        with queue.condition, compat.waiting():
            while queue.num_open and self._thread is not None and self._thread.is_alive():
                queue.condition.wait(timeout=1.0)

    def wait_for_one(self) -> bool:
        """Wait until a job that waits or runs has finished; False where there is none. For the thread that submits.

        Raises:
            Exception: What a job raised, this one or one before it.
        """
        queue = self._queue
        queue.refuse_in_its_thread("it needs memory that another update gives back")
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
        self._note_threads()
        with self._queue.condition:
            error, self._queue.error = self._queue.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: a cycle would keep what the error's other frames hold

    def _note_threads(self) -> None:
        """From the loop's thread alone: autograd's has a number of its own, and gives jobs too."""
        if threading.get_ident() == self._loop:
            self._queue.num_threads = torch.get_num_threads()

    def close(self) -> None:
        """Let the jobs finish and end the thread. May be repeated."""
        self._queue.close()  # not by its finalizer, which would do it once, though an exception broke it off
        if self._thread is not None and self._thread.ident is not None:
            with compat.waiting():
                self._thread.join()


_OPEN: weakref.WeakSet[HostWorker] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child has none of the threads; their locks may be held by one of them, and nobody would let go."""
    for worker in _OPEN:
        worker._queue.condition = threading.Condition()
    _OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _finish_all() -> None:
    """A process that ends without closing its sessions finishes their updates: the kernels must not outlive Python."""
    for worker in list(_OPEN):
        worker.close()
