"""Saves a run between two of its steps, when that is due, and brings it back to where it was saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.loading import load
from lowtide.train.model import Trained
from lowtide.train.recipe import CheckpointRecipe

_SCALER = "scaler"


class Keeper:
    """The checkpoints of one run.

    Args:
        folder: Where they are.
        recipe: When they are due, and which stay.
        clock: In seconds.
    """

    def __init__(self, folder: Path, recipe: CheckpointRecipe, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._recipe, self._clock = folder, recipe, clock
        self._begun_at_s = clock()
        self.newest: Path | None = None
        """The last checkpoint that this start saved or loaded."""
        self.saved_step: int | None = None
        """Its step."""
        self.saved_at_s: float | None = None
        """When that was, by the clock."""
        self.save_s: float | None = None
        """How long the last save took; None before the first."""

    @property
    def expected_s(self) -> float | None:
        """How long the next save will take, with some room; None before the first."""
        return None if self.save_s is None else 1.2 * self.save_s

    def find(self) -> int | None:
        """The step of the last good checkpoint; None where nothing is saved yet.

        Raises:
            CheckpointError: There are checkpoints, and none is good.
        """
        reader = RunFolder(self._folder).newest_good()
        if reader is None:
            return None
        self.newest, self.saved_step = reader.folder, reader.index.step
        return self.saved_step

    def load(self, trained: Trained, say: Callable[[str], None]) -> int:
        """Bring a session to the last checkpoint of this run, and give its step: 0 where there is none.

        Raises:
            CheckpointError: It cannot be loaded.
        """
        self._begun_at_s = self._clock()
        if self.newest is None:
            return 0
        say("loading the last checkpoint")
        return load(self.newest, trained.session, state=_objects(trained)).step

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be made after this step."""
        every, minutes = self._recipe.every, self._recipe.minutes
        is_old = minutes is not None and self._clock() - self._begun_at_s >= 60 * minutes
        return is_old or (every is not None and step % every == 0)

    def save(self, trained: Trained, step: int) -> None:
        """Save the run as it is after this step.

        Raises:
            CheckpointError: It could not be written; the checkpoints from before are as they were.
        """
        began_s = self._begun_at_s = self._clock()
        self.newest = trained.session.save(
            self._folder,
            step=step,
            state=_objects(trained),
            keep=self._recipe.keep,
            keep_every=self._recipe.keep_every,
        )
        self.saved_step, self.saved_at_s = step, self._clock()
        self.save_s = self.saved_at_s - began_s


def _objects(trained: Trained) -> dict[str, object]:
    """What belongs to the run beside its session. Batches and learning rates come from the number of the step."""
    return {} if trained.scaler is None else {_SCALER: trained.scaler}
