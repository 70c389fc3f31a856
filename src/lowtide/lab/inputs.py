"""What a run reads: numbered batches to train on, and those to evaluate with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lowtide.errors import ConfigError
from lowtide.lab.corpus.tokens import TextBatches, load_corpus
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import LEAST_VOCABULARY, RandomInputs, Stories, TextFiles
from lowtide.lab.training import Batch, make_batches
from lowtide.models import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads: batches on the host."""

    train: Callable[[int], Batch]
    """Gives the batch of any number."""
    evaluation: Sequence[Batch]
    batch_size: int
    """How many samples a training batch has."""
    remarks: tuple[str, ...] = ()
    """What differs from what the recipe asks for."""


def check_vocabulary(recipe: Recipe, source: ModelSource) -> None:
    """Refuse a tokenizer with more words than the model's largest embedding has rows: it would be found out in mid-run.

    Raises:
        ConfigError: It has more.
    """
    if isinstance(recipe.data, RandomInputs):
        return
    tables = [module.num_embeddings for module in source.build(None).modules() if isinstance(module, nn.Embedding)]
    if tables and recipe.data.vocab_size > max(tables):
        # A tokenizer has a least size, which a model for tests may be below.
        can_lower = max(tables) >= LEAST_VOCABULARY
        lower = f"lower data.vocab_size to {max(tables)} or less, or " if can_lower else ""
        raise ConfigError(
            f"data.vocab_size is {recipe.data.vocab_size}, and the largest embedding of {recipe.model} has {max(tables)} rows: "
            f"{lower}set model_settings.vocab_size of a built-in model",
            key="data.vocab_size",
        )


def check_inputs(recipe: Recipe, source: ModelSource) -> Batch:
    """A batch of the shape that all have; no text is read for it.

    Raises:
        ConfigError: The batch does not fit the model, its data does not, or there is nothing to evaluate on.
    """
    shape = make_batches(recipe, source)(0)
    if isinstance(recipe.data, RandomInputs):
        if recipe.evaluation is not None:
            raise ConfigError(
                "random inputs have nothing to evaluate on: leave evaluation out, or choose data such as {kind: stories}",
                key="evaluation",
            )
        return shape
    if recipe.evaluation is not None:
        asked = {Stories: "num_validation", TextFiles: "validation_share"}.get(type(recipe.data))
        if asked is not None and not getattr(recipe.data, asked):
            raise ConfigError(
                f"evaluation is asked for, and data.{asked} is 0: raise it, or leave evaluation out", key="evaluation"
            )
        # The samples of a text are not counted yet: there the run takes what it has, and its record says so.
        if isinstance(recipe.data, Stories) and recipe.evaluation.samples > recipe.data.num_validation:
            raise ConfigError(
                f"evaluation.samples is {recipe.evaluation.samples}, and data.num_validation is "
                f"{recipe.data.num_validation}: lower the first, or raise the second",
                key="evaluation.samples",
            )
    if set(shape) != {"input_ids", "labels"} or shape["input_ids"].shape != shape["labels"].shape:
        raise ConfigError(
            f"{recipe.model} takes {', '.join(shape)}, and text makes input_ids and labels of one length: choose a model "
            "that predicts tokens, or data: {kind: random-inputs}",
            key="data",
        )
    if shape["input_ids"].shape[1] < 2:
        raise ConfigError(
            "batch has sequences of 1 token, which leaves no next one to predict: give 2 tokens or more", key="batch"
        )
    return shape


def make_inputs(recipe: Recipe, source: ModelSource, on_words: Callable[[str], None]) -> Inputs:
    """The recipe's data as batches.

    Raises:
        ConfigError: The batch does not fit the model, a vocabulary does not, or there is no data.
    """
    shape = check_inputs(recipe, source)
    batch_size = next(iter(shape.values())).shape[0]
    if isinstance(recipe.data, RandomInputs):
        return Inputs(train=make_batches(recipe, source), evaluation=(), batch_size=batch_size)
    length = shape["input_ids"].shape[1]
    corpus = load_corpus(recipe.data, on_progress=on_words)
    evaluation: Sequence[Batch] = ()
    remarks: tuple[str, ...] = ()
    if recipe.evaluation is not None:
        if not len(corpus.validation):
            raise ConfigError("evaluation is asked for, and the data has no validation samples", key="evaluation")
        part = corpus.validation[: recipe.evaluation.samples]
        if len(part) < (asked := recipe.evaluation.samples):
            samples = "1 sample" if len(part) == 1 else f"{len(part)} samples"
            remarks = (f"evaluated on {samples}, all that the data has for it: evaluation.samples asks for {asked}",)
        batches = TextBatches(part, batch=recipe.evaluation.batch or batch_size, length=length)
        evaluation = [batches.partial(number) for number in range(batches.num_batches)]
    train = TextBatches(corpus.train, batch=batch_size, length=length)
    return Inputs(train=train, evaluation=evaluation, batch_size=batch_size, remarks=remarks)
