"""A group runs again as it ran first, in training or in evaluation: the loop may have called `eval()` before its backward.

Without this a changed dropout or norm would save other tensors than in the forward, which torch's checkpoint notices by their
number at best, or as many with other values, which nobody notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


class TrainingModes:
    """Those of a group's modules at the moment at which it is made."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._modes = [part.training for part in parts]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run in these modes; those of now come back afterwards."""
        changed = [part for part, mode in zip(self._parts, self._modes, strict=True) if part.training is not mode]
        for part in changed:
            part.training = not part.training
        try:
            yield
        finally:
            for part in changed:
                part.training = not part.training
