"""ModelOutput: what every reference model's forward returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The loss and the logits, under the names that Hugging Face gives them.

    `model(**batch).loss` drops this object, and with it the last reference to the logits, before the backward starts.
    Keep the object itself and the logits live through the backward too, which costs their bytes at the peak.
    """

    loss: Tensor | None
    """Scalar; None when no labels were given."""
    logits: Tensor | None
    """One score per class: `[batch, length, vocab]` for text, `[batch, classes]` for images; None where the loss was
    computed without them."""
