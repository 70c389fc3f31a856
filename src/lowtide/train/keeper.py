"""Saves a run between two of its steps, when that is due, and brings it back to where it was saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lowtide.errors import BudgetError, CheckpointError
from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.loading import load
from lowtide.train.model import Trained
from lowtide.train.recipe import CheckpointRecipe

_SCALER = "scaler"
_ROOM = 1.2
"""By which a save may take longer than the one before."""


class Keeper:
    """The checkpoints of one run.

    Args:
        folder: Where they are.
        recipe: When they are due, and which stay.
        clock: In seconds.
    """

    def __init__(self, folder: Path, recipe: CheckpointRecipe, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._recipe, self._clock = folder, recipe, clock
        self._allowance = recipe.allowance
        self._begun_at_s = clock()
        self._under_way: int | None = None
        """The step of the save that is under way."""
        self.saved_step: int | None = None
        """Of the last checkpoint that is whole."""
        self.saved_at_s: float | None = None
        """When that was, by the clock; None where an earlier start saved it."""
        self.save_s: float | None = None
        """How long the last save took; None before the first."""

    @property
    def expected_s(self) -> float | None:
        """How long the next save will take, with some room; None before the first."""
        return None if self.save_s is None else _ROOM * self.save_s

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._under_way is not None

    def find(self) -> int | None:
        """The step of the last checkpoint, as its name says; None where nothing is saved yet."""
        self.saved_step = next(iter(RunFolder(self._folder).checkpoints()), None)
        return self.saved_step

    def folder_of_last(self) -> Path:
        """The last checkpoint whose every byte is as it was saved.

        Raises:
            CheckpointError: There is none.
        """
        reader = RunFolder(self._folder).newest_good()
        if reader is None:
            raise CheckpointError(f"{self._folder} has no checkpoint; train the run first")
        self.saved_step = reader.index.step
        return reader.folder

    def load(self, trained: Trained, say: Callable[[str], None]) -> int:
        """Bring a session to the last good checkpoint, and give its step: 0 where there is none.

        Raises:
            CheckpointError: There are checkpoints, and none is good, or they are of another model.
        """
        self._begun_at_s, self._under_way = self._clock(), None
        if self.find() is None:
            return 0
        say("loading the last checkpoint")
        self.saved_step = load(self._folder, trained.session, state=_objects(trained)).step
        return self.saved_step

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be made after this step."""
        every, minutes = self._recipe.every, self._recipe.minutes
        is_old = minutes is not None and self._clock() - self._begun_at_s >= 60 * minutes
        return is_old or (every is not None and step % every == 0)

    def save(self, trained: Trained, step: int) -> None:
        """Begin to save the run as it is after this step. None may be under way.

        Raises:
            CheckpointError: It could not be written; the checkpoints from before are as they were.
        """
        assert self._under_way is None, "the one before is waited for"
        self._begun_at_s = self._clock()
        try:
            self._save(trained, step, self._allowance)
        except BudgetError:
            # The plan has all that the host may have: the training waits instead.
            self._allowance = None
            self._save(trained, step, None)
        self._under_way = step
        if self._allowance is None:
            self.wait(trained)

    def look(self, trained: Trained) -> bool:
        """Whether a save has come to its end since this was last asked.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._under_way is None or trained.session.is_saving:
            return False
        self.wait(trained)
        return True

    def wait(self, trained: Trained) -> None:
        """Wait until the save under way is over.

        Raises:
            CheckpointError: It could not be written.
        """
        step, self._under_way = self._under_way, None
        trained.session.wait_for_save()
        if step is not None:
            self.saved_step, self.saved_at_s = step, self._clock()
            saves = trained.session.stats().saves
            if saves:  # rank 0's: it writes for all
                self.save_s = saves[-1].seconds

    def _save(self, trained: Trained, step: int, allowance: str | int | None) -> None:
        trained.session.save(
            self._folder,
            step=step,
            state=_objects(trained),
            keep=self._recipe.keep,
            keep_every=self._recipe.keep_every,
            allowance=allowance,
        )


def _objects(trained: Trained) -> dict[str, object]:
    """What belongs to the run beside its session. Batches and learning rates come from the number of the step."""
    return {} if trained.scaler is None else {_SCALER: trained.scaler}
