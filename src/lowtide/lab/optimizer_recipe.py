"""The parts of a recipe that say how weights are updated: the optimizer and the schedule of its learning rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from lowtide.errors import ConfigError, UnknownNameError, did_you_mean
from lowtide.lab.bounds import at_least
from lowtide.optim import Adafactor, Lion

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
        at_least("warmup_steps", self.warmup_steps, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RiseFromZero:
    """The learning rate rises from 0, which the first step has, towards the optimizer's; a run may end before it is there."""

    rise_steps: int
    """The step numbered so, from 0, is the first with the whole learning rate."""

    def __post_init__(self) -> None:
        at_least("rise_steps", self.rise_steps, 1)


Schedule = Constant | LinearWarmup | RiseFromZero
