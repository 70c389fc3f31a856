"""What a run reads: token sequences of one length, in an order that is a pure function of the seed and the position.

Tokens lie in files (or in a text's bytes) that are mapped, not read: a run takes no memory for its data. The sequences of all
files are numbered through; what is left of a file after its last whole sequence is not read. Each epoch visits every sequence
once, in an order that needs no table: a permutation is computed for each position. So a run that goes on at any step needs
nothing but the number of the step.
"""

from __future__ import annotations

import bisect
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide.errors import ConfigError, DataError
from lowtide.lab.corpus.texts import find_files
from lowtide.lab.training import Batch
from lowtide.train.recipe import DataRecipe

Ids = NDArray[np.integer[Any]]
TOKEN_SUFFIXES = (".npy", ".bin")
_ROUNDS = 4
"""Of the Feistel network that permutes: four make it as good as random to any test of its size."""
_MASK = (1 << 64) - 1


# -- order -------------------------------------------------------------------------------------------------------------


def permuted(index: int, count: int, key: int) -> int:
    """The place of `index` in an order of `count` things that the key decides; each index has a place of its own.

    A Feistel network permutes the numbers of an even number of bits; what falls outside of `count` is permuted again.

    Example:
        >>> sorted(permuted(index, 10, key=7) for index in range(10)) == list(range(10))
        True
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right ^ _mixed(key + turn)) & mask)
        index = left << half | right
        if index < count:
            return index


def _mixed(value: int) -> int:
    """64 bits that all depend on all bits of the value: the finaliser of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mixed_seed(seed: int, number: int) -> int:
    """A seed for the part of a run with that number, unlike those of other seeds and numbers."""
    return _mixed(_mixed(seed) ^ number)


