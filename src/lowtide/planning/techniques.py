"""The techniques that what-if knows: what each changes in a step, when it applies, and which tensors it acts on.

A later technique joins by an entry in `TECHNIQUES`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowtide.activations.policy import Offload
from lowtide.hardware import Hardware
from lowtide.memory.groups import repeated_blocks
from lowtide.planning.reasons import Subject
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.attention.rules import Backend
from lowtide.tracing.attention.use import WRITTEN_OUT, attention_use, backend_of
from lowtide.tracing.explanation.explain import is_foreach_copy, logits_shape
from lowtide.tracing.explanation.instant import Place
from lowtide.tracing.prediction.trace import trace_step
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.tracing.training_step import Loss, OptimizerFactory
from lowtide.units import format_bytes

_FEWEST_FOR_SEGMENTS = 4
"""Blocks: with fewer, segments of about their square root are single blocks or all of them."""

_BETTER_THAN = {
    "compile-budget/0.5": ("keep", "selective"),
    "selective": ("keep",),
    "recompute": ("keep", "selective"),
    "recompute/": ("keep", "selective", "recompute"),
    "offload": ("keep", "selective", "recompute"),
    "offload/all": ("keep",),
}
"""For each policy those that it is tried in place of: the others hold less already."""
_FUSED_UPDATES = ("aten._fused_ada", "aten._fused_sgd")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A training step to be traced: what `lowtide.trace` takes.

    Never changed in place: techniques make another with `dataclasses.replace`.
    """

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None
    loss: Loss | None = None
    settings: StepSettings = field(default_factory=StepSettings)
    hardware: str | Hardware = "h200"
    torch_version: str | None = None
    allocator: AllocatorSettings | None = None
    name: str | None = None

    def trace(self, on_progress: Callable[[str], None] | None = None) -> StepTrace:
        """Predict the step; seconds for a large model."""
        return trace_step(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            loss=self.loss,
            settings=self.settings,
            hardware=self.hardware,
            torch_version=self.torch_version,
            allocator=self.allocator,
            name=self.name,
            on_progress=on_progress,
        )


