"""The model of a run with its optimizer and session: built, filled with its weights, and inside its memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from lowtide.errors import BadRecordError, ConfigError, TraceError
from lowtide.lab import training
from lowtide.lab.training import Batch
from lowtide.models import ModelSource, resolve_model
from lowtide.models.batches import TokenBatch
from lowtide.optim.loss_scaler import LossScaler
from lowtide.optim.update_types import numerics_of
from lowtide.planning.plan import Site, Weights
from lowtide.runtime.parameters.weight_file import WeightFile
from lowtide.runtime.planner import prepare
from lowtide.runtime.session import Session
from lowtide.train.recipe import TrainRecipe
from lowtide.train.team import Team


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What is trained."""

    source: ModelSource
    recipe: TrainRecipe
    """With the type of the weights, where that was left to the model."""
    shape: tuple[int, int]
    """Of a batch: sequences, tokens."""
    vocab_size: int
    """Tokens that the model has rows for."""
    device: torch.device

    @property
    def tokens_per_step(self) -> int:
        """Of all backward calls of an update."""
        return self.shape[0] * self.shape[1] * self.recipe.accumulation


def find_subject(recipe: TrainRecipe) -> Subject:
    """The model that a recipe names, checked as far as that goes without weights.

    Raises:
        ConfigError: The batch does not fit the model, its weights are not of the precision's type, it does not predict tokens, or
            an emulated device has no size.
        UnknownNameError: There is no such model.
        HardwareError: The device is not here.
    """
    device = training.find_device(recipe.device)
    if device.type == "cpu" and recipe.device_memory is None:
        raise ConfigError(
            "there is no GPU in this run, and an emulated device has no size of its own: give --set device_memory=2GiB, or as "
            "much as the device that you mean has",
            key="device_memory",
        )
    source = resolve_model(recipe.model, settings=recipe.model_settings)
    if source.loss is not None:
        raise ConfigError(
            f"{source.name} brings a loss of its own, and a run trains a model whose output has one; have its forward return "
            "the loss",
            key="model",
        )
    empty = source.build(None if recipe.dtype is None else recipe.torch_dtype)
    recipe = _with_dtype(recipe, source, empty)
    return Subject(
        source=source,
        recipe=recipe,
        shape=_shape(recipe, source),
        vocab_size=_vocab_size(source, empty),
        device=device,
    )


def _vocab_size(source: ModelSource, empty: nn.Module) -> int:
    """Tokens that the model has rows for: as its batches know, else the rows of its largest embedding."""
    if isinstance(source.make_batch, TokenBatch):
        return source.make_batch.vocab_size
    return max((module.num_embeddings for module in empty.modules() if isinstance(module, nn.Embedding)), default=0)


def _with_dtype(recipe: TrainRecipe, source: ModelSource, empty: nn.Module) -> TrainRecipe:
    """The recipe with the type that its model names: the type of most weights."""
    if recipe.dtype is not None:
        return recipe
    sizes: dict[torch.dtype, int] = {}
    for parameter in empty.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    found = str(max(sizes, key=lambda each: sizes[each])).removeprefix("torch.")
    if recipe.precision is not None:
        wanted = str(numerics_of(recipe.precision, recipe.moments)[0].dtype).removeprefix("torch.")
        if wanted != found:
            raise ConfigError(
                f"precision is {recipe.precision!r}, which is for weights in {wanted}, and those of {source.name} are in "
                f"{found}: set dtype to {wanted}, or choose another precision",
                key="precision",
            )
    return replace(recipe, dtype=found)


def _shape(recipe: TrainRecipe, source: ModelSource) -> tuple[int, int]:
    try:
        batch = source.make_batch(recipe.batch or source.default_batch)
    except TraceError as error:
        # It was written for tracing, where a batch that does not fit is an error of the run; here the recipe is wrong.
        raise ConfigError(f"'batch': {error}", key="batch") from error
    if set(batch) != {"input_ids", "labels"} or batch["input_ids"].shape != batch["labels"].shape:
        raise ConfigError(
            f"{recipe.model} takes {', '.join(batch)}, and text makes input_ids and labels of one length: choose a model that "
            "predicts tokens",
            key="model",
        )
    rows, length = batch["input_ids"].shape
    if length < 2:
        raise ConfigError(
            "batch has sequences of 1 token, which leaves no next one to predict: give 2 tokens or more", key="batch"
        )
    return rows, length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """A model under management, with what its loop needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Session
    scaler: LossScaler | None
    """Of a loss in fp16."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's own update runs on gradients that nobody looks at: all is on the device."""
        groups = self.session.plan.groups
        return all(
            group.weights is Weights.RESIDENT and all(site is Site.DEVICE for site in group.sites) for group in groups
        )


@contextlib.contextmanager
def prepared(subject: Subject, team: Team, say: Callable[[str], None]) -> Iterator[Trained]:
    """The model with its first weights, planned for the memory that the recipe gives, and managed until the end.

    Args:
        subject: What is trained.
        team: Each rank of it has a part of the batch.
        say: Told what is being done.

    Raises:
        PlanError: No plan fits the memory; the message says what the smallest takes.
        ConfigError: The model cannot be given first weights.
    """
    recipe, source = subject.recipe, subject.source
    say(f"building {source.name}")
    model, weights = _built(subject, say)
    use_cache = getattr(getattr(model, "config", None), "use_cache", None)
    if use_cache:
        model.config.use_cache = False  # type: ignore[union-attr]  # only generating has a use for it
    optimizer = training.make_optimizer(recipe.optimizer, model)
    batch = source.make_batch(f"{team.require_rows(subject.shape[0])}x{subject.shape[1]}")
    with prepare(
        model,
        optimizer,
        {key: value.to(subject.device) for key, value in batch.items()},
        device_memory=recipe.device_memory,
        host_memory=recipe.host_memory,
        device=subject.device,
        precision=recipe.precision,
        moments=recipe.moments,
        schedule=recipe.schedule,
        max_grad_norm=recipe.max_grad_norm,
        weights=weights,
        seed=recipe.seed,
        on_progress=say,
        ranks=team.group,
        sharding=recipe.sharding,
    ) as session:
        yield Trained(
            model=model, optimizer=optimizer, session=session, scaler=LossScaler() if recipe.is_scaled else None
        )


def _built(subject: Subject, say: Callable[[str], None]) -> tuple[nn.Module, str | None]:
    """The model, and the file that a session is to fill it from; None where it has its weights already."""
    recipe, source = subject.recipe, subject.source
    if source.pretrained is None:
        if source.name.startswith("hf:"):
            warnings.warn(f"{source.name} has no weights: they are drawn from the seed {recipe.seed}", stacklevel=2)
        return training.make_model(recipe, source), None
    empty = source.pretrained.build_empty(recipe.torch_dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the session warns again
            WeightFile(source.pretrained.folder).check(empty)
    except BadRecordError as error:
        # Old names, or another form: transformers knows what becomes of them, at the price of a second copy.
        say(f"loading {source.name} through transformers: {error}")
        return source.pretrained.load(recipe.torch_dtype), None
    return empty, str(source.pretrained.folder)


def ready_for(device: torch.device, batch: Batch) -> Batch:
    """A batch from which a copy to the device can run beside the computation; called ahead of the loop."""
    return {key: value.pin_memory() for key, value in batch.items()} if device.type == "cuda" else batch


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch where the model computes; a copy also where the host plays the device: what it holds of it dies with the step."""
    if device.type == "cpu":
        return {key: value.clone() for key, value in batch.items()}
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
