"""HostWorker: one thread for the work on the host that must not hold up the training loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Job:
    """A piece of work in the worker's thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Wait for it; raises what it raised."""
        self._future.result()


class HostWorker:
    """Runs jobs one after the other, in the order in which they were given.

    One thread is enough: torch's operators use the other cores from inside each job, and release the interpreter's lock
    while they run. A job that fails is reported by its own `wait`, and by the next `check`, whichever comes first.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lowtide host worker")
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._waiting: deque[Job] = deque()

    def submit(self, work: Callable[[], None]) -> Job:
        """Put work in the queue."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
                raise

        job = Job(self._executor.submit(run))
        while self._waiting and self._waiting[0].is_done():
            self._waiting.popleft()
        self._waiting.append(job)
        return job

    def wait_for_oldest(self) -> bool:
        """Wait for the oldest job that has not finished; False where there is none. For the thread that submits."""
        while self._waiting:
            job = self._waiting.popleft()
            if not job.is_done():
                job.wait()
                return True
        return False

    def check(self) -> None:
        """Raise what a job raised since the last call."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Let the jobs finish and end the thread."""
        self._executor.shutdown(wait=True)