class Technique(Protocol):
    """One way to change the memory of a step."""

    @property
    def name(self) -> str:
        """Shown in the table."""
        ...

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Why it cannot be added to a step, given its trace; None where it can."""
        ...

    def apply(self, problem: Problem) -> Problem:
        """The step with it."""
        ...

    def subject(self, trace: StepTrace) -> Subject:
        """The tensors it acts on."""
        ...


@dataclass(frozen=True, slots=True)
class Bfloat16:
    """Weights, gradients, optimizer state and activations in bfloat16. Changes the numerics."""

    name: str = "bf16"

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs fp32 weights."""
        weights = [item for item in trace.alive_at(-1) if item.category is Category.WEIGHTS]
        if any(item.dtype == "float32" for item in weights):
            return None
        return "no weight is in float32"

    def apply(self, problem: Problem) -> Problem:
        """Convert the model before the step."""
        return _with(problem, precision="bfloat16")

    def subject(self, trace: StepTrace) -> Subject:
        """All floating point tensors."""
        return Subject(
            noun="floating point tensors",
            matches=lambda item: item.dtype in ("float32", "bfloat16", "float16"),
            what_stays=lambda item: item.dtype == "float32",
            why_stays="stay in float32",
        )


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """The kind of attention backend that is not in use: fused where attention runs on math, math where it is fused."""

    to_math: bool

    @property
    def name(self) -> str:
        """`math attention` or `fused attention`."""
        return "math attention" if self.to_math else "fused attention"

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs calls of SDPA, and one that runs on the other kind."""
        uses = [use for use in attention_use(trace) if use.backend != WRITTEN_OUT]
        if not uses:
            return "the model does not call scaled_dot_product_attention"
        if {use.backend == Backend.MATH for use in uses} == {self.to_math}:
            return "it is on already"
        if not self.to_math and problem.settings.attention is None:
            # Nobody asked for math: torch fell back to it, and the note says what each fused backend refuses.
            refused = next((use.reason for use in uses if use.backend == Backend.MATH), "")
            return f"no fused backend takes these calls{f' ({refused})' if refused else ''}"
        return None

    def apply(self, problem: Problem) -> Problem:
        """Allow math alone, or leave the choice to torch."""
        return _with(problem, attention="math" if self.to_math else None)

    def subject(self, trace: StepTrace) -> Subject:
        """What the modules that call attention allocate beside weights and gradients."""
        modules = {op.module for op in trace.ops if backend_of(op.name) is not None}
        kinds = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.WORKSPACE)
        return Subject(
            noun="tensors of the attention",
            matches=lambda item: item.module in modules and item.category in kinds,
            when_absent=lambda place: "where hardly any tensor of the attention is alive",
            when_ineffective="the model chooses the backend of its attention itself, so nothing changes",
        )


@dataclass(frozen=True, slots=True)
class UpdateImplementation:
    """Another of torch's implementations of the same update, in place of foreach."""

    name: str
    implementation: Implementation

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs an optimizer that has it and does not use it yet."""
        if problem.optimizer is None:
            return "the step has no optimizer"
        if self.implementation is Implementation.FUSED:
            if any(op.name.startswith(_FUSED_UPDATES) for op in trace.ops):
                return "it is on already"
            return _why_not_fused(problem)
        if not any(op.name.startswith("aten._foreach") for op in trace.ops):
            return "the update does not use foreach"
        return None

    def apply(self, problem: Problem) -> Problem:
        """Choose it."""
        return _with(problem, implementation=self.implementation)

    def subject(self, trace: StepTrace) -> Subject:
        """The temporary lists of foreach."""
        return Subject(
            noun="temporary copies of the foreach update",
            matches=is_foreach_copy,
            when_absent=lambda place: (
                "where the update has freed its copies"
                if place is Place.UPDATE
                else "before the update makes its copies"
            ),
        )


@dataclass(frozen=True, slots=True)
class UpdateInBackward:
    """Update each parameter as soon as its gradient is complete, and free the gradient."""

    name: str = "optimizer in backward"

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs an optimizer, and each gradient once and complete."""
        if problem.optimizer is None:
            return "the step has no optimizer"
        if problem.settings.update is UpdateSchedule.IN_BACKWARD:
            return "it is on already"
        if problem.settings.accumulate > 1:
            return "accumulation needs the gradients until the last backward"
        if problem.settings.max_grad_norm is not None:
            return "clipping needs all gradients before the first update"
        return None

    def apply(self, problem: Problem) -> Problem:
        """Move the update."""
        return _with(problem, update=UpdateSchedule.IN_BACKWARD)

    def subject(self, trace: StepTrace) -> Subject:
        """Gradients."""
        return Subject(
            noun="gradients",
            matches=lambda item: item.category is Category.GRADIENTS,
            when_absent=lambda place: (
                "before any gradient exists" if place.is_before_gradients else "where hardly any gradient is alive"
            ),
        )


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Half the batch, twice: as many samples per update, and half as many at a time."""

    name: str = "accumulation (half the batch, twice)"

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs a batch with an even first dimension."""
        if problem.settings.update is UpdateSchedule.IN_BACKWARD:
            return "the update in the backward needs each gradient complete after one backward"
        size = batch_size(problem.batch)
        if size is None:
            return "the tensors of the batch share no first dimension to halve"
        return None if size % 2 == 0 else f"the batch size {size} cannot be halved"

    def apply(self, problem: Problem) -> Problem:
        """Halve the batch and double the passes."""
        changed = _with(problem, accumulate=2 * problem.settings.accumulate)
        return replace(changed, batch=half_of(problem.batch))

    def subject(self, trace: StepTrace) -> Subject:
        """What grows with the batch."""
        kinds = (Category.ACTIVATIONS, Category.TEMPORARIES)
        return Subject(
            noun="activations and temporaries",
            matches=lambda item: item.category in kinds and not is_foreach_copy(item),
            when_absent=lambda place: "where hardly anything that grows with the batch is alive",
        )


def _with(problem: Problem, **changes: object) -> Problem:
    settings: StepSettings = replace(problem.settings, **changes)  # type: ignore[arg-type]  # each caller names fields
    return replace(problem, settings=settings)


