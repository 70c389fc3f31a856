"""TextBatches: numbered batches of a corpus in its original order, every one of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import ConfigError
from lowtide.lab.bounds import at_least
from lowtide.lab.corpus.samples import Samples
from lowtide.lab.corpus.tokenizer import PAD_ID

IGNORED_LABEL = -100
"""What a loss leaves out."""


@dataclass(frozen=True, slots=True)
class TextBatches:
    """One sample a row, cut to `length` and padded on the right to exactly that; nothing is shuffled or packed.

    Labels are the ids themselves, with padding ignored: a model shifts them by one. Tensors are on the host and not
    pinned.

    Example:
        >>> samples = Samples(ids=np.array([0, 7, 8, 0, 9], dtype=np.uint16), offsets=np.array([0, 3, 5]))
        >>> TextBatches(samples, batch=2, length=4)(0)["labels"].tolist()
        [[0, 7, 8, -100], [0, 9, -100, -100]]
    """

    samples: Samples
    _: KW_ONLY
    batch: int
    """Samples at a time."""
    length: int
    """Tokens of each row."""
    pad_id: int = PAD_ID

    def __post_init__(self) -> None:
        at_least("batch", self.batch, 1)
        # One token has no next one to predict.
        at_least("length", self.length, 2)
        if not len(self.samples):
            raise ConfigError(
                "there are no samples to make batches of: for an evaluation, ask the data for a validation part "
                "(num_validation, or validation_share)",
                key="data",
            )

    def __call__(self, number: int) -> dict[str, Tensor]:
        """The batch of that number, from 0: `input_ids` and `labels`, both int64, `[batch, length]`.

        After the last sample comes the first again, within a batch too.
        """
        first = number * self.batch
        return self._gather([index % len(self.samples) for index in range(first, first + self.batch)])

    @property
    def num_batches(self) -> int:
        """Batches in which every sample is once, the last one perhaps with fewer rows than the others."""
        return -(-len(self.samples) // self.batch)

    def partial(self, number: int) -> dict[str, Tensor]:
        """One of these `num_batches`: like the batch of that number, but it ends where the samples do."""
        if not 0 <= number < self.num_batches:
            raise IndexError(f"batch {number} of {self.num_batches}")
        first = number * self.batch
        return self._gather(range(first, min(first + self.batch, len(self.samples))))

    def _gather(self, indices: Sequence[int]) -> dict[str, Tensor]:
        ids = np.full((len(indices), self.length), self.pad_id, dtype=np.int64)
        labels = np.full_like(ids, IGNORED_LABEL)
        for row, index in enumerate(indices):
            sample = self.samples[index][: self.length]
            ids[row, : len(sample)] = labels[row, : len(sample)] = sample
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
