"""A run's folder: one process writes to it, and whatever kills that process, a whole checkpoint is found in it afterwards.

A checkpoint takes its name by a rename after all its files are on the disk, and loses its name by a rename before the first
of its files is taken away. So a folder named `step-00000120` is whole. Names that begin with a dot are for what is not a
checkpoint yet, or any more:

    .step-00000120.partial-HOST-PID     is being written
    .step-00000120.replaced-HOST-PID    was the checkpoint of the step until a new one takes its place; counts until then
    .step-00000120.removed-HOST-PID     is being taken away
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lowtide.errors import BadRecordError, CheckpointError, ConfigError, DamagedCheckpointError
from lowtide.runtime.checkpoints.disk import Disk, told_with_file
from lowtide.runtime.checkpoints.format import CheckpointReader
from lowtide.runtime.checkpoints.index import INDEX_NAME, Index, from_text
from lowtide.runtime.checkpoints.lock import FolderLock

_STEP = re.compile(r"step-(\d{8,18})")
_HIDDEN = re.compile(r"\.(step-\d{8,18})\.(partial|replaced|removed)-.+")
_OWN_ENDINGS = (".safetensors", ".json")
"""By which the files of a checkpoint are known whose index cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints stay when a new one is whole.

    A save needs room for one checkpoint more than stay: the new one is written beside them. With `keep=1` two must fit.

    Raises:
        ConfigError: One of the numbers is below 1.
    """

    keep: int = 2
    """How many of the latest steps stay."""
    keep_every: int | None = None
    """Steps that are a multiple of this stay for ever; None: none do."""

    def __post_init__(self) -> None:
        for key, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{key} is {value}; give 1 or more", key=key)

    def is_for_ever(self, step: int) -> bool:
        """Whether the step stays however old it becomes."""
        return self.keep_every is not None and step % self.keep_every == 0


class RunFolder:
    """The checkpoints of one run. Reading takes no lock; the first `begin`, or `lock`, takes the one for writing.

    Example:
        >>> import tempfile
        >>> from lowtide.runtime.checkpoints.format import CheckpointWriter
        >>> with tempfile.TemporaryDirectory() as folder, RunFolder(Path(folder)) as run:
        ...     partial = run.begin(120)
        ...     _ = CheckpointWriter(partial, {}).finish(step=120, state={"epoch": 3})
        ...     _ = run.publish(partial, 120)
        ...     run.newest_good().index.state
        {'epoch': 3}

    Args:
        path: The folder; it is made when something is first saved.
        retention: Which checkpoints stay.
        disk: The operations on files; tests put their own here.
    """

    def __init__(self, path: Path, *, retention: Retention | None = None, disk: Disk | None = None) -> None:
        self.path = path
        self._retention = Retention() if retention is None else retention
        self._disk = Disk() if disk is None else disk
        self._lock = FolderLock(self.path)
        self._partial: Path | None = None
        """What is being written."""
        self._is_retained = False
        """Whether only what is to stay was here when the first save began."""
        self._warned: set[str] = set()

    def __enter__(self) -> RunFolder:
        self.lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def lock(self) -> None:
        """Become the one who writes here, until `close` or the end of the process, and take away what killed writers left.

        Raises:
            FolderInUseError: Somebody else is.
            CheckpointWriteError: The folder cannot be made.
            CheckpointError: The file system has no locks.
        """
        if not self._lock.is_held:
            self._make_folder()
            self._lock.take()
            self._sweep()

    def close(self) -> None:
        """Let others write here. A save that is under way is abandoned."""
        if self._partial is not None:
            self.abandon(self._partial)
        self._lock.release()

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of a step, to be written by a `CheckpointWriter` and given to `publish`.

        Raises:
            CheckpointError: A save is under way, or something that is no checkpoint has the step's name.
            FolderInUseError: Somebody else writes here.
            CheckpointWriteError: The folder cannot be made.
        """
        if step < 0:
            raise ConfigError(f"step is {step}; steps count from 0", key="step")
        self.lock()
        if self._partial is not None:
            raise CheckpointError(
                f"{self._partial.name} in {self.path} is being written; publish or abandon it before the next save begins"
            )
        final = self.path / checkpoint_name(step)
        if final.is_symlink() or (final.exists() and not final.is_dir()):
            raise CheckpointError(
                f"{final.name} in {self.path} is no folder, and stands where step {step} is to be saved; move it away",
                file=final.name,
            )
        self._sweep()
        if not self._is_retained:
            self._finish_retention()
        partial = self._hidden(final.name, "partial")
        with told_with_file(self._disk, self.path, "make", partial):
            self._disk.make_folder(partial)
        self._partial = partial
        return partial

    def publish(self, partial: Path, step: int) -> Path:
        """Give a finished checkpoint its name, at one instant, and then take away those that no longer stay.

        One that has the name already is replaced: a process killed in between leaves the old one or the new one.

        Raises:
            CheckpointError: The folder is not from `begin`, or not finished.
            CheckpointWriteError: The disk refuses. The checkpoints from before are still there.
        """
        index = _index_of(partial)
        if partial != self._partial or not self._lock.is_held or index is None or index.step != step:
            raise CheckpointError(
                f"{partial} is not a finished checkpoint of step {step} that was begun here; begin, write and finish it first"
            )
        final = self.path / checkpoint_name(step)
        replaced = self._moved_aside(final) if final.exists() else None
        try:
            with told_with_file(self._disk, self.path, "rename", partial):
                self._disk.rename(partial, final)
        except BaseException:
            if replaced is not None:
                self._rename_back(replaced, final)
            raise
        with told_with_file(self._disk, self.path, "sync the name of", final):
            self._disk.sync_folder(self.path)
        self._partial = None
        if replaced is not None:
            self._remove(replaced)
        self._retain(step)
        return final

    def abandon(self, partial: Path) -> None:
        """Take away what a failed save has written. What cannot be taken away now is so when the next one begins."""
        if partial == self._partial:
            self._partial = None
            # Without the lock this is a forked child, and the save its parent's.
            if self._lock.is_held and partial.is_dir():
                self._remove(partial)

    def checkpoints(self) -> Mapping[int, Path]:
        """The folder of each step, newest first. They are whole, but their bytes may have been damaged since."""
        found: dict[int, Path] = {}
        for path in self._entries():
            hidden = _HIDDEN.fullmatch(path.name)
            # One that was moved aside counts where a process was killed before the new one had the name.
            name = hidden[1] if hidden and hidden[2] == "replaced" else path.name
            named = _STEP.fullmatch(name)
            if named and name == checkpoint_name(int(named[1])) and path.is_dir():
                found[int(named[1])] = path
        return {step: found[step] for step in sorted(found, reverse=True)}

    def newest_good(self) -> CheckpointReader | None:
        """The newest checkpoint of which every byte is as it was saved; None where nothing was saved yet.

        Where a newer one is damaged, a warning names its file and what is used instead.

        Raises:
            DamagedCheckpointError: There are checkpoints, and none is good.
            CheckpointError: One cannot be read for a reason that is not its own, such as its permissions.
        """
        damaged: list[DamagedCheckpointError] = []
        is_gone = False
        for step, folder in self.checkpoints().items():
            try:
                reader = opened(folder, step)
                reader.verify()
            except DamagedCheckpointError as error:
                if folder.exists():
                    damaged.append(error)
                # Otherwise another process saves here, and has taken this one away meanwhile.
                is_gone = is_gone or not folder.exists()
                continue
            if damaged:
                warnings.warn(f"{_listed(damaged)} {folder.name} is used instead", UserWarning, stacklevel=2)
            return reader
        if is_gone:
            return self.newest_good()
        if damaged:
            raise DamagedCheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.path} can be used. {_listed(damaged)} To begin anew, save "
                "into another folder",
                file=damaged[0].file,
            )
        return None

    def _entries(self) -> list[Path]:
        # Names without a dot come last, so that they win over those that were moved aside.
        try:
            return sorted(self.path.iterdir(), key=lambda path: (not path.name.startswith("."), path.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"cannot list {self.path}: {error.strerror}; see to its permissions") from error

    def _hidden(self, name: str, kind: str) -> Path:
        """A name that is still free: what could not be taken away may have the first."""
        host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())
        beginning = f".{name}.{kind}-{host}-{os.getpid()}"
        numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        return next(path for path in (self.path / f"{beginning}{number}" for number in numbers) if not path.exists())

    def _make_folder(self) -> None:
        missing = []
        folder = self.path.absolute()
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            with told_with_file(self._disk, path.parent, "make", path):
                self._disk.make_folder(path)
                self._disk.sync_folder(path.parent)

    def _moved_aside(self, final: Path) -> Path:
        """The former checkpoint of a step, under a name by which it still counts while the step's own is free."""
        replaced = self._hidden(final.name, "replaced")
        with told_with_file(self._disk, self.path, "rename", final):
            self._disk.rename(final, replaced)
            self._disk.sync_folder(self.path)
        return replaced

    def _rename_back(self, replaced: Path, final: Path) -> None:
        try:
            self._disk.rename(replaced, final)
            self._disk.sync_folder(self.path)
        except OSError as error:
            self._warn(
                f"{replaced.name} in {self.path} could not be renamed back to {final.name}: {error}; it is read as it is"
            )

    def _sweep(self) -> None:
        """Take away what killed writers left. Whoever holds the lock is the only writer, so nobody uses it."""
        for path in self._entries():
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden is None or path.is_symlink() or not path.is_dir():
                continue
            final = self.path / hidden[1]
            if hidden[2] == "replaced" and not final.exists():
                self._rename_back(path, final)
            else:
                self._remove(path)

    def _finish_retention(self) -> None:
        """Remove what a save would have that was killed when its checkpoint had its name: the next one may need the room.

        Nobody knows here that the newest ones are good, so that they are read through first.
        """
        self._is_retained = True
        surplus = list(self.checkpoints())[self._retention.keep :]
        if not all(map(self._retention.is_for_ever, surplus)):
            self._retain(None)

    def _retain(self, published: int | None) -> None:
        """Remove what no longer stays. The one just published is good and stays, so that never the last good one goes."""
        num_kept = 0
        for step, folder in self.checkpoints().items():
            if published is not None and step > published:
                newer = checkpoint_name(published)
                self._warn(
                    f"{folder.name} in {self.path} is of a later step than {newer}, which was saved just now; the "
                    "later one is loaded first: move it away unless that is meant"
                )
            if num_kept < self._retention.keep:
                num_kept += step == published or self._counts(step, folder, is_read=published is None)
            elif step != published and not self._retention.is_for_ever(step) and self._may_be_removed(folder):
                self._remove(folder)

    def _counts(self, step: int, folder: Path, *, is_read: bool) -> bool:
        """Whether it can be opened, and read if that is asked."""
        try:
            reader = opened(folder, step)
            if is_read:
                reader.verify()
        except CheckpointError as error:
            self._warn(f"{error}. It stays, and does not count as one of the {self._retention.keep} that are kept")
            return False
        return True

    def _may_be_removed(self, folder: Path) -> bool:
        """Whether all of it is a checkpoint's; what is somebody else's, or cannot be told, stays."""
        if folder.is_symlink():
            self._warn(f"{folder.name} in {self.path} stays: it is a link, and not Lowtide's")
            return False
        index = _index_of(folder)
        if index is None:
            self._warn(
                f"{folder.name} in {self.path} stays: it has no index by which its files could be told from others"
            )
            return False
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in index.file_names)
        if foreign:
            self._warn(
                f"{folder.name} in {self.path} stays: {foreign[0]} in it is no file of a checkpoint; move that away"
            )
        return not foreign

    def _remove(self, folder: Path) -> None:
        """Take a checkpoint, or what is left of one, away; on failure with a warning, and again when the next save begins."""
        try:
            hidden = _HIDDEN.fullmatch(folder.name)
            if hidden is None or hidden[2] == "replaced":
                # First the name: a process killed among the files must not leave a folder that looks whole.
                unnamed = self._hidden(hidden[1] if hidden else folder.name, "removed")
                self._disk.rename(folder, unnamed)
                self._disk.sync_folder(self.path)
                folder = unnamed
            self._remove_files(folder, all_are_own=hidden is not None and hidden[2] == "partial")
        except OSError as error:
            self._warn(f"{folder.name} in {self.path} could not be taken away: {error}; the next save tries again")

    def _remove_files(self, folder: Path, *, all_are_own: bool) -> None:
        index = _index_of(folder)
        left = []
        # The index goes last: it says which files are the checkpoint's, should the process be killed before.
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == INDEX_NAME, path.name)):
            known = path.name.endswith(_OWN_ENDINGS) if index is None else path.name in index.file_names
            is_own = all_are_own or known
            if is_own and (path.is_symlink() or not path.is_dir()):
                self._disk.unlink(path)
            else:
                left.append(path.name)
        if left:
            self._warn(f"{folder.name}/{left[0]} in {self.path} is no file of a checkpoint, and stays; move it away")
        else:
            self._disk.remove_folder(folder)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=2)


def opened(folder: Path, step: int) -> CheckpointReader:
    """The checkpoint in a folder that is named after a step.

    Raises:
        DamagedCheckpointError: It is damaged, or of another step.
    """
    reader = CheckpointReader(folder)
    if reader.index.step != step:
        raise DamagedCheckpointError(
            f"{folder.name}/{INDEX_NAME} in {folder.parent} cannot be used: it is of step {reader.index.step}. Give the folder "
            f"the name {checkpoint_name(reader.index.step)} again",
            file=f"{folder.name}/{INDEX_NAME}",
        )
    return reader


def checkpoint_name(step: int) -> str:
    """The name of the folder of a checkpoint of this step."""
    return f"step-{step:08d}"


def _listed(damaged: Sequence[DamagedCheckpointError]) -> str:
    return " ".join(f"{error}." for error in damaged)


def _index_of(folder: Path) -> Index | None:
    """None without a readable one."""
    try:
        return from_text((folder / INDEX_NAME).read_bytes())
    except (OSError, BadRecordError):
        return None
