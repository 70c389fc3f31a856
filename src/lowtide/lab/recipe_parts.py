"""The parts of a recipe: what the model reads, how weights are updated, and how a session spreads the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from lowtide.activations.policy import check_policies
from lowtide.config import require_least
from lowtide.errors import ConfigError, UnknownNameError, did_you_mean
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_named_groups
from lowtide.optim import Adafactor, Lion
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.hand_plan import make_plan, names_in
from lowtide.planning.plan import Plan, Schedule, Sharding, Site, Weights, require_sizes
from lowtide.units import parse_bytes

LEAST_VOCABULARY = 260
"""256 bytes, and the four tokens for beginning, padding, end and unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomInputs:
    """Random inputs of the model's own form, each batch different: for memory and speed, not for learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stories:
    """Short stories, the same for the same seed everywhere: files that `python -m benchmarks.stories` writes.

    The first 400 of seed 0, and 12 to evaluate on, come with the package.
    """

    seed: int = 0
    num_stories: int = 20_000
    """How many to train on; the tokenizer is trained on them too."""
    num_validation: int = 500
    vocab_size: int = 8000
    """How many tokens the tokenizer has."""

    def __post_init__(self) -> None:
        require_least(self, 0, "seed", "num_validation")
        require_least(self, 1, "num_stories")
        require_least(self, LEAST_VOCABULARY, "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """A text file, or all .txt files of a folder in the order of their names; blank lines part the samples."""

    path: Path
    validation_share: float = 0.05
    """The share of the samples, from the end, that is not trained on."""
    vocab_size: int = 8000

    def __post_init__(self) -> None:
        require_least(self, LEAST_VOCABULARY, "vocab_size")
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
        require_least(self, LEAST_VOCABULARY, "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecipe:
    """The loss on the validation samples after the last step, and after others that are named."""

    samples: int = 500
    """How many of the first validation samples; stories must be as many, a text with fewer gives all, with a remark."""
    batch: int | None = None
    """Samples at a time; None: as many as a training batch has, so that the evaluation does not set the peak."""
    after: tuple[int, ...] = ()
    """Steps, counted from 1, after which the model is evaluated as well; the training goes on as if it had not been."""

    def __post_init__(self) -> None:
        require_least(self, 1, "samples", "batch")
        if any(step <= before for before, step in pairwise((0, *self.after))):
            raise ConfigError(
                f"after is {list(self.after)}; give numbers of steps from 1 on, each larger than the one before",
                key="after",
            )


# The classes of torch.optim have constructors of different signatures: what they take is checked against each.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "adadelta": torch.optim.Adadelta,
        "adamax": torch.optim.Adamax,
        "nadam": torch.optim.NAdam,
        "radam": torch.optim.RAdam,
        "lion": Lion,
        "deep-one-adafactor": Adafactor,
    }
)
"""The optimizers a recipe may name: those of torch that update each parameter by itself and need no closure, and our own."""

OptimizerSetting = bool | int | float | tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecipe:
    """An optimizer by name, with its arguments."""

    name: str = "adamw"
    settings: dict[str, OptimizerSetting] = field(default_factory=dict)
    """Arguments by name, such as lr, betas, weight_decay, momentum, foreach, fused; torch's defaults where left out."""
    decay_matrices_only: bool = False
    """Two param groups: parameters of at most one dimension (biases, norms) get a weight decay of 0."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", self.name, OPTIMIZERS)
        known = [name for name in inspect.signature(OPTIMIZERS[self.name]).parameters if name != "params"]
        for key in self.settings:
            if key not in known:
                raise ConfigError(f"{self.name} takes no setting {key!r}; {did_you_mean(key, known)}", key=key)
        if self.decay_matrices_only and not self.settings.get("weight_decay"):
            raise ConfigError(
                "decay_matrices_only leaves parameters out of the weight decay, and no weight_decay above 0 is set; "
                "set settings.weight_decay, or leave decay_matrices_only out",
                key="decay_matrices_only",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The learning rate stays as the optimizer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWarmup:
    """The learning rate rises in equal steps to the optimizer's, then falls in equal steps towards 0."""

    warmup_steps: int
    """Steps of the rise; the first step has 1/warmup_steps of the learning rate."""

    def __post_init__(self) -> None:
        require_least(self, 1, "warmup_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RiseFromZero:
    """The learning rate rises from 0, which the first step has, towards the optimizer's; a run may end before it is there."""

    rise_steps: int
    """The step numbered so, from 0, is the first with the whole learning rate."""

    def __post_init__(self) -> None:
        require_least(self, 1, "rise_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecipe:
    """How the managed run spreads the model; `lowtide.planning.hand_plan.make_plan` turns it into a plan."""

    DEFAULT_KIND: ClassVar[str] = "by-hand"
    weights: Weights | dict[str, Weights] = Weights.STREAMED
    """Where the weights of all groups are, or by group name, pattern ("blocks.*") or module path, with "*" for the others:
    resident or streamed; `host` for an embedding by name; `sharded`, with `sharding`, for parts on the devices."""
    update: Site | float | dict[str, Site | float] = Site.HOST
    """Where chunks are updated: host, device, or the share (0 to 1) that the host updates; likewise by group name."""
    schedule: Schedule = Schedule.DEFERRED
    activations: str | dict[str, str] | None = None
    """What becomes of what blocks save for their backward: `keep`, `selective`, `recompute`, `recompute/4`, `offload`,
    `offload/all`, `compile-budget/0.5`; by group name too."""
    prefetch_depth: int = 1
    """Groups ahead of the running one that are copied to the device."""
    device_memory: str | int | None = None
    """Budget of the device, such as `14GiB`; None: what it has."""
    chunk_memory: str | int | None = None
    """Largest chunk: what is updated, and what gradients wait for in backward, at a time; None: found by search."""
    host_memory: str | int | None = None
    """Budget of the host for weights, gradients, optimizer state and staging; None: what it has."""
    window_memory: str | int | None = None
    """Device bytes for streamed groups; None: what the largest group and its prefetched successors need."""
    cached_buffers: int | None = None
    """The allocation cache: released buffers kept per size class, 0 for none; None: as `make_plan` has it."""
    defragment_every: int | None = None
    """Steps between two defragmentations of the host arena; None or 0: only when a request fails for fragmentation."""
    sharding: Sharding | None = None
    """How ranks share what is not resident: `{shards: 2, collective: gather}`, or `one to all`. None: each has all of it."""

    def __post_init__(self) -> None:
        require_least(self, 0, "prefetch_depth", "cached_buffers", "defragment_every")
        for update in self.sites:
            if isinstance(update, float) and not 0.0 <= update <= 1.0:
                raise ConfigError(f"an update share of {update} is not between 0 and 1", key="update")
        check_policies(self.activations)
        require_sizes(self, "device_memory", "host_memory", "window_memory", "chunk_memory")

    @property
    def sites(self) -> tuple[Site | float, ...]:
        """Every word, and every share, of `update`."""
        return tuple(self.update.values()) if isinstance(self.update, dict) else (self.update,)


def plan_of(recipe: PlanRecipe, model: nn.Module) -> Plan:
    """The plan by hand for a model."""
    named = find_named_groups(model, names_in(recipe.weights, recipe.update, recipe.activations))
    layout = lay_out(
        named,
        chunk_bytes=None if recipe.chunk_memory is None else parse_bytes(recipe.chunk_memory),
        shards=1 if recipe.sharding is None else recipe.sharding.shards,
    )
    given: dict[str, Any] = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
    del given["chunk_memory"]
    # All others are arguments of the same name; what is left out is as `make_plan` has it.
    return make_plan(layout, **{name: value for name, value in given.items() if value is not None})


def session_plan(recipe: PlanRecipe | StaticPartition | WarmUp, model: nn.Module) -> Plan | StaticPartition | WarmUp:
    """What `manage` is given: a plan by hand; the other two make theirs when the session begins."""
    return plan_of(recipe, model) if isinstance(recipe, PlanRecipe) else recipe
