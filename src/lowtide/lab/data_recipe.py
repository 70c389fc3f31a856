"""The part of a recipe that says what the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lowtide.errors import ConfigError
from lowtide.lab.bounds import at_least

LEAST_VOCABULARY = 260
"""256 bytes, and the four tokens for beginning, padding, end and unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomInputs:
    """Random inputs of the model's own form, each batch different: for memory and speed, not for learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stories:
    """Short stories from the built-in generator, the same for the same seed everywhere."""

    seed: int = 0
    num_stories: int = 20_000
    """Of the training part; the tokenizer is trained on them."""
    num_validation: int = 500
    vocab_size: int = 8000
    """Of the tokenizer."""

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        at_least("num_stories", self.num_stories, 1)
        at_least("num_validation", self.num_validation, 0)
        at_least("vocab_size", self.vocab_size, LEAST_VOCABULARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """A text file, or all .txt files of a folder in the order of their names; blank lines part the samples."""

    path: Path
    validation_share: float = 0.05
    """Of the samples, from the end."""
    vocab_size: int = 8000

    def __post_init__(self) -> None:
        at_least("vocab_size", self.vocab_size, LEAST_VOCABULARY)
        if not 0.0 <= self.validation_share < 1.0:
            raise ConfigError(
                f"validation_share is {self.validation_share}; give a number from 0 up to, not including, 1",
                key="validation_share",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """A data set of the Hugging Face hub, or one in its local cache; needs the package `datasets`."""

    name: str
    column: str = "text"
    train_split: str = "train"
    validation_split: str = "validation"
    vocab_size: int = 8000

    def __post_init__(self) -> None:
        at_least("vocab_size", self.vocab_size, LEAST_VOCABULARY)


DataRecipe = RandomInputs | Stories | TextFiles | HubDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecipe:
    """The loss on the validation samples after the last step, and after others that are named."""

    samples: int = 500
    """From the beginning of the validation part; stories must be as many, of a text with fewer all are taken, with a remark."""
    batch: int | None = None
    """Samples at a time; None: as many as a training batch has, so that the evaluation does not set the peak."""
    after: tuple[int, ...] = ()
    """Steps, counted from 1, after which the model is evaluated as well; the training goes on as if it had not been."""

    def __post_init__(self) -> None:
        at_least("samples", self.samples, 1)
        at_least("batch", 1 if self.batch is None else self.batch, 1)
        if any(step <= before for before, step in pairwise((0, *self.after))):
            raise ConfigError(
                f"after is {list(self.after)}; give numbers of steps from 1 on, each larger than the one before",
                key="after",
            )
