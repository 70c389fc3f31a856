"""Recipe: a training run as a file: what is trained, how, and under which plan.

A recipe is YAML or JSON, read strictly: an unknown key is an error that names the nearest known one. Everything that
would change the numbers of the run stands in it, so that the same recipe gives the same losses.

    model: gpt-tiny
    batch: 2x64
    steps: 20
    optimizer: {name: adamw, settings: {lr: 0.001}}
    plan: {weights: streamed, update: host, device_memory: 4MiB}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from lowtide import config
from lowtide.activations.policy import policy_of
from lowtide.errors import ConfigError, UnknownNameError, did_you_mean
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.units import parse_bytes

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
    }
)
"""The optimizers a recipe may name: those of torch that update each parameter by itself and need no closure."""

OptimizerSetting = bool | int | float | tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecipe:
    """An optimizer of torch by name, with its arguments."""

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
        _at_least("warmup_steps", self.warmup_steps, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecipe:
    """How the managed run spreads the model; `lowtide.planning.hand_plan.make_plan` turns it into a plan."""

    weights: Weights | dict[str, Weights] = Weights.STREAMED
    """Of all groups, or by group name with "*" for the others: resident or streamed; `host` for an embedding by name."""
    update: Site | float | dict[str, Site | float] = Site.HOST
    """Where chunks are updated: host, device, or the share (0 to 1) that the host updates; likewise by group name."""
    schedule: Schedule = Schedule.DEFERRED
    activations: str | dict[str, str] | None = None
    """What becomes of what blocks save for their backward: `keep`, `selective`, `recompute`, `recompute/4`, `offload`,
    `offload/all`; by group name too."""
    prefetch_depth: int = 1
    """Groups ahead of the running one that are copied to the device."""
    device_memory: str | int | None = None
    """Budget of the device, such as `14GiB`; None: what it has."""
    host_memory: str | int | None = None
    """Budget of the host for weights, gradients, optimizer state and staging; None: what it has."""
    window_memory: str | int | None = None
    """Device bytes for streamed groups; None: what the largest group and its prefetched successors need."""

    def __post_init__(self) -> None:
        _at_least("prefetch_depth", self.prefetch_depth, 0)
        for update in self.update.values() if isinstance(self.update, dict) else (self.update,):
            if isinstance(update, float) and not 0.0 <= update <= 1.0:
                raise ConfigError(f"an update share of {update} is not between 0 and 1", key="update")
        for word in self.activations.values() if isinstance(self.activations, dict) else (self.activations,):
            if word is not None:
                policy_of(word)
        for key in ("device_memory", "host_memory", "window_memory"):
            if (size := getattr(self, key)) is not None:
                parse_bytes(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training run."""

    model: str
    """A built-in name, `hf:FOLDER_OR_CONFIG` or `package.module:factory`."""
    batch: str | None = None
    """`8x2048` (sequences x tokens) or `64x3x224x224` (images); the model's default where it is left out."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights, and of everything computed from them."""
    device: str | None = None
    """`cuda` or `cpu`, where the device of the managed run is emulated; None: cuda where there is one."""
    steps: int = 20
    """Updates."""
    seed: int = 0
    """For the first weights and the dropout masks."""
    accumulation: int = 1
    """Backward calls to an update, each on a batch of its own; each loss is divided by it."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm before each update; None: not at all."""
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    scheduler: Constant | LinearWarmup = field(default_factory=Constant)
    """`kind: constant`, or `kind: linear-warmup` with `warmup_steps`."""
    plan: PlanRecipe = field(default_factory=PlanRecipe)
    tolerance: float = 0.0
    """Largest difference from the plain run that a check accepts in any loss or weight; 0 asks for the same bits."""

    def __post_init__(self) -> None:
        _at_least("steps", self.steps, 1)
        _at_least("accumulation", self.accumulation, 1)
        _at_least("seed", self.seed, 0)
        _at_least("tolerance", self.tolerance, 0)
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}; give a number above 0, or leave it out", key="max_grad_norm"
            )
        if self.plan.schedule is Schedule.IN_BACKWARD and self.accumulation > 1:
            raise ConfigError(
                f"accumulation is {self.accumulation}, and the schedule in_backward allows one backward to an update: "
                "set accumulation to 1, or plan.schedule to deferred",
                key="accumulation",
            )
        if self.plan.schedule is Schedule.IN_BACKWARD and self.max_grad_norm is not None:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}, which needs all gradients before the first update, and the "
                "schedule in_backward keeps none: leave max_grad_norm out, or set plan.schedule to deferred",
                key="max_grad_norm",
            )
        if isinstance(self.scheduler, LinearWarmup) and self.scheduler.warmup_steps > self.steps:
            raise ConfigError(
                f"scheduler.warmup_steps is {self.scheduler.warmup_steps}, more than the {self.steps} steps of the run",
                key="scheduler.warmup_steps",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def read_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """The recipe of a .yaml, .yml or .json file, with dotted overrides such as `plan.update=device`.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value does not fit.
    """
    return config.override(config.read_config(Recipe, path), overrides or [])


def _at_least(key: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"{key} is {value}; give {least} or more", key=key)
