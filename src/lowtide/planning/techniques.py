"""The techniques that what-if knows: what each changes in a step, when it applies, and which tensors it acts on.

A later technique joins by an entry in `TECHNIQUES`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.activations.policy import KEEP, WORDS, Offload
from lowtide.hardware import Hardware
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_named_groups, repeated_blocks
from lowtide.planning.hand_plan import activations_by_group, make_plan
from lowtide.planning.plan import Plan
from lowtide.planning.step_costs import POLICIES
from lowtide.tracing.allocator import AllocatorSettings
from lowtide.tracing.attention.rules import Backend
from lowtide.tracing.attention.use import WRITTEN_OUT, attention_use, backend_of
from lowtide.tracing.explanation.explain import is_foreach_copy, logits_shape
from lowtide.tracing.explanation.instant import Place
from lowtide.tracing.prediction.trace import trace_step
from lowtide.tracing.settings import Implementation, StepSettings, UpdateSchedule
from lowtide.tracing.step_trace import Allocation, Bytes, Category, Phase, StepTrace
from lowtide.tracing.training_step import Loss, OptimizerFactory, tensors_in
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
    plan: Plan | None = None
    """The step as a session runs it; None: plain torch."""
    precision: str | None = None
    moments: str = "fp32"
    trace_session: Callable[..., StepTrace] | None = None
    """`lowtide.trace`, which predicts sessions and lies above; without it there is no plan."""

    @property
    def policy(self) -> str | None:
        """The activation policy of the blocks, as a word; of a plan whose blocks differ, that of the first."""
        if self.plan is None:
            return self.settings.activations
        chosen = next((policy for policy in self.plan.activations.values() if policy != KEEP), KEEP)
        return next((word for word, policy in WORDS.items() if policy == chosen), type(chosen).__name__)

    def under(self, **words: Any) -> Problem:
        """The step as a session runs it, under a plan of `make_plan`; policy and schedule go from the settings to the plan."""
        schedule = "in_backward" if self.settings.update is UpdateSchedule.IN_BACKWARD else "deferred"
        given = {"schedule": schedule, "activations": self.settings.activations, **words}
        settings = replace(self.settings, activations=None, update=UpdateSchedule.DEFERRED)
        return replace(self, settings=settings, plan=make_plan(self.model, **given))

    def trace(self, on_progress: Callable[[str], None] | None = None) -> StepTrace:
        """Predict the step; seconds for a large model."""
        step: Callable[..., StepTrace] = trace_step
        if self.plan is not None or self.precision is not None:
            assert self.trace_session is not None, "who gives a plan gives what traces it"
            step = partial(self.trace_session, plan=self.plan, precision=self.precision, moments=self.moments)
        return step(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The tensors a technique acts on."""

    noun: str
    """In the plural: `gradients`."""
    matches: Callable[[Allocation], bool]
    when_absent: Callable[[Place], str] = lambda place: "where none of them is alive"
    """Why none of them is alive at a peak there; follows "the peak is at the loss, "."""
    when_ineffective: str = "not one allocation of the step changes"
    """What to say when the step is the same with the technique as without."""
    what_stays: Callable[[Allocation], bool] = lambda item: False
    """Those of them that the technique should have changed and did not; told with the saving."""
    why_stays: str = ""
    """Follows their bytes: `stay in float32`."""

    def bytes_at(self, trace: StepTrace, event: int) -> int:
        """Bytes of the subject alive right after an event."""
        return sum(allocation.bytes for allocation in trace.alive_at(event) if self.matches(allocation))

    def curve(self, trace: StepTrace) -> Bytes:
        """Bytes of the subject at each position of `trace.curve`."""
        matching = [self.matches(allocation) for allocation in trace.allocations]
        start = sum(
            item.bytes for item, fits in zip(trace.allocations, matching, strict=True) if fits and item.born is None
        )
        changes = [
            (-1 if event.is_free else 1) * trace.allocations[event.allocation].bytes * matching[event.allocation]
            for event in trace.events
        ]
        return np.cumsum(np.array([start, *changes], dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Technique:
    """One way to change the memory of a step."""

    name: str
    """Shown in the table."""
    why_not: Callable[[Problem, StepTrace], str | None]
    """Why it cannot be added to a step, given its trace; None where it can."""
    apply: Callable[[Problem], Problem]
    """The step with it."""
    subject: Callable[[StepTrace], Subject]
    """The tensors it acts on."""
    is_for_sessions: bool = False
    """Whether it is tried on top of a session too."""
    begins_session: bool = False


def _with(problem: Problem, **changes: object) -> Problem:
    settings: StepSettings = replace(problem.settings, **changes)  # type: ignore[arg-type]  # each caller names fields
    return replace(problem, settings=settings)


def _weights_are_rounded(problem: Problem, trace: StepTrace) -> str | None:
    if problem.plan is not None:
        return "the plan is for the weights as they are: choose dtype=bfloat16 or precision="
    weights = [item for item in trace.alive_at(-1) if item.category is Category.WEIGHTS]
    return None if any(item.dtype == "float32" for item in weights) else "no weight is in float32"


BFLOAT16 = Technique(
    name="bf16",
    why_not=_weights_are_rounded,
    apply=lambda problem: _with(problem, precision="bfloat16"),
    subject=lambda trace: Subject(
        noun="floating point tensors",
        matches=lambda item: item.dtype in ("float32", "bfloat16", "float16"),
        what_stays=lambda item: item.dtype == "float32",
        why_stays="stay in float32",
    ),
)
"""Weights, gradients, optimizer state and activations in bfloat16. Changes the numerics."""


def attention_backend(*, to_math: bool) -> Technique:
    """The kind of attention backend that is not in use: fused where attention runs on math, math where it is fused."""

    def why_not(problem: Problem, trace: StepTrace) -> str | None:
        uses = [use for use in attention_use(trace) if use.backend != WRITTEN_OUT]
        if not uses:
            return "the model does not call scaled_dot_product_attention"
        if {use.backend == Backend.MATH for use in uses} == {to_math}:
            return "it is on already"
        if not to_math and problem.settings.attention is None:
            # Nobody asked for math: torch fell back to it, and the note says what each fused backend refuses.
            refused = next((use.reason for use in uses if use.backend == Backend.MATH), "")
            return f"no fused backend takes these calls{f' ({refused})' if refused else ''}"
        return None

    return Technique(
        name="math attention" if to_math else "fused attention",
        why_not=why_not,
        # Without a word the choice is torch's.
        apply=lambda problem: _with(problem, attention="math" if to_math else None),
        subject=_attention_tensors,
    )


def _attention_tensors(trace: StepTrace) -> Subject:
    """What the modules that call attention allocate beside weights and gradients."""
    modules = {op.module for op in trace.ops if backend_of(op.name) is not None}
    kinds = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.WORKSPACE)
    return Subject(
        noun="tensors of the attention",
        matches=lambda item: item.module in modules and item.category in kinds,
        when_absent=lambda place: "where hardly any tensor of the attention is alive",
        when_ineffective="the model chooses the backend of its attention itself, so nothing changes",
    )


_FOREACH_COPIES = Subject(
    noun="temporary copies of the foreach update",
    matches=is_foreach_copy,
    when_absent=lambda place: (
        "where the update has freed its copies" if place is Place.UPDATE else "before the update makes its copies"
    ),
)


_IN_SESSION = "a session updates by itself"


def _why_not_fused(problem: Problem, trace: StepTrace) -> str | None:
    optimizer = problem.optimizer
    if problem.plan is not None:
        return _IN_SESSION
    if optimizer is None:
        return "the step has no optimizer"
    if any(op.name.startswith(_FUSED_UPDATES) for op in trace.ops):
        return "it is on already"
    if isinstance(optimizer, torch.optim.Optimizer):
        return None if "fused" in optimizer.defaults else f"{type(optimizer).__name__} has no fused implementation"
    # A class says by its signature; any other factory is tried.
    if inspect.isclass(optimizer) and "fused" not in inspect.signature(optimizer).parameters:
        return f"{optimizer.__name__} has no fused implementation"
    return None


def _why_not_a_loop(problem: Problem, trace: StepTrace) -> str | None:
    if problem.plan is not None:
        return _IN_SESSION
    if problem.optimizer is None:
        return "the step has no optimizer"
    if not any(op.name.startswith("aten._foreach") for op in trace.ops):
        return "the update does not use foreach"
    return None


FUSED_STEP = Technique(
    name="fused step",
    why_not=_why_not_fused,
    apply=lambda problem: _with(problem, implementation=Implementation.FUSED),
    subject=lambda trace: _FOREACH_COPIES,
)
LOOP_STEP = Technique(
    name="for-loop step",
    why_not=_why_not_a_loop,
    apply=lambda problem: _with(problem, implementation=Implementation.LOOP),
    subject=lambda trace: _FOREACH_COPIES,
)


def _why_not_in_backward(problem: Problem, trace: StepTrace) -> str | None:
    if problem.optimizer is None:
        return "the step has no optimizer"
    if problem.plan is not None:
        return "the plan says when weights are updated"
    if problem.settings.update is UpdateSchedule.IN_BACKWARD:
        return "it is on already"
    if problem.settings.accumulate > 1:
        return "accumulation needs the gradients until the last backward"
    if problem.settings.max_grad_norm is not None:
        return "clipping needs all gradients before the first update"
    return None


UPDATE_IN_BACKWARD = Technique(
    name="optimizer in backward",
    why_not=_why_not_in_backward,
    apply=lambda problem: _with(problem, update=UpdateSchedule.IN_BACKWARD),
    subject=lambda trace: Subject(
        noun="gradients",
        matches=lambda item: item.category is Category.GRADIENTS,
        when_absent=lambda place: (
            "before any gradient exists" if place.is_before_gradients else "where hardly any gradient is alive"
        ),
    ),
)
"""Each parameter is updated as soon as its gradient is complete, and the gradient is freed."""


def _why_not_halved(problem: Problem, trace: StepTrace) -> str | None:
    if problem.settings.update is UpdateSchedule.IN_BACKWARD:
        return "the update in the backward needs each gradient complete after one backward"
    size = batch_size(problem.batch)
    if size is None:
        return "the tensors of the batch share no first dimension to halve"
    return None if size % 2 == 0 else f"the batch size {size} cannot be halved"


ACCUMULATE = Technique(
    name="accumulation (half the batch, twice)",
    why_not=_why_not_halved,
    apply=lambda problem: replace(
        _with(problem, accumulate=2 * problem.settings.accumulate), batch=half_of(problem.batch)
    ),
    subject=lambda trace: Subject(
        noun="activations and temporaries",
        matches=lambda item: (
            item.category in (Category.ACTIVATIONS, Category.TEMPORARIES) and not is_foreach_copy(item)
        ),
        when_absent=lambda place: "where hardly anything that grows with the batch is alive",
    ),
)
"""As many samples per update, and half as many at a time."""


def activation_policy(name: str, word: str) -> Technique:
    """A policy for what the repeated blocks save for their backward. Changes no number, unless it compiles; costs time.

    Args:
        name: Shown in the table.
        word: As in `StepSettings.activations`; `recompute/` stands for segments of about the square root of the blocks.
    """
    ineffective = "not one allocation of the step changes"
    if word.startswith("offload"):
        least = format_bytes(Offload().min_bytes)
        ineffective = f"every saved tensor has less than {least}, below which none goes to the host"
    subject = Subject(
        noun="activations",
        matches=lambda item: item.category is Category.ACTIVATIONS,
        when_ineffective=ineffective,
        when_absent=lambda place: (
            "after the last activation is freed" if place is Place.UPDATE else "where hardly any activation is alive"
        ),
    )
    return Technique(
        name=name,
        why_not=partial(_why_not_policy, word),
        apply=lambda problem: _with_policy(problem, _whole_word(word, problem.model)),
        subject=lambda trace: subject,
        is_for_sessions=word in POLICIES,
    )


def _with_policy(problem: Problem, word: str) -> Problem:
    plan = problem.plan
    if plan is None:
        return _with(problem, activations=word)
    named = find_named_groups(problem.model, [group.name for group in plan.groups])
    policies = activations_by_group(lay_out(named, chunk_bytes=plan.chunk_bytes), word)
    groups = tuple(replace(group, activation=policies[group.name]) for group in plan.groups)
    return replace(problem, plan=replace(plan, groups=groups))


def _whole_word(word: str, model: nn.Module) -> str:
    return f"{word}{round(math.sqrt(len(repeated_blocks(model))))}" if word == "recompute/" else word


def _why_not_policy(word: str, problem: Problem, trace: StepTrace) -> str | None:
    before = problem.policy or "keep"
    if before == "keep" and _is_recomputed(trace):
        if word == "recompute":
            return "it is on already"
        return "the model recomputes its layers itself; build it without that and let a policy do it"
    if before == word or (word == "recompute/" and before.startswith(word)):
        return "it is on already"
    if before not in _BETTER_THAN.get(word, ()):
        return f"{before} is on in its place"
    blocks = repeated_blocks(problem.model)
    if not blocks:
        return f"{type(problem.model).__name__} has no repeated blocks"
    if word == "recompute/" and len(blocks) < _FEWEST_FOR_SEGMENTS:
        return f"{len(blocks)} blocks are too few for segments"
    return None


def _is_recomputed(trace: StepTrace) -> bool:
    """What a model recomputes by its own checkpointing shows in the trace: activations that the backward makes."""
    return any(item.category is Category.ACTIVATIONS and item.phase is Phase.BACKWARD for item in trace.allocations)


def _why_not_chunked(problem: Problem, trace: StepTrace) -> str | None:
    if problem.settings.chunked_loss:
        return "it is on already"
    if problem.loss is not None:
        return "the loss is given from outside of the model: call lowtide.activations.linear_cross_entropy in it"
    if logits_shape(trace) is None:
        return "the step has no cross entropy over logits"
    if not callable(getattr(problem.model, "get_output_embeddings", None)):
        return f"{type(problem.model).__name__} is no Hugging Face model whose head is known"
    return None


def _logits(trace: StepTrace) -> Subject:
    shape = logits_shape(trace)
    kinds = (Category.ACTIVATIONS, Category.TEMPORARIES)
    return Subject(
        noun="tensors as wide as the logits",
        matches=lambda item: shape is not None and item.category in kinds and item.shape[-1:] == shape[-1:],
        when_absent=lambda place: "where hardly any of the logits is alive",
    )


CHUNKED_LOSS = Technique(
    name="chunked loss",
    why_not=_why_not_chunked,
    apply=lambda problem: _with(problem, chunked_loss=True),
    subject=_logits,
)
"""The loss of a language model in chunks of tokens: its logits never exist for all tokens at once."""


def batch_size(batch: Any) -> int | None:
    """The first dimension that all tensors of a batch share, apart from those of size 1; None if they share none."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
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
    # A mapping of any kind may be a batch, such as a tokenizer's; torch knows plain ones.
    leaves, structure = compat.flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    halves = [
        leaf[: size // 2].clone() if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf
        for leaf in leaves
    ]
    return compat.unflatten(halves, structure)


def session(name: str, *, weights: str, update: str) -> Technique:
    """The step under `lowtide.manage`: what it needs of the device lies on the host in part. Changes no number; takes copies.

    Args:
        name: Shown in the table.
        weights: As for `make_plan`.
        update: As for `make_plan`.
    """
    kinds = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)
    return Technique(
        name=name,
        why_not=_why_not_a_session,
        apply=lambda problem: problem.under(weights=weights, update=update),
        subject=lambda trace: Subject(
            noun="weights, gradients and optimizer state",
            matches=lambda item: item.category in kinds,
        ),
        begins_session=True,
    )


def _why_not_a_session(problem: Problem, trace: StepTrace) -> str | None:
    if problem.optimizer is None:
        return "the step has no optimizer"
    if problem.trace_session is None:
        return "only a plain step was asked about"
    if problem.plan is not None:
        return "the step is under a plan already"
    return None


HOST_UPDATES = session("updates on the host", weights="resident", update="host")
STREAMED = session("weights streamed, updates on the host", weights="streamed", update="host")

TECHNIQUES = (
    BFLOAT16,
    activation_policy("blocks compiled, half the budget", "compile-budget/0.5"),
    activation_policy("selective recompute", "selective"),
    activation_policy("recompute", "recompute"),
    activation_policy("recompute in segments", "recompute/"),
    activation_policy("offload", "offload"),
    activation_policy("offload without recompute", "offload/all"),
    CHUNKED_LOSS,
    attention_backend(to_math=False),
    FUSED_STEP,
    LOOP_STEP,
    UPDATE_IN_BACKWARD,
    ACCUMULATE,
    HOST_UPDATES,
    STREAMED,
)
"""All techniques, in the order of the table; of those that act alike, the ones that cost less time first."""
