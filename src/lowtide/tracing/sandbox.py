"""Sandbox: the caller's side of the tracing subprocess. A crash in there is an exception out here."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from lowtide.errors import TraceCrashedError
from lowtide.tracing import worker

if TYPE_CHECKING:
    from lowtide.tracing.predict import Job
    from lowtide.tracing.step_trace import StepTrace

STDERR_TAIL_BYTES = 4000


class Sandbox:
    """One tracing subprocess, started when first needed and kept for the next job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._owner = 0

    def run(self, job: Job, on_progress: Callable[[str], None] | None = None) -> StepTrace:
        """The trace a job asks for.

        Raises:
            TraceError: As raised inside; `TraceCrashedError` when the subprocess died.
        """
        with self._lock:
            process = self._started()
            try:
                self._send(process, job)
                kind, content = self._receive(process, job)
                while kind == "progress":
                    if on_progress is not None:
                        on_progress(content)
                    kind, content = self._receive(process, job)
            except BaseException:  # an interrupt, or whatever `on_progress` raises
                self.close()  # the answer to an abandoned question must not be taken for the next one's
                raise
            if kind == "fatal":
                self.close()
            if kind != "result":
                raise content
            result: StepTrace = content
            return result

    def _send(self, process: subprocess.Popen[bytes], job: Job) -> None:
        assert process.stdin is not None
        request = (list(sys.path), str(Path.cwd()), cloudpickle.dumps(job))
        try:
            worker.send(process.stdin, request)
        except BrokenPipeError as error:
            raise self._crashed(process, job) from error

    def _receive(self, process: subprocess.Popen[bytes], job: Job) -> Any:
        assert process.stdout is not None
        try:
            return worker.receive(process.stdout)
        except EOFError as error:
            raise self._crashed(process, job) from error

    def warm(self) -> None:
        """Start the subprocess now, so that it imports torch while the caller builds a model."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the subprocess, if there is one."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def _started(self) -> subprocess.Popen[bytes]:
        is_alive = self._process is not None and self._owner == os.getpid() and self._process.poll() is None
        if self._process is not None and is_alive:
            return self._process
        self._process = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the subprocess)
        self._owner = os.getpid()
        # No CUDA in there, even where there is a card: a prediction must not depend on it, nor take memory on it.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _python_path()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from lowtide.tracing.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        return self._process

    def _crashed(self, process: subprocess.Popen[bytes], job: Job) -> TraceCrashedError:
        code = process.wait()
        tail = ""
        if self._stderr is not None:
            self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(self._stderr.tell() - STDERR_TAIL_BYTES, 0))
            tail = self._stderr.read().decode(errors="replace")
        self.close()
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        last = next((line for line in reversed(tail.strip().splitlines()) if line.strip()), "no error text")
        return TraceCrashedError(
            f"the subprocess that traced {job.name!r} {how} before it had a result ({last}). The step itself may abort on "
            "ghost tensors; use lowtide.observe on a machine with a GPU, or report the error text in `stderr_tail`.",
            exit_code=code,
            stderr_tail=tail,
        )


def _python_path() -> str:
    package_folder = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (package_folder, inherited) if part)


_shared: Sandbox | None = None


def shared_sandbox() -> Sandbox:
    """The sandbox of this process; it ends with it."""
    global _shared
    if _shared is None:
        _shared = Sandbox()
        atexit.register(_shared.close)
    return _shared


def run_job(job: Job, on_progress: Any = None) -> StepTrace:
    """Run a job in the shared sandbox."""
    return shared_sandbox().run(job, on_progress)
