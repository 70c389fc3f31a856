"""Batches from text: `8x2048` to a dictionary of tensors that fits a model.

A batch form says which tensors a family of models takes and what the text means for it. Values come from a fixed seed,
so the same text gives the same batch everywhere. They are real, on the host, because some models read them (padding
masks, for one).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import BatchMismatchError, TooLargeError
from lowtide.units import format_bytes

SEED = 0
MAX_BATCH_BYTES = 16 * 2**30
"""The inputs alone beyond this are a slip of the keyboard: what a model makes of them is hundreds of times larger."""

Batch = dict[str, Tensor]


class BatchForm(Protocol):
    """Turns the text of a batch into tensors."""

    @property
    def default(self) -> str:
        """The text of a usual batch for this model."""

    def __call__(self, text: str) -> Batch:
        """The batch that `text` describes; BatchMismatchError, with the accepted form, when it describes none."""


def parse_sizes(text: str, *, accepted: str) -> tuple[int, ...]:
    """`8x2048` as (8, 2048). Spaces do not matter, nor does a capital X.

    Args:
        text: What the user typed.
        accepted: The form to name in the error, with an example.
    """
    compact = re.sub(r"\s", "", text).lower()
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", compact):
        raise BatchMismatchError(f"{text!r} is not a batch: write {accepted}, with whole numbers above 0")
    return tuple(int(part) for part in compact.split("x"))


def random_ids(shape: tuple[int, ...], limit: int, *, seed: int = SEED) -> Tensor:
    """int64 ids below `limit` from a fixed seed."""
    _check_size(shape, itemsize=8)
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)


def random_floats(shape: tuple[int, ...], *, seed: int = SEED) -> Tensor:
    """fp32 normal values from a fixed seed."""
    _check_size(shape, itemsize=4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _check_size(shape: tuple[int, ...], *, itemsize: int) -> None:
    needed_bytes = math.prod(shape) * itemsize
    if needed_bytes > MAX_BATCH_BYTES:
        sizes = "x".join(map(str, shape))
        raise TooLargeError(
            f"one input of {sizes} takes {format_bytes(needed_bytes)} before the model runs, and no GPU could hold "
            f"the step; inputs up to {format_bytes(MAX_BATCH_BYTES)} are accepted: check the batch for a slip",
            needed_bytes=needed_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """`BATCHxLENGTH` token ids, which are their own labels for models that predict tokens."""

    vocab_size: int
    default_batch: int
    default_length: int
    max_length: int | None = None
    """Longest sequence the model has positions for; None where any length runs."""
    labels: Callable[[tuple[int, int]], Batch] | None = None
    """The labels, by argument, of sequences `[batch, length]`; None where they are the token ids themselves."""

    @property
    def default(self) -> str:
        """The text of a usual batch."""
        return f"{self.default_batch}x{self.default_length}"

    def __call__(self, text: str) -> Batch:
        """`input_ids`, `[batch, length]`, and the labels, of the same shape where they are the ids."""
        shape = self.shape(text)
        ids = random_ids(shape, self.vocab_size)
        return {"input_ids": ids, **({"labels": ids.clone()} if self.labels is None else self.labels(shape))}

    def shape(self, text: str) -> tuple[int, int]:
        """The two sizes that `text` asks for."""
        accepted = f"BATCHxLENGTH such as {self.default}, or BATCH alone for sequences of {self.default_length}"
        sizes = parse_sizes(text, accepted=accepted)
        if len(sizes) > 2:
            raise BatchMismatchError(
                f"{text!r} has {len(sizes)} sizes, and this model takes token ids: write {accepted}"
            )
        batch, length = sizes if len(sizes) == 2 else (sizes[0], self.default_length)
        if self.max_length is not None and length > self.max_length:
            raise BatchMismatchError(
                f"{text!r} asks for sequences of {length} tokens, and this model has {self.max_length} positions: "
                f"write {batch}x{self.max_length} or shorter"
            )
        return batch, length


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """`BATCHxCHANNELSxHEIGHTxWIDTH` random images with a class each."""

    num_classes: int
    default_batch: int
    num_channels: int
    height: int
    width: int

    @property
    def default(self) -> str:
        """The text of a usual batch."""
        return f"{self.default_batch}x{self.num_channels}x{self.height}x{self.width}"

    def __call__(self, text: str) -> Batch:
        """`pixel_values`, `[batch, channels, height, width]`, and `labels`, `[batch]`."""
        image = f"{self.num_channels}x{self.height}x{self.width}"
        accepted = f"BATCHxCHANNELSxHEIGHTxWIDTH such as {self.default}, or BATCH alone for images of {image}"
        sizes = parse_sizes(text, accepted=accepted)
        if len(sizes) not in (1, 4):
            raise BatchMismatchError(f"{text!r} has {len(sizes)} sizes, and this model takes images: write {accepted}")
        shape = sizes if len(sizes) == 4 else (sizes[0], self.num_channels, self.height, self.width)
        if shape[1] != self.num_channels:
            raise BatchMismatchError(
                f"{text!r} asks for images of {shape[1]} channels, and this model takes {self.num_channels}: "
                f"write {accepted}"
            )
        return {"pixel_values": random_floats(shape), "labels": random_ids(shape[:1], self.num_classes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """`BATCHxLENGTH`, or `BATCHxSOURCExTARGET`, for models that turn one sequence into another."""

    tokens: TokenBatch

    @property
    def default(self) -> str:
        """The text of a usual batch."""
        return self.tokens.default

    def __call__(self, text: str) -> Batch:
        """`input_ids`, `[batch, source]`, and `labels`, `[batch, target]`."""
        accepted = f"BATCHxLENGTH such as {self.default}, or BATCHxSOURCExTARGET"
        sizes = parse_sizes(text, accepted=accepted)
        if len(sizes) > 3:
            raise BatchMismatchError(
                f"{text!r} has {len(sizes)} sizes, and this model takes two sequences: write {accepted}"
            )
        source = self.tokens.shape("x".join(map(str, sizes[:2])))
        target = self.tokens.shape(f"{sizes[0]}x{sizes[2]}") if len(sizes) == 3 else source
        vocab_size = self.tokens.vocab_size
        return {"input_ids": random_ids(source, vocab_size), "labels": random_ids(target, vocab_size, seed=SEED + 1)}


def sequence_labels(num_labels: int, shape: tuple[int, int]) -> Batch:
    """One label a sequence: a class, or a number when there is one output only."""
    return {"labels": random_ids(shape[:1], num_labels) if num_labels > 1 else random_floats(shape[:1])}


def token_labels(num_labels: int, shape: tuple[int, int]) -> Batch:
    """A class for each token."""
    return {"labels": random_ids(shape, num_labels)}


def spans(shape: tuple[int, int]) -> Batch:
    """The span that answers the question in each sequence."""
    starts = random_ids(shape[:1], shape[1])
    return {"start_positions": starts, "end_positions": (starts + 1).clamp(max=shape[1] - 1)}
