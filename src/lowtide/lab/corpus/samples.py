"""Samples: token ids of many texts, end to end in one array, so that twenty thousand of them are read in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """One part of a corpus, in its original order."""

    ids: Ids
    """Of all samples, one after the other; 16 bits each where the vocabulary allows."""
    offsets: NDArray[np.int64]
    """Where each sample begins, and where the last one ends: one more than there are samples."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, number: int) -> Ids: ...
    @overload
    def __getitem__(self, number: slice) -> Samples: ...
    def __getitem__(self, number: int | slice) -> Ids | Samples:
        """The ids of one sample, or a run of samples: views, not copies."""
        if isinstance(number, slice):
            start, stop, step = number.indices(len(self))
            if step != 1:
                raise ValueError(f"samples are cut out in a run; the step is {step}")
            offsets = self.offsets[start : max(start, stop) + 1]
            return Samples(ids=self.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.ids[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[Ids]:
        return (self[number] for number in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.offsets)


def pack(samples: Iterable[list[int]], *, vocab_size: int) -> Samples:
    """Samples from lists of ids."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    # Arrays at once: lists of Python integers would take twenty times the memory.
    arrays = [np.array(ids, dtype=dtype) for ids in samples]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in arrays], out=offsets[1:])
    return Samples(ids=np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), offsets=offsets)
