"""The lock of a run folder: one process, and one object in it, writes there; the system gives the lock back when it dies."""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lowtide.errors import CheckpointError, FolderInUseError
from lowtide.runtime.checkpoints.disk import Disk, told_with_file

LOCK_NAME = ".lock"
T = TypeVar("T")


class FolderLock:
    """A lock that is held from `take` to `release`, or to the end of this object or process.

    The file stays when nobody holds it: to take it away would let two processes lock two files of one name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._release: weakref.finalize[[int], FolderLock] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds it."""
        return self._release is not None and self._release.alive

    def take(self) -> None:
        """Hold the lock from here on.

        Raises:
            FolderInUseError: Somebody else holds it.
            CheckpointError: The file system has no locks.
            CheckpointWriteError: The lock's file cannot be made.
        """
        self._release = weakref.finalize(self, os.close, _locked(self._folder))
        # A save may still be finished while the interpreter ends; after that, the system lets go.
        self._release.atexit = False
        _HELD.add(self)

    def release(self) -> None:
        """Let others take it."""
        if self._release is not None:
            self._release()


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def in_forked_children(living: weakref.WeakSet[T], act: Callable[[T], None]) -> None:
    """Do this to each of them in a child that is forked, such as a data worker, which has none of the threads."""

    def act_on_all() -> None:
        for each in list(living):
            act(each)
        living.clear()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act_on_all)


# The lock is the parent's until all descriptors of it are closed: a child must not hold it beyond the life of its parent.
in_forked_children(_HELD, FolderLock.release)


def _locked(path: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed; the system closes it when the process dies."""
    # Not on Windows, where nothing is saved, but the package is imported.
    import fcntl

    with told_with_file(Disk(), path, "open", path / LOCK_NAME):
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with told_with_file(Disk(), path, "write", path / LOCK_NAME):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 4096, 0)
        os.close(descriptor)
        raise _in_use(path, holder) from None
    except OSError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"{LOCK_NAME} in {path} cannot be locked: {error}; save to a file system that has flock, so that no second "
            "process can write here",
            file=LOCK_NAME,
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _in_use(path: Path, holder: bytes) -> FolderInUseError:
    pid, host = None, None
    try:
        said = json.loads(holder)
        pid, host = int(said["pid"]), str(said["host"])
    except (ValueError, KeyError, TypeError):
        who = "another process, which has not said its number yet,"
    else:
        who = f"process {pid} on {host}"
        if (pid, host) == (os.getpid(), socket.gethostname()):
            who = f"this process, {pid} on {host}, by another session or RunFolder,"
    return FolderInUseError(
        f"{who} saves into {path}; stop it, or give this run a folder of its own", pid=pid, host=host
    )
