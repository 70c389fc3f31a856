"""The tracing subprocess: reads jobs from its standard input, answers on what was its standard output.

Started by `Sandbox`, as `main()` in an interpreter of its own. It turns itself into a ghost machine, which changes torch for
the whole process, and a
failing backward on ghosts can abort it: both are reasons for it to be a process of its own.
"""

from __future__ import annotations

import functools
import os
import pickle
import struct
import sys
import traceback
from typing import IO, Any

import cloudpickle

LENGTH = struct.Struct("<Q")


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
    return pickle.loads(data)


def _portable(error: BaseException) -> BaseException:
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
    send(answers, ("fatal", _portable(error)))
    os._exit(1)


def main() -> None:
    """Serve jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the model prints goes to the error stream, not between the messages
    requests = sys.stdin.buffer
    import torch

    torch.set_num_threads(1)
    from lowtide.tracing.predict import predict

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
            send(answers, ("error", _portable(error)))
    answers.flush()
    os._exit(0)  # autograd's device thread does not survive an ordinary interpreter shutdown
