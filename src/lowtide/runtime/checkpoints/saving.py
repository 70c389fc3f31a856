"""Saver: writes the contents of a session into run folders, one checkpoint after the other."""

from __future__ import annotations

from pathlib import Path

from lowtide import compat
from lowtide.runtime.checkpoints.contents import Contents
from lowtide.runtime.checkpoints.folder import Retention, RunFolder
from lowtide.runtime.checkpoints.format import CheckpointWriter


class Saver:
    """The saves of one session. It keeps the lock of the folder that it saves into, until `close` or the next folder."""

    def __init__(self) -> None:
        self._run: RunFolder | None = None
        self._retention: Retention | None = None

    def save(self, folder: Path, contents: Contents, *, step: int, retention: Retention) -> Path:
        """Write a checkpoint; it is whole, and has its name, when this returns. No tensor may change meanwhile.

        Raises:
            CheckpointError: It could not be written. The checkpoints from before are as they were.
        """
        with (
            self._opened(folder, retention).saving(step) as partial,
            CheckpointWriter(partial, contents.specs()) as writer,
        ):
            with compat.without_modes():
                for part in contents.parts:
                    for (file, name), tensor in part.tensors.items():
                        writer.write(file, name, tensor.detach().cpu().contiguous())
            for name, text in contents.files.items():
                writer.add_file(name, text)
            writer.finish(step=step, state=contents.state)
        return partial.parent / f"step-{step:08d}"

    def close(self) -> None:
        """Let others save into the folder."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _opened(self, folder: Path, retention: Retention) -> RunFolder:
        if self._run is None or self._run.path != folder or self._retention != retention:
            self.close()
            self._run, self._retention = RunFolder(folder, retention=retention), retention
        return self._run
