"""The curves of a run for TensorBoard, where its package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide import config, plain_text
from lowtide.lab.progress import Progress
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import RunRecord
from lowtide.units import GiB

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

NOT_INSTALLED = 'no TensorBoard curves: its package is not installed (pip install "lowtide[tensorboard]")'


class Board:
    """Writes scalars as they come. Whatever goes wrong here costs the curves, never the run.

    Args:
        folder: The run's own; made where it is missing.
        recipe: Written as text beside the curves.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.remarks: list[str] = []
        """What the record should say about the curves; empty where they are whole."""
        self._writer: SummaryWriter | None = None
        self._step = 0
        if importlib.util.find_spec("tensorboard") is None:
            self.remarks.append(NOT_INSTALLED)
            return
        try:
            # Seconds of import, and only where the package is there.
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(folder))
            text = plain_text.render(config.to_plain(recipe), "yaml")
            self._writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()))
        except Exception as error:
            self._give_up(error)

    def add(self, progress: Progress) -> None:
        """The figures of a step, once, and those of an evaluation after it."""
        self._add_scalars({"evaluation_loss": progress.evaluation_loss}, progress.step)
        if progress.step <= self._step:
            return
        self._step = progress.step
        peak_gib = None if progress.peak_bytes is None else progress.peak_bytes / GiB
        scalars = {"loss": progress.loss, "peak_gib": peak_gib, "samples_per_s": progress.samples_per_s}
        self._add_scalars(scalars, self._step)

    def finish(self, record: RunRecord) -> None:
        """The last evaluation's loss, and the end of the files."""
        self._add_scalars({"evaluation_loss": record.evaluation_loss}, self._step)
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._give_up(error)

    def _add_scalars(self, scalars: dict[str, float | None], step: int) -> None:
        try:
            for name, value in scalars.items():
                if self._writer is not None and value is not None:
                    self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        # A full disk, or a TensorBoard that does not go with this torch: hours of training are worth more.
        self._writer = None
        self.remarks.append(f"TensorBoard curves end at step {self._step}: {type(error).__name__}: {error}")
