"""The operations on files that a save is made of, behind one object, so that tests record them and make them fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowtide.errors import CheckpointWriteError
from lowtide.units import format_bytes


class Disk:
    """Each method is one operation of the operating system; what fails raises its `OSError`.

    Nothing but these changes a run folder. A test puts an object in its place that records, or fails at, the operation it
    wants.
    """

    def make_folder(self, path: Path) -> None:
        """Make one folder that is not there yet."""
        path.mkdir()

    def create(self, path: Path, num_bytes: int) -> int:
        """A descriptor of a new file for which the disk has set its bytes aside, so that a full disk shows now."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if num_bytes:
                os.posix_fallocate(descriptor, 0, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_direct(self, path: Path) -> int | None:
        """Another descriptor of the file, whose writes go past the page cache; None where the file system has no such thing."""
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (AttributeError, OSError):
            return None

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """How many of the bytes were written; other threads run meanwhile."""
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """Return when all that was written to the file survives a power cut."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such call, and write names through at once.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder another name, at one instant."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Take a file away; of a link, the link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Take an empty folder away."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the disk that the folder is on."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


@contextmanager
def told_with_file(disk: Disk, run: Path, doing: str, path: Path, *, room: str = "") -> Iterator[None]:
    """An `OSError` inside becomes a `CheckpointWriteError` that names the file and the free bytes.

    Args:
        disk: Where the file is.
        run: The run folder.
        doing: What fails, as in "cannot ...".
        path: The file or folder in it.
        room: What to say about the bytes that are needed.
    """
    try:
        yield
    except OSError as error:
        free_bytes = _free_bytes(disk, path)
        inside = path.relative_to(run).as_posix()
        free = "an unknown number of bytes" if free_bytes is None else format_bytes(free_bytes)
        raise CheckpointWriteError(
            f"cannot {doing} {inside} in {run}: {error.strerror or error}; {free} of the disk are free"
            f"{room}. The checkpoints that were there before are as they were; {_advice(error)}",
            file=inside,
            free_bytes=free_bytes,
        ) from error


def _advice(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return "free some room, or keep fewer checkpoints, and save again"
    return "see to the disk, or save to another one"


def _free_bytes(disk: Disk, path: Path) -> int | None:
    for folder in path.parents:
        try:
            return disk.free_bytes(folder)
        except OSError:
            continue
    return None
