"""Where in a save a process is, told by its page; and a kill at one operation of it.

The operations are those of `checkpoints.disk`, the copies of a snapshot, and the methods of a run's folder around them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.runtime.checkpoints import snapshot
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.index import INDEX_NAME
from tests.faults.forks import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAt:
    """An operation at which a process kills itself."""

    phase: str
    number: int
    """Counted from 0 over the process's life."""
    where: str
    """`before`, `within` (a write has written half of its bytes) or `after`."""


@dataclass(slots=True)
class Watch:
    """Tells the page of each operation of a save, and kills at one of them."""

    page: Page
    kill: KillAt | None = None
    _counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _outer: str | None = None
    """Of a phase with operations of several kinds."""

    def install(self) -> None:
        """Watch all that this process saves, to its end."""
        for name, phase in (
            ("make_folder", "beginning"),
            ("create", "beginning"),
            ("sync", "syncing"),
            ("sync_folder", "syncing"),
            ("rename", "renaming"),
            ("unlink", "retaining"),
            ("remove_folder", "retaining"),
        ):
            self.wrap(Disk, name, functools.partial(self.operation, phase))
        self.wrap(Disk, "write", self._write)
        self.wrap(snapshot._Tensor, "read", functools.partial(self.operation, "copying"))
        self.wrap(RunFolder, "begin", functools.partial(self._section, "beginning"))
        self.wrap(RunFolder, "_retain", functools.partial(self._section, "retaining"))
        self.wrap(RunFolder, "publish", self._to_the_end)
        self.wrap(RunFolder, "abandon", self._to_the_end)

    def wrap(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        """Calls of a method, or of a module's function, go through another one, which gets the original first."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    def operation(self, phase: str, run: Callable[..., Any], *args: Any) -> Any:
        """One call, which belongs to a phase."""
        with self._entered(phase):
            return run(*args)

    def _write(self, run: Callable[..., Any], disk: Disk, descriptor: int, data: memoryview, offset: int) -> Any:
        # The index is the last file.
        is_index = Path(f"/proc/self/fd/{descriptor}").readlink().name == INDEX_NAME
        half = functools.partial(run, disk, descriptor, data[: len(data) // 2], offset)
        with self._entered("finishing" if is_index else "writing", within=half):
            return run(disk, descriptor, data, offset)

    def _section(self, phase: str, run: Callable[..., Any], *args: Any) -> Any:
        with self._entered(phase):
            self._outer = phase
            try:
                return run(*args)
            finally:
                self._outer = None

    def _to_the_end(self, run: Callable[..., Any], *args: Any) -> Any:
        result = run(*args)
        self.page.phase = "training"
        return result

    @contextlib.contextmanager
    def _entered(self, phase: str, within: Callable[[], object] | None = None) -> Iterator[None]:
        phase = self._outer or phase
        self.page.phase = phase
        with self._lock:
            number = self._counts.get(phase, 0)
            self._counts[phase] = number + 1
        is_it = self.kill is not None and (self.kill.phase, self.kill.number) == (phase, number)
        where = self.kill.where if is_it and self.kill is not None else None
        if where == "before" or (where == "within" and within is None):
            kill_me()
        if where == "within" and within is not None:
            within()
            kill_me()
        yield
        if where == "after":
            kill_me()


def kill_me() -> None:
    """End this process as the system's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def leftovers(folder: Path) -> list[str]:
    """What stands in a run's folder and is no checkpoint."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock")
