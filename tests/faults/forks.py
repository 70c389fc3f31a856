"""A fork server: a process that has imported everything and managed nothing, whose children train and are killed.

A child costs a fork and not an import. It tells where it is by a page of memory that it shares with the server, which is what
is left of it after SIGKILL.

    python -m tests.faults.forks        # reads one job a line, answers each with one line
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PHASES = (
    "starting", "loading", "training", "beginning", "copying", "writing", "syncing", "finishing", "renaming", "retaining",
    "publishing the model",
)  # fmt: skip
"""What a child may be doing; see `phases`."""
IN_A_SAVE = frozenset(PHASES[3:10])
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How a child ended."""

    killed: bool
    """By SIGKILL."""
    code: int | None
    """Its exit code, where it was not killed."""
    phase: str
    """What it was doing at the end."""
    seconds: float
    """From the end of its start."""
    error: str
    """The traceback of what it raised."""
    is_hung: bool
    """It was killed because it did not end."""


class Page:
    """A byte for the phase that a process is in, which outlives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.phase = "starting"

    @property
    def phase(self) -> str:
        """The last that was entered."""
        return PHASES[self._memory[0]]

    @phase.setter
    def phase(self, phase: str) -> None:
        self._memory[0] = PHASES.index(phase)

    def close(self) -> None:
        """Give it back."""
        self._memory.close()


class ForkServer:
    """Runs jobs, each in a child of the server. Used in a `with` block."""

    def __enter__(self) -> ForkServer:
        # One thread each: a fork copies none of a pool's.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = os.pathsep.join([str(REPO / "src"), str(REPO)])
        around = os.environ | threads | {"PYTHONPATH": paths, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=around, cwd=REPO, text=True,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=TIMEOUT_S)
        self._server.stdout.close()

    def run(
        self, job: dict[str, Any], *, signals: Sequence[tuple[float, int]] = (), timeout_s: float = TIMEOUT_S
    ) -> Life:
        """A child that runs the job.

        Args:
            job: See `tests.faults.jobs`.
            signals: Sent to it: so many seconds after its start is over, this one.
            timeout_s: After which it hangs.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = {"job": job, "signals": [list(each) for each in signals], "timeout_s": timeout_s}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the fork server has ended"
        return Life(**json.loads(answer))


# -- in the server -----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Fork a child for each line."""
    from tests.faults import jobs

    # Its parent alone ends it: a Ctrl-C of a terminal goes to all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert threading.active_count() == 1, "a child has none of its parent's threads"
    gc.freeze()
    page = Page()
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        page.phase = "starting"
        child = os.fork()
        if child == 0:
            os.close(reader)
            _be_child(jobs.run, order, page, writer)
        os.close(writer)
        life = _watched(child, page, reader, order)
        os.close(reader)
        print(json.dumps(asdict(life)), flush=True)


def _be_child(run: Any, order: dict[str, Any], page: Page, writer: int) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.set_inheritable(writer, False)
        sys.stdin.close()
        with os.fdopen(writer, "w") as out:
            faulthandler.enable(out)
            faulthandler.dump_traceback_later(0.9 * order["timeout_s"], file=out)
            try:
                # As in the tests: what nobody expects is an error.
                warnings.simplefilter("error")
                run(order["job"], page)
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc(file=out)
                out.flush()
                # As where an interpreter ends: a save under way comes to its end.
                atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _watched(child: int, page: Page, reader: int, order: dict[str, Any]) -> Life:
    """The end of a child, which gets its signals before."""
    handle = os.pidfd_open(child)
    end_s = time.monotonic() + order["timeout_s"]
    signals = [(float(delay), int(number)) for delay, number in order["signals"]]
    said, started_s = b"", None
    while True:
        if started_s is None and page.phase != "starting":
            started_s = time.monotonic()
        now = time.monotonic()
        while signals and started_s is not None and started_s + signals[0][0] <= now:
            os.kill(child, signals.pop(0)[1])
        wait_s = 0.002 if started_s is None else 0.5
        if signals and started_s is not None:
            wait_s = max(0.0, started_s + signals[0][0] - now)
        ready, _, _ = select.select([handle, reader], [], [], wait_s)
        if reader in ready:
            said += os.read(reader, 65536)
        if handle in ready:
            break
        if now > end_s:
            os.kill(child, signal.SIGCONT)
            os.kill(child, signal.SIGKILL)
            break
    _, status = os.waitpid(child, 0)
    os.close(handle)
    while more := os.read(reader, 65536):
        said += more
    ended_s = time.monotonic()
    return Life(
        killed=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        code=os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None,
        phase=page.phase,
        seconds=0.0 if started_s is None else ended_s - started_s,
        error=said.decode(errors="replace"),
        is_hung=ended_s > end_s,
    )


if __name__ == "__main__":
    serve()
