"""TraceRequest: what a command is asked to trace, as data; every field can be set with `--set`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import config
from lowtide.errors import BatchMismatchError, ConfigError, TooLargeError, UnknownNameError
from lowtide.hardware import find_hardware, known_hardware
from lowtide.models import ModelSource, built_in_names, resolve_model
from lowtide.optim.optimizers import Adafactor
from lowtide.planning.techniques import Problem
from lowtide.tracing.prediction.sandbox import shared_sandbox
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace
from lowtide.units import parse_dtype

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "deep-one-adafactor": Adafactor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One step of one model on one card."""

    model: str
    """A built-in name, `hf:FOLDER_OR_CONFIG` or `package.module:factory`."""
    batch: str | None = None
    """`8x2048` (sequences x tokens) or `64x3x224x224` (images); the model's default where it is left out."""
    gpu: str = "h200"
    """The card to predict for."""
    torch: str | None = None
    """The torch version to predict for; the installed one where it is left out."""
    dtype: str | None = None
    """Type of the weights, and of everything computed from them without autocast: bfloat16, float16 or float32, or bf16 and so on.
    Left out: a factory's model as the factory makes it, all others in bfloat16."""
    optimizer: str = "adamw"
    """adamw, adam, sgd, sgd-momentum, adafactor, rmsprop, adagrad, deep-one-adafactor, or none for forward and backward alone."""
    step: StepSettings = field(default_factory=StepSettings)
    """How the step is run."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS and self.optimizer != "none":
            raise UnknownNameError("optimizer", self.optimizer, [*OPTIMIZERS, "none"])
        if self.dtype is not None:
            # Frozen, so set past the guard.
            object.__setattr__(self, "dtype", parse_dtype(self.dtype, key="dtype"))

    def problem(self) -> Problem:
        """The step to trace: the model is built on the meta device, whatever its size."""
        source = resolve_model(self.model)
        is_as_made = self.dtype is None and source.family == "factory"
        model = source.build(None if is_as_made else getattr(torch, self.dtype or "bfloat16"))
        return Problem(
            model=model,
            batch=self._make_batch(source, model),
            optimizer=OPTIMIZERS.get(self.optimizer),
            settings=self.step,
            hardware=find_hardware(self.gpu),
            torch_version=self.torch,
            name=source.name,
        )

    def run(self, on_progress: Callable[[str], None]) -> StepTrace:
        """Trace it."""
        shared_sandbox().warm()
        on_progress(f"building {self.model}")
        return self.problem().trace(on_progress)

    def _make_batch(self, source: ModelSource, model: nn.Module) -> dict[str, Tensor]:
        """The batch, floating point inputs in the model's type."""
        try:
            batch = source.make_batch(self.batch or source.default_batch)
        except (BatchMismatchError, TooLargeError) as error:
            # An error of the step to whoever calls the library; here it was typed.
            raise ConfigError(f"--batch: {error}", key="batch") from error
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def settable() -> str:
    """What `--set` takes, for the help text."""
    own = [f.name for f in fields(TraceRequest) if f.name not in ("model", "step", "batch", "gpu")]
    keys = [*own, *(f"step.{f.name}" for f in fields(StepSettings))]
    lines = [
        f"**--set** takes {', '.join(f'`{key}`' for key in keys)}.",
        f"Models: {', '.join(built_in_names())}.",
        f"Cards: {', '.join(card.name for card in known_hardware())}.",
        f"Optimizers: {', '.join(OPTIMIZERS)}, none.",
    ]
    return "\n\n".join(lines)


def make_request(model: str, batch: str | None, gpu: str, overrides: list[str]) -> TraceRequest:
    """The request of a command line: its flags, then its `--set` overrides on the same fields."""
    return config.override(TraceRequest(model=model, batch=batch, gpu=gpu), overrides)
