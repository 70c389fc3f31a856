"""What-if techniques that act on activations: policies for the repeated blocks, and a loss that never holds the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lowtide.activations.policy import Offload
from lowtide.memory.blocks import repeated_blocks
from lowtide.planning.problem import Problem
from lowtide.planning.reasons import Subject
from lowtide.tracing.explanation.explain import logits_shape
from lowtide.tracing.explanation.instant import Place
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import format_bytes

FEWEST_FOR_SEGMENTS = 4
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
        if self.word == "recompute/" and len(blocks) < FEWEST_FOR_SEGMENTS:
            return f"{len(blocks)} blocks are too few for segments"
        return None

    def apply(self, problem: Problem) -> Problem:
        """Put the policy on the blocks."""
        word = self.word
        if word == "recompute/":
            word = f"recompute/{round(math.sqrt(len(repeated_blocks(problem.model))))}"
        return replace(problem, settings=replace(problem.settings, activations=word))

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
        return replace(problem, settings=replace(problem.settings, chunked_loss=True))

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


ACTIVATION_TECHNIQUES = (
    ActivationPolicy("blocks compiled, half the budget", "compile-budget/0.5"),
    ActivationPolicy("selective recompute", "selective"),
    ActivationPolicy("recompute", "recompute"),
    ActivationPolicy("recompute in segments", "recompute/"),
    ActivationPolicy("offload", "offload"),
    ActivationPolicy("offload without recompute", "offload/all"),
    ChunkedLoss(),
)
"""In the order of the table; of those that act alike, the ones that cost less time first."""
