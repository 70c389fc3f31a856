"""Progress: what a run tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is."""

    words: str
    """What is being done: `preparing the corpus`, `training`, `evaluating`."""
    step: int = 0
    """Updates made."""
    steps: int = 0
    """Updates of the whole run."""
    loss: float | None = None
    peak_bytes: int | None = None
    """The device's, so far."""
    samples_per_s: float | None = None
    """Of the last step."""
    evaluation_loss: float | None = None
    """Of an evaluation that is over, after the updates made; the one after the last is the record's alone."""


OnProgress = Callable[[Progress], None]
