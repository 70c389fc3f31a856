"""The worker's order, its errors and its end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from lowtide.runtime.host_worker import HostWorker


class Gate:
    """Holds the worker's thread until it is opened, so that jobs pile up."""

    def __init__(self, worker: HostWorker) -> None:
        self._event, reached = threading.Event(), threading.Event()

        def hold() -> None:
            reached.set()
            self._event.wait()

        worker.submit(hold)
        reached.wait()

    def open(self) -> None:
        self._event.set()


def test_what_is_needed_first_is_done_first() -> None:
    worker, done = HostWorker(), list[str]()
    gate = Gate(worker)
    for name, place in (("head", 9), ("layers.1", 1), ("layers.0", 0), ("layers.0 again", 0)):
        worker.submit(lambda name=name: done.append(name), place=place)  # type: ignore[misc]  # a default
    worker.submit(lambda: done.append("sum"))
    gate.open()
    worker.close()
    assert done == ["sum", "layers.0", "layers.0 again", "layers.1", "head"]


def test_waiting_for_one_of_them() -> None:
    worker = HostWorker()
    assert not worker.wait_for_one()
    gate = Gate(worker)
    late = worker.submit(lambda: None, place=5)
    threading.Timer(0.05, gate.open).start()
    assert worker.wait_for_one()
    late.wait()
    worker.close()
    assert not worker.wait_for_one()


def test_errors_are_told_once_by_the_next_call() -> None:
    worker = HostWorker()

    def fail() -> None:
        raise ValueError("broken")

    job = worker.submit(fail)
    with pytest.raises(ValueError, match="broken"):
        job.wait()
    with pytest.raises(ValueError, match="broken"):
        worker.check()
    worker.check()
    done: list[int] = []
    worker.submit(lambda: done.append(1)).wait()
    assert done == [1]
    worker.close()


def test_a_forgotten_worker_ends_its_thread() -> None:
    worker = HostWorker()
    worker.submit(lambda: None).wait()
    thread = worker._thread
    assert thread is not None
    known = weakref.ref(worker)
    del worker
    gc.collect()
    assert known() is None
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_a_process_that_ends_finishes_its_work() -> None:
    text = (
        "import time\n"
        "from lowtide.runtime.host_worker import HostWorker\n"
        "worker = HostWorker()\n"
        "for number in range(3):\n"
        "    worker.submit(lambda number=number: (time.sleep(0.1), print(number, flush=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1", "2"]