# -- sequences ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """Numbered sequences of one length."""

    arrays: Sequence[Ids]
    """The tokens of each file."""
    names: Sequence[str]
    """Of the files, for messages."""
    length: int
    start: int = 0
    """The first of all sequences that belongs to these."""
    stop: int | None = None
    """Where these end; None: with the last."""
    ends: tuple[int, ...] = field(init=False)
    """How many sequences there are up to the end of each file."""

    def __post_init__(self) -> None:
        counts = accumulate(len(array) // self.length for array in self.arrays)
        object.__setattr__(self, "ends", tuple(counts))  # frozen, so set past the guard

    def __len__(self) -> int:
        return max(0, (self.ends[-1] if self.stop is None else self.stop) - self.start)

    def __getitem__(self, number: int) -> Ids:
        """The ids of one: a view."""
        return self._located(number)[0]

    def where(self, number: int) -> str:
        """Its file and the place of its first token there, in words."""
        _, name, first = self._located(number)
        return f"{name}, at token {first:,}"

    def _located(self, number: int) -> tuple[Ids, str, int]:
        assert 0 <= number < len(self), "a sequence of these"
        file = bisect.bisect_right(self.ends, self.start + number)
        first = (self.start + number - (self.ends[file - 1] if file else 0)) * self.length
        return self.arrays[file][first : first + self.length], self.names[file], first


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatches:
    """Numbered batches, without end: epoch after epoch, each in an order of its own."""

    sequences: Sequences
    batch: int
    """Sequences at a time."""
    vocab_size: int
    """Larger ids are refused: a model has no row for them."""
    seed: int | None
    """Of the orders; None keeps that of the files."""

    def __call__(self, number: int) -> Batch:
        """The batch of that number, from 0: `input_ids` and `labels`, int64, `[batch, length]`; a model shifts the labels.

        Raises:
            DataError: A token is not in the vocabulary, or its file cannot be read.
        """
        first = number * self.batch
        return self._gathered([self._place(position) for position in range(first, first + self.batch)])

    def in_order(self, count: int) -> Sequence[Batch]:
        """So many batches at most, in the order of the files, the last perhaps with fewer sequences."""
        total = len(self.sequences)
        starts = range(0, total, self.batch)[:count]
        return [self._gathered(list(range(start, min(start + self.batch, total)))) for start in starts]

    def _place(self, position: int) -> int:
        epoch, index = divmod(position, len(self.sequences))
        if self.seed is None:
            return index
        return permuted(index, len(self.sequences), mixed_seed(self.seed, epoch))

    def _gathered(self, numbers: Sequence[int]) -> Batch:
        rows = np.empty((len(numbers), self.sequences.length), dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = self.sequences[number]
            largest = int(row.max())
            if largest >= self.vocab_size or int(row.min()) < 0:
                wrong = largest if largest >= self.vocab_size else int(row.min())
                raise DataError(
                    f"token {wrong} of the sequence in {self.sequences.where(number)}, is not one of the model's "
                    f"{self.vocab_size:,}: the tokens were made by another tokenizer, or data.bin_type is wrong"
                )
        ids = torch.from_numpy(rows)
        return {"input_ids": ids, "labels": ids.clone()}


# -- files -------------------------------------------------------------------------------------------------------------


def token_files(path: Path) -> list[Path]:
    """The file itself, or the token files of a folder in the order of their names.

    Raises:
        ConfigError: There is none.
    """
    if path.is_file():
        if path.suffix not in TOKEN_SUFFIXES:
            raise ConfigError(
                f"{path} is no token file: give a .npy or .bin file, or a text as data.text", key="data.tokens"
            )
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"there is no file or folder {path}: give a .npy or .bin file, or a folder of them", key="data.tokens"
        )
    found = sorted(file for file in path.iterdir() if file.suffix in TOKEN_SUFFIXES)
    if not found:
        raise ConfigError(f"the folder {path} has no .npy or .bin files: give another folder", key="data.tokens")
    return found


def mapped_tokens(file: Path, bin_type: str) -> Ids:
    """The tokens of a file, mapped.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        if file.suffix == ".npy":
            array: Ids = np.load(file, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "ui":
                raise ConfigError(
                    f"{file} holds an array of {array.dtype} with {array.ndim} dimensions: give whole numbers in one",
                    key="data.tokens",
                )
            return array
        num_bytes, width = file.stat().st_size, np.dtype(bin_type).itemsize
        if num_bytes % width:
            raise ConfigError(
                f"{file} has {num_bytes:,} bytes, which is no whole number of {bin_type}: set data.bin_type, or make the "
                "file again",
                key="data.bin_type",
            )
        return _mapped(file, f"<u{width}")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read the tokens of {file}: {error}", key="data.tokens") from error


def mapped_bytes(file: Path) -> Ids:
    """The bytes of a text, mapped.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return _mapped(file, "u1")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", key="data.text") from error


def _mapped(file: Path, dtype: str) -> Ids:
    if not file.stat().st_size:  # nothing cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


_WHOLE = 64 << 20
_PIECE = 1 << 20


def fingerprint(files: Sequence[Path]) -> str:
    """A hash of the files' sizes and contents; of one larger than 64 MiB of as many pieces of 1 MiB, spread over it.

    Raises:
        ConfigError: A file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        try:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                steps = range(0, size, _PIECE if size <= _WHOLE else size // (_WHOLE // _PIECE))
                for offset in steps:
                    file.seek(offset)
                    digest.update(file.read(_PIECE))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", key="data") from error
    return digest.hexdigest()[:24]


def source_files(data: DataRecipe, path: Path) -> list[Path]:
    """The files of texts, or of tokens, that a path of the recipe stands for.

    Raises:
        ConfigError: There is none.
    """
    if data.tokens is not None:
        return token_files(path)
    try:
        return find_files(path)
    except ConfigError as error:
        raise ConfigError(str(error), key="data.text") from error


def divided(sequences: Sequences, share: float) -> tuple[Sequences, Sequences | None]:
    """Those to train on, and those at the end to evaluate on, one at least; None where the share is 0.

    Raises:
        ConfigError: Nothing would be left to train on.
    """
    if not share:
        return sequences, None
    total = len(sequences)
    held_out = max(1, round(total * share))
    if held_out >= total:
        raise ConfigError(
            f"the text has {total} sequences of {sequences.length} tokens, and data.held_out_share={share} leaves none to "
            "train on: give more text, shorter sequences, or data.held_out_share=0",
            key="data.held_out_share",
        )
    arrays, names, length = sequences.arrays, sequences.names, sequences.length
    cut = total - held_out
    return (
        Sequences(arrays=arrays, names=names, length=length, stop=cut),
        Sequences(arrays=arrays, names=names, length=length, start=cut),
    )


# -- ahead of the loop -------------------------------------------------------------------------------------------------

_PATIENCE_S = 5.0


class Prefetch:
    """Makes the next batches in a thread of its own, while a step runs.

    Args:
        make: Gives the batch of a number.
        first: The number of the first.
        depth: Batches that wait at most.
    """

    def __init__(self, make: Callable[[int], Batch], first: int, *, depth: int = 2) -> None:
        self._make = make
        self._next = first
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(first,), name="lowtide-data", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        """The next batch.

        Raises:
            DataError: It could not be made; the message has the number of the batch and the cause.
        """
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise DataError(f"batch {self._next} could not be made: {_told(item)}") from item
        self._next += 1
        return item

    def close(self) -> None:
        """End the thread; one that hangs, on a disk that does not answer, is left to the end of the process. May be repeated."""
        self._is_over.set()
        end_s = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < end_s:
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(0.01)

    def _work(self, number: int) -> None:
        item: Batch | BaseException
        while not self._is_over.is_set():
            try:
                item = self._make(number)
            except BaseException as error:  # the loop raises it
                item = error
            self._queue.put(item)
            if isinstance(item, BaseException):
                return
            number += 1


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
