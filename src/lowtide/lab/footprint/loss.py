"""FootprintLoss: makes the tensors by which a session judges a loss. A trace has no values: the verdict is not read."""

from __future__ import annotations

import torch

from lowtide.runtime.updates.finite import LossWatch


class FootprintLoss:
    """What `LossWatch` is in a session.

    Args:
        is_immediate: As there; the verdict is gone at once then.
    """

    def __init__(self, *, is_immediate: bool) -> None:
        self._watch = LossWatch(is_immediate=False)
        self._is_immediate = is_immediate

    @property
    def has_verdict(self) -> bool:
        """As in a session."""
        return self._watch.has_verdict

    def remember(self, output: object) -> None:
        """As in a session."""
        self._watch.remember(output)

    def forget_loss(self) -> None:
        """As in a session."""
        self._watch.forget_loss()

    def forget(self) -> None:
        """As in a session; also for the check in `step()`."""
        self._watch.forget()

    def judge(self, gradient: torch.Tensor | None) -> None:
        """As in a session, but for the answer."""
        self._watch.judge(gradient)
        if self._is_immediate:
            self._watch.forget()
