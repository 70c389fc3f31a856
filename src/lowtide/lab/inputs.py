"""What a run reads: numbered batches to train on, and those to evaluate with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lowtide.errors import ConfigError
from lowtide.lab.corpus import TextBatches, load_corpus
from lowtide.lab.data_recipe import RandomInputs
from lowtide.lab.recipe import Recipe
from lowtide.lab.training import Batch, make_batches
from lowtide.models import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Batches on the host."""

    train: Callable[[int], Batch]
    """By number, without end."""
    evaluation: Sequence[Batch]
    batch_size: int
    """Samples of a training batch."""


def check_vocabulary(recipe: Recipe, source: ModelSource) -> None:
    """Refuse a tokenizer with more words than the model's largest embedding has rows: it would be found out in mid-run.

    Raises:
        ConfigError: It has more.
    """
    if isinstance(recipe.data, RandomInputs):
        return
    tables = [module.num_embeddings for module in source.build(None).modules() if isinstance(module, nn.Embedding)]
    if tables and recipe.data.vocab_size > max(tables):
        raise ConfigError(
            f"data.vocab_size is {recipe.data.vocab_size}, and the largest embedding of {recipe.model} has {max(tables)} rows: "
            "lower data.vocab_size (260 or more), or set model_settings.vocab_size of a built-in model",
            key="data.vocab_size",
        )


def make_inputs(recipe: Recipe, source: ModelSource, on_words: Callable[[str], None]) -> Inputs:
    """The recipe's data as batches.

    Raises:
        ConfigError: The batch does not fit the model, a vocabulary does not, or there is no data.
    """
    shape = make_batches(recipe, source)(0)
    batch_size = next(iter(shape.values())).shape[0]
    if isinstance(recipe.data, RandomInputs):
        if recipe.evaluation is not None:
            raise ConfigError(
                "random inputs have nothing to evaluate on: leave evaluation out, or choose data such as {kind: stories}",
                key="evaluation",
            )
        return Inputs(train=make_batches(recipe, source), evaluation=(), batch_size=batch_size)
    if set(shape) != {"input_ids", "labels"} or shape["input_ids"].shape != shape["labels"].shape:
        raise ConfigError(
            f"{recipe.model} takes {', '.join(shape)}, and text makes input_ids and labels of one length: choose a model "
            "that predicts tokens, or data: {kind: random-inputs}",
            key="data",
        )
    length = shape["input_ids"].shape[1]
    corpus = load_corpus(recipe.data, on_progress=on_words)
    evaluation: Sequence[Batch] = ()
    if recipe.evaluation is not None:
        if not len(corpus.validation):
            raise ConfigError("evaluation is asked for, and the data has no validation samples", key="evaluation")
        part = corpus.validation[: recipe.evaluation.samples]
        batches = TextBatches(part, batch=recipe.evaluation.batch or batch_size, length=length)
        evaluation = [batches.partial(number) for number in range(batches.num_batches)]
    train = TextBatches(corpus.train, batch=batch_size, length=length)
    return Inputs(train=train, evaluation=evaluation, batch_size=batch_size)
