"""The techniques that what-if knows: what each changes, when it applies, and which tensors it acts on.

A later technique joins by an entry in `TECHNIQUES`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from lowtide.planning.activation_techniques import ACTIVATION_TECHNIQUES
from lowtide.planning.halves import batch_size, half_of
from lowtide.planning.problem import Problem
from lowtide.planning.reasons import Subject
from lowtide.tracing.attention.rules import Backend
from lowtide.tracing.attention.use import WRITTEN_OUT, attention_use, backend_of
from lowtide.tracing.explanation.explain import is_foreach_copy
from lowtide.tracing.explanation.instant import Place
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Category, StepTrace


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


TECHNIQUES: tuple[Technique, ...] = (
    Bfloat16(),
    *ACTIVATION_TECHNIQUES,
    AttentionBackend(to_math=False),
    AttentionBackend(to_math=True),
    UpdateImplementation("fused step", Implementation.FUSED),
    UpdateImplementation("for-loop step", Implementation.LOOP),
    UpdateInBackward(),
    Accumulate(),
)
"""All techniques, in the order of the table."""


_FUSED_UPDATES = ("aten._fused_ada", "aten._fused_sgd")


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
