"""Work beside torch's compiler: it waits for the compiler's end, and never for itself."""

from __future__ import annotations

import threading

import torch._dynamo.convert_frame  # the lock is there once something was compiled

from lowtide import compat
from lowtide.runtime.host_worker import HostWorker

LOCK = torch._dynamo.convert_frame.compile_lock


def test_work_waits_until_nobody_compiles() -> None:
    done = threading.Event()

    def work() -> None:
        with compat.outside_compilation():
            done.set()

    with LOCK:
        thread = threading.Thread(target=work)
        thread.start()
        assert not done.wait(0.2)
    thread.join(10)
    assert done.is_set()


def test_a_compiler_that_waits_for_the_work_is_not_waited_for() -> None:
    worker = HostWorker()

    def work() -> None:
        with compat.outside_compilation():
            pass

    with LOCK:  # this thread compiles, and reads a weight whose update is not made yet
        job = worker.submit(work)
        waiter = threading.Timer(20, LOCK.release)  # would end a deadlock, and fail below
        waiter.start()
        job.wait()
        waiter.cancel()
        assert job.is_done()
    worker.close()


def test_nested_and_free_again() -> None:
    with compat.outside_compilation(), compat.outside_compilation():
        assert LOCK._is_owned()
    assert not LOCK._is_owned()


def test_what_was_given_to_the_compiler_runs_as_it_is() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled")

    doubled = torch.compile(lambda x: 2 * x, backend=refuse)
    with compat.without_compilation():
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
