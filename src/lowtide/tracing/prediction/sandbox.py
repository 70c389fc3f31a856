"""The tracing subprocess, both ends of it: a crash in there is an exception out here.

`Sandbox` is the caller's side. `main` runs in an interpreter of its own: it reads jobs from its standard input and answers on
what was its standard output. It turns itself into a ghost machine, which changes torch for the whole process, and a failing
backward on ghosts can abort it: both are reasons for it to be a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from lowtide.errors import TraceCrashedError

if TYPE_CHECKING:
    from lowtide.tracing.prediction.job import Job
    from lowtide.tracing.step_trace import StepTrace

STDERR_TAIL_BYTES = 4000
LENGTH = struct.Struct("<Q")


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
        try:
            send(process.stdin, (list(sys.path), str(Path.cwd()), cloudpickle.dumps(job)))
        except BrokenPipeError as error:
            raise self._crashed(process, job) from error

    def _receive(self, process: subprocess.Popen[bytes], job: Job) -> Any:
        assert process.stdout is not None
        try:
            return receive(process.stdout)
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
        # No CUDA in there, even where there is a device: a prediction must not depend on it, nor take memory on it.
        package_folder, inherited = str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")
        python_path = os.pathsep.join(part for part in (package_folder, inherited) if part)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from lowtide.tracing.prediction.sandbox import serve_jobs; serve_jobs()"],
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


@functools.cache
def shared_sandbox() -> Sandbox:
    """The sandbox of this process; it ends with it."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message."""
    data = cloudpickle.dumps(message)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message; EOFError when the other side is gone."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(header)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    with _without_collections():
        return pickle.loads(data)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A trace is thousands of small objects: collections that they set off look at all of torch's, for longer than reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def portable(error: BaseException) -> BaseException:
    """The error itself where it survives the trip, else a TraceError that tells of it."""
    from lowtide.errors import LowtideError, TraceError

    if not isinstance(error, LowtideError):
        trail = "".join(traceback.format_exception(error))
        error.add_note(f"raised in the tracing subprocess:\n{trail}")
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # an exception class may fail to pickle in any way it likes
        return TraceError(f"the step failed with {type(error).__name__}: {error}")
    return error


def _end(answers: IO[bytes], error: BaseException) -> None:
    """Answer with an error that would abort the process, then end it before it does."""
    send(answers, ("fatal", portable(error)))
    os._exit(1)


def serve_jobs() -> None:
    """The subprocess: predict each job that comes in, and answer, until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the model prints goes to the error stream, not between the messages
    requests = sys.stdin.buffer
    import torch

    torch.set_num_threads(1)
    from lowtide import compat
    from lowtide.tracing.prediction.predict import predict

    compat.import_compiler()
    gc.freeze()  # torch's own objects live as long as this process: collections need not look at them
    while True:
        try:
            paths, folder, job_data = receive(requests)
        except EOFError:
            break
        try:
            sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
            os.chdir(folder)
            job = pickle.loads(job_data)
            result = predict(job, lambda text: send(answers, ("progress", text)), functools.partial(_end, answers))
            send(answers, ("result", result))
        except BaseException as error:  # everything reaches the caller
            send(answers, ("error", portable(error)))
    answers.flush()
    os._exit(0)  # autograd's device thread does not survive an ordinary interpreter shutdown
