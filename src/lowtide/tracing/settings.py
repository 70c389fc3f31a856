"""StepSettings and StepContext: how a step is run where model, batch and optimizer alone do not say, and what it runs inside of
where something else than torch holds its weights (a session, say).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lowtide.activations.policy import Policy, policy_of
from lowtide.errors import ConfigError
from lowtide.memory.mover import Mover
from lowtide.tracing.attention.rules import Backend
from lowtide.tracing.recorder import Life, StorageRecorder
from lowtide.tracing.step_trace import Category
from lowtide.units import parse_dtype


class UpdateSchedule(enum.StrEnum):
    """When weights are updated."""

    DEFERRED = "deferred"
    """In `optimizer.step()`, after the backward: all gradients exist at once."""
    IN_BACKWARD = "in_backward"
    """Each parameter as soon as its gradient is complete, which is then freed."""


class Implementation(enum.StrEnum):
    """Which of torch's implementations of an update runs."""

    FOREACH = "foreach"
    FUSED = "fused"
    LOOP = "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """One training step: `accumulate` times forward, loss and backward, then one update and `zero_grad()`.

    Fields left at None leave the model, the optimizer and torch's own defaults as they are.
    """

    autocast: str | None = None
    """`bfloat16` or `float16` (`bf16`, `torch.bfloat16`, ...): the forward and the loss run under `torch.autocast` of that type.
    `float32` is taken for what it is, no autocast at all, with a warning."""
    accumulate: int = 1
    """Backward passes per update."""
    precision: str | None = None
    """`bfloat16`, `float16` or `float32` (`bf16`, ...): convert the model, and floating point inputs with it, before the step."""
    activations: str | None = None
    """What is done with the activations of each repeated block: `keep`, `selective`, `recompute`,
    `recompute/4` (four blocks share one kept input), `offload` (recompute, its inputs on the host), `offload/all` or
    `compile-budget/0.5` (compiled, to save about half of what the compiler would)."""
    chunked_loss: bool = False
    """Compute the loss of a Hugging Face language model in chunks of tokens, so that its logits never exist at once."""
    update: UpdateSchedule = UpdateSchedule.DEFERRED
    implementation: Implementation | None = None
    """Implementation of the optimizer; None: what it was built with, or torch's default on CUDA."""
    attention: str | None = None
    """`cudnn`, `flash`, `efficient` or `math`: allow this backend only (and math where it refuses)."""
    max_grad_norm: float | None = None
    """Clip with `torch.nn.utils.clip_grad_norm_` before the update."""
    keep_gradients: bool = False
    """`zero_grad(set_to_none=False)`: gradients stay allocated between steps."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"accumulate must be at least 1, got {self.accumulate}", key="accumulate")
        if self.activations is not None:
            policy_of(self.activations)
        for field in ("autocast", "precision"):
            # One name for each type; frozen, so set past the guard.
            if getattr(self, field) is not None:
                object.__setattr__(self, field, parse_dtype(getattr(self, field), key=field))
        if self.attention is not None and self.attention not in list(Backend):
            raise ConfigError(f"attention must be one of {', '.join(Backend)}, got {self.attention!r}", key="attention")
        if self.update is UpdateSchedule.IN_BACKWARD and (self.accumulate > 1 or self.max_grad_norm is not None):
            raise ConfigError(
                "an update in the backward needs each gradient once and complete: it excludes accumulate > 1 and max_grad_norm",
                key="update",
            )

    @property
    def policy(self) -> Policy | None:
        """The activation policy that the word stands for; None leaves the model's own way."""
        return None if self.activations is None else policy_of(self.activations)


COPY_STREAM = 1
"""Has a pool of its own in the allocator, as every stream but the computation's has."""


class DeviceMemory:
    """Memory of the traced device that no operator makes.

    Args:
        recorder: Of the trace; what is taken appears there like any storage.
        mover: Carries tensors of the trace between the device and the host.
        tell: Is told of an error before it is raised: in autograd's thread it would be lost.
    """

    def __init__(self, recorder: StorageRecorder, mover: Mover, tell: Callable[[BaseException], None]) -> None:
        self._recorder, self.mover = recorder, mover
        self.device = mover.device
        self.tell = tell

    def take(self, num_bytes: int, name: str) -> Life:
        """A buffer for weights, from the pool of the copies' stream."""
        life = self._recorder.allocate(num_bytes, (num_bytes,), "uint8", category=Category.WEIGHTS, stream=COPY_STREAM)
        life.rename(name, "chunk")
        return life

    def give_back(self, life: Life) -> None:
        """The buffer goes back to that pool."""
        self._recorder.free(life)


class StepContext(Protocol):
    """Travels to the tracing process with the model, so it is made of plain data."""

    @property
    def num_warm_up_steps(self) -> int:
        """How many steps the trace runs before the one that it describes: all steps after these are alike."""

    def placed(self, model: nn.Module) -> Collection[nn.Parameter]:
        """The parameters whose memory is theirs: the trace takes none for them."""

    def around(self, model: nn.Module, memory: DeviceMemory) -> AbstractContextManager[object]:
        """Entered once the model has its activation policies, before the first step."""

    def offloaded_bytes(self) -> Mapping[str, int]:
        """What each module that offloads activations sends to the host in one step. Asked inside `around`, after the last."""