def _why_not_fused(problem: Problem) -> str | None:
    optimizer = problem.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return None if "fused" in optimizer.defaults else f"{type(optimizer).__name__} has no fused implementation"
    # A class says by its signature; any other factory is tried.
    if inspect.isclass(optimizer) and "fused" not in inspect.signature(optimizer).parameters:
        return f"{optimizer.__name__} has no fused implementation"
    return None


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """A policy for what the repeated blocks save for their backward. Changes no number, unless it compiles; costs time."""

    name: str
    word: str
    """As in `StepSettings.activations`; `recompute/` stands for segments of about the square root of the blocks."""

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs repeated blocks, and a policy that holds more."""
        before = problem.settings.activations or "keep"
        if before == "keep" and _is_recomputed(trace):
            if self.word == "recompute":
                return "it is on already"
            return "the model recomputes its layers itself; build it without that and let a policy do it"
        if before == self.word or (self.word == "recompute/" and before.startswith(self.word)):
            return "it is on already"
        if before not in _BETTER_THAN[self.word]:
            return f"{before} is on in its place"
        blocks = repeated_blocks(problem.model)
        if not blocks:
            return f"{type(problem.model).__name__} has no repeated blocks"
        if self.word == "recompute/" and len(blocks) < _FEWEST_FOR_SEGMENTS:
            return f"{len(blocks)} blocks are too few for segments"
        return None

    def apply(self, problem: Problem) -> Problem:
        """Put the policy on the blocks."""
        word = self.word
        if word == "recompute/":
            word = f"recompute/{round(math.sqrt(len(repeated_blocks(problem.model))))}"
        return _with(problem, activations=word)

    def subject(self, trace: StepTrace) -> Subject:
        """Activations."""
        least = (
            f"every saved tensor has less than {format_bytes(Offload().min_bytes)}, below which none goes to the host"
        )
        return Subject(
            noun="activations",
            matches=lambda item: item.category is Category.ACTIVATIONS,
            when_ineffective=least if self.word.startswith("offload") else "not one allocation of the step changes",
            when_absent=lambda place: (
                "after the last activation is freed"
                if place is Place.UPDATE
                else "where hardly any activation is alive"
            ),
        )


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """The loss of a language model in chunks of tokens: its logits never exist for all tokens at once."""

    name: str = "chunked loss"

    def why_not(self, problem: Problem, trace: StepTrace) -> str | None:
        """Needs a model that computes its loss from logits itself."""
        if problem.settings.chunked_loss:
            return "it is on already"
        if problem.loss is not None:
            return "the loss is given from outside of the model: call lowtide.activations.linear_cross_entropy in it"
        if logits_shape(trace) is None:
            return "the step has no cross entropy over logits"
        if not callable(getattr(problem.model, "get_output_embeddings", None)):
            return f"{type(problem.model).__name__} is no Hugging Face model whose head is known"
        return None

    def apply(self, problem: Problem) -> Problem:
        """Exchange the head."""
        return _with(problem, chunked_loss=True)

    def subject(self, trace: StepTrace) -> Subject:
        """Tensors as wide as the logits."""
        shape = logits_shape(trace)
        kinds = (Category.ACTIVATIONS, Category.TEMPORARIES)
        return Subject(
            noun="tensors as wide as the logits",
            matches=lambda item: shape is not None and item.category in kinds and item.shape[-1:] == shape[-1:],
            when_absent=lambda place: "where hardly any of the logits is alive",
        )


def _is_recomputed(trace: StepTrace) -> bool:
    """What a model recomputes by its own checkpointing shows in the trace: activations that the backward makes."""
    return any(item.category is Category.ACTIVATIONS and item.phase is Phase.BACKWARD for item in trace.allocations)


def batch_size(batch: Any) -> int | None:
    """The first dimension that all tensors of a batch share, apart from those of size 1; None if they share none."""
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    return sizes.pop() if len(sizes) == 1 else None


def half_of(batch: Any) -> Any:
    """The first half, as tensors of their own; `batch_size` must be even.

    Copies, because a view would bring the storage of the whole batch along.
    """
    size = batch_size(batch)
    assert size is not None, "ask batch_size first"
    assert size % 2 == 0, f"{size} has no half"
    return _map(
        batch, lambda tensor: tensor[: size // 2].clone() if tensor.dim() and tensor.shape[0] == size else tensor
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(value, change) for value in batch)
    return batch


TECHNIQUES: tuple[Technique, ...] = (
    Bfloat16(),
    ActivationPolicy("blocks compiled, half the budget", "compile-budget/0.5"),
    ActivationPolicy("selective recompute", "selective"),
    ActivationPolicy("recompute", "recompute"),
    ActivationPolicy("recompute in segments", "recompute/"),
    ActivationPolicy("offload", "offload"),
    ActivationPolicy("offload without recompute", "offload/all"),
    ChunkedLoss(),
    AttentionBackend(to_math=False),
    AttentionBackend(to_math=True),
    UpdateImplementation("fused step", Implementation.FUSED),
    UpdateImplementation("for-loop step", Implementation.LOOP),
    UpdateInBackward(),
    Accumulate(),
)
"""All techniques, in the order of the table; of those that act alike, the ones that cost less time first."""
