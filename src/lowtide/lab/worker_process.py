"""WorkerProcess: the runner's side of one worker, from its start to the end of all that it started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from lowtide import config
from lowtide.lab.messages import Done, Message, Request, decode

POLL_S = 0.1
CLOSING_LIMIT_S = 60.0
"""For a worker that has written its record and does not end: some thread of the run may hang."""
STDERR_TAIL_BYTES = 1 << 16


class WorkerProcess:
    """A worker in a process group of its own; leaving the context kills what is left of the group.

    Args:
        request: What to run; the pipe is put into it here.
        stdout: A file for what the run prints.
        stderr: A file for its errors and warnings.
    """

    def __init__(self, request: Request, *, stdout: Path, stderr: Path) -> None:
        self._logs = (stdout, stderr)
        self._unread = b""
        self.is_late = False
        """Whether `messages` ended because its limit had passed."""
        for path in (stdout, stderr):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="lowtide-lab-")
        request_file = Path(self._folder.name) / "request.json"
        self._pipe, workers_end = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            config.write_config(replace(request, progress_fd=workers_end), request_file)
            with stdout.open("wb") as out, stderr.open("wb") as err:
                self._begun_s = time.monotonic()
                self._process = subprocess.Popen(
                    # A crash in native code then leaves the Python lines that led to it.
                    [sys.executable, "-X", "faulthandler", "-m", "lowtide.lab.worker", str(request_file)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    pass_fds=(workers_end,),
                    env=_environment(Path(self._folder.name)),
                    # Ctrl-C on the terminal must come to the runner alone, which then ends the worker and says so.
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._pipe)
            self._folder.cleanup()
            raise
        finally:
            os.close(workers_end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        self._kill_group()
        self._process.wait()
        os.close(self._pipe)
        self._folder.cleanup()
        for log in self._logs:
            if log.stat().st_size == 0:
                log.unlink()

    @property
    def elapsed_s(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._begun_s

    @property
    def exit_code(self) -> int:
        """Of the ended process: a signal's number, negative, where one ended it. Only after the context."""
        assert self._process.returncode is not None
        return self._process.returncode

    def messages(self, limit_s: float | None) -> Iterator[Message]:
        """What the worker says, until it ends or the limit passes."""
        end_s = None if limit_s is None else self._begun_s + limit_s
        # Not until the pipe closes: a process that the worker forked may hold it open for ever.
        while not self._has_ended():
            for message in self._read(POLL_S):
                if isinstance(message, Done):
                    end_s = time.monotonic() + CLOSING_LIMIT_S
                yield message
            if end_s is not None and time.monotonic() > end_s:
                self.is_late = True
                return
        yield from self._read(0.0)

    def stderr_tail(self, num_lines: int) -> str:
        """The last lines of what went to the error stream; of a crash in native code the first of its report."""
        _, stderr = self._logs
        if not stderr.exists():
            return ""
        with stderr.open("rb") as file:
            file.seek(max(stderr.stat().st_size - STDERR_TAIL_BYTES, 0))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(_crash_report(lines)[:num_lines] or lines[-num_lines:])

    def _read(self, timeout_s: float) -> Iterator[Message]:
        """The messages that are there, or come within that time."""
        ready, _, _ = select.select([self._pipe], [], [], timeout_s)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while ready and (part := os.read(self._pipe, 1 << 16)):
                data += part
        if ready and not data:
            time.sleep(timeout_s)  # the worker has closed its end, and select no longer waits
        *lines, self._unread = (self._unread + data).split(b"\n")
        yield from (message for line in lines if (message := decode(line)) is not None)

    def _has_ended(self) -> bool:
        # Without taking the exit status: until that is taken nobody else can get the number that the group is killed by.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _crash_report(lines: list[str]) -> list[str]:
    """Python's report of a crash in native code: what happened, and where in the thread that it happened in."""
    fatal = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if fatal is None:
        return []
    # Other threads may come before it.
    rest = lines[fatal + 1 :]
    current = next((number for number, line in enumerate(rest) if line.startswith("Current thread")), 0)
    return [lines[fatal], *rest[current:]]


def _environment(folder: Path) -> dict[str, str]:
    """The user's, with caches of compiled code that begin empty and go with the run.

    The compilation of one run would otherwise be found by the next of the same graph, and by its own other seeds, so that
    the first step says what ran before it. Also where the variables are set: torch itself sets them in any process that
    has looked for its cache, as this one may have.
    """
    caches = {name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    return {**os.environ, **caches, "PYTHONPATH": _python_path()}


def _python_path() -> str:
    package_folder = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(part for part in (package_folder, os.environ.get("PYTHONPATH", "")) if part)
