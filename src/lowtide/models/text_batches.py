"""Batch forms of the text models that do not predict their own input: pairs of sequences, and other labels."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import BatchMismatchError
from lowtide.models.batches import SEED, Batch, TokenBatch, parse_sizes, random_floats, random_ids


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLabelBatch:
    """`BATCHxLENGTH` with one label a sequence: a class, or a number when there is one output only."""

    tokens: TokenBatch
    num_labels: int

    @property
    def default(self) -> str:
        """The text of a usual batch."""
        return self.tokens.default

    def __call__(self, text: str) -> Batch:
        """`input_ids`, `[batch, length]`, and `labels`, `[batch]`."""
        shape = self.tokens.shape(text)
        labels = random_ids(shape[:1], self.num_labels) if self.num_labels > 1 else random_floats(shape[:1])
        return {"input_ids": random_ids(shape, self.tokens.vocab_size), "labels": labels}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLabelBatch:
    """`BATCHxLENGTH` with a class for each token."""

    tokens: TokenBatch
    num_labels: int

    @property
    def default(self) -> str:
        """The text of a usual batch."""
        return self.tokens.default

    def __call__(self, text: str) -> Batch:
        """`input_ids` and `labels`, both `[batch, length]`."""
        shape = self.tokens.shape(text)
        return {"input_ids": random_ids(shape, self.tokens.vocab_size), "labels": random_ids(shape, self.num_labels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBatch:
    """`BATCHxLENGTH` with the span that answers the question in each sequence."""

    tokens: TokenBatch

    @property
    def default(self) -> str:
        """The text of a usual batch."""
        return self.tokens.default

    def __call__(self, text: str) -> Batch:
        """`input_ids`, `[batch, length]`, `start_positions` and `end_positions`, `[batch]`."""
        shape = self.tokens.shape(text)
        starts = random_ids(shape[:1], shape[1])
        return {
            "input_ids": random_ids(shape, self.tokens.vocab_size),
            "start_positions": starts,
            "end_positions": (starts + 1).clamp(max=shape[1] - 1),
        }
