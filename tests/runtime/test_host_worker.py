"""The worker's order, its errors and its end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from lowtide.runtime.updates.worker import HostWorker


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


class Copy:
    """A copy to the host that ends when it is told to."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.num_waits = 0

    def end(self) -> None:
        self._ended.set()

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self.num_waits += 1
        assert self._ended.wait(timeout=30)


class BrokenCopy(Copy):
    """A copy on a device that has failed."""

    def is_done(self) -> bool:
        raise RuntimeError("the device has failed")

    def wait(self) -> None:
        raise RuntimeError("the device has failed")


def test_nobody_waits_for_what_comes_last_while_others_can_run() -> None:
    """The loop has given a whole backward's updates before the first gradient arrives, that of the last layer."""
    worker, done = HostWorker(), list[int]()
    copies = {layer: Copy() for layer in (3, 2, 1, 0)}
    jobs = {
        layer: worker.submit(lambda layer=layer: done.append(layer), after=[copy], place=layer)  # type: ignore[misc]
        for layer, copy in copies.items()
    }
    copies[3].end()
    jobs[3].wait()
    assert done == [3]
    copies[2].end()
    jobs[2].wait()
    assert done == [3, 2]
    assert not jobs[0].is_done()
    for layer in (1, 0):
        copies[layer].end()
    worker.close()


def test_what_a_job_comes_after_has_happened_when_it_runs() -> None:
    worker, done = HostWorker(), list[str]()
    copy = Copy()
    total = worker.submit(lambda: done.append("sum"), after=[copy])
    update = worker.submit(lambda: done.append("update"), after=[total], place=0)
    # An addition to what that update has read; its place says that it comes first, and it does not.
    worker.submit(lambda: done.append("next sum"), after=[update])
    worker.submit(lambda: done.append("other"), place=7)
    assert not done
    copy.end()
    worker.close()
    assert done == ["sum", "update", "next sum", "other"]
    assert copy.num_waits == 1


def test_a_copy_that_fails_is_told_and_ends_nothing_else() -> None:
    worker, done = HostWorker(), list[str]()
    gate = Gate(worker)
    broken = worker.submit(lambda: done.append("spoilt"), after=[BrokenCopy()], place=1)
    after_it = worker.submit(lambda: done.append("spoilt too"), after=[broken], place=0)
    fine = worker.submit(lambda: done.append("fine"), place=2)
    gate.open()
    for job in (broken, after_it):
        with pytest.raises(RuntimeError, match="the device has failed"):
            job.wait()
    fine.wait()
    assert done == ["fine"]
    with pytest.raises(RuntimeError, match="the device has failed"):
        worker.check()
    worker.close()


class BusyCopy(Copy):
    """Cannot be asked just now, as while a graph of the device's work is recorded; to wait for it is allowed."""

    def is_done(self) -> bool:
        raise RuntimeError("not now")


def test_a_copy_that_cannot_be_asked_does_not_bring_a_job_before_what_it_comes_after() -> None:
    worker, done = HostWorker(), list[str]()
    gate = Gate(worker)
    copy = BusyCopy()
    copy.end()
    total = worker.submit(lambda: done.append("sum"), place=9)
    update = worker.submit(lambda: done.append("update"), after=[copy, total], place=0)
    gate.open()
    deadline = time.monotonic() + 10
    while not update.is_done() and time.monotonic() < deadline:  # not `wait`: a worker that waits for itself never ends
        time.sleep(0.01)
    assert done == ["sum", "update"]
    worker.close()


def test_what_a_job_was_lent_is_given_back_whatever_it_comes_after_does() -> None:
    worker, done = HostWorker(), list[str]()
    copy = Copy()

    def fail() -> None:
        raise RuntimeError("failed")

    lent = {
        "done": worker.submit(lambda: None, lastly=lambda: done.append("done")),
        "failed": worker.submit(fail, lastly=lambda: done.append("failed")),
    }
    lent["not run"] = worker.submit(
        lambda: done.append("run all the same"),
        after=[lent["failed"], copy],
        lastly=lambda: done.append(f"not run, written to until then: {not copy.is_done()}"),
    )
    lent["failed"].future.exception(timeout=30)
    assert not lent["not run"].is_done()
    copy.end()
    for name in ("failed", "not run"):
        with pytest.raises(RuntimeError, match="failed"):
            lent[name].wait()
    worker.close()
    assert done == ["done", "failed", "not run, written to until then: False"]


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


@pytest.mark.timeout(30)
def test_a_thread_that_could_not_start_is_started_for_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = HostWorker()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.submit(lambda: None)
        unused = HostWorker()
        with pytest.raises(RuntimeError, match="can't start"):
            unused.submit(lambda: None)
        unused.close()
    done: list[int] = []
    worker.submit(lambda: done.append(1)).wait()
    worker.close()
    assert done == [1]


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
        "from lowtide.runtime.updates.worker import HostWorker\n"
        "worker = HostWorker()\n"
        "for number in range(3):\n"
        "    worker.submit(lambda number=number: (time.sleep(0.1), print(number, flush=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1", "2"]


def test_the_worker_uses_as_many_threads_as_the_loop_and_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the number for each thread, and one that runs already does not follow a change."""
    worker, seen = HostWorker(), list[int]()
    before = torch.get_num_threads()
    num_set = list[int]()
    set_num_threads = torch.set_num_threads

    def counted(number: int) -> None:
        num_set.append(number)
        set_num_threads(number)

    def look() -> None:
        torch.ones(8).sqrt()
        seen.append(torch.get_num_threads())

    try:
        monkeypatch.setattr(torch, "set_num_threads", counted)
        worker.submit(look).wait()
        assert not num_set, "it set what nobody had changed"
        for number in (before + 2, before + 1):
            set_num_threads(number)
            for _ in range(2):
                worker.submit(look).wait()
            assert torch.get_num_threads() == number, "the loop's own changed"

        def as_autograd_does() -> None:
            set_num_threads(before + 5)  # of that thread
            worker.submit(look).wait()

        other = threading.Thread(target=as_autograd_does)
        other.start()
        other.join()
    finally:
        set_num_threads(before)
        worker.close()
    assert seen == [before, before + 2, before + 2, before + 1, before + 1, before + 1]
    assert num_set == [before + 2, before + 1]
