"""CheckReport: how a managed run compares with the plain one, loss by loss and weight by weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.config import to_plain
from lowtide.lab.recipe import Recipe
from lowtide.plain_text import Plain
from lowtide.runtime.session_stats import SessionStats

SCHEMA = "lowtide.check/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One parameter or buffer that ended the two runs with different bits."""

    name: str
    max_difference: float
    """Largest absolute difference of two elements; infinite where one of them is NaN and the other is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `run_check` found."""

    recipe: Recipe
    device: str
    """Where both runs computed."""
    plain_losses: tuple[float, ...]
    """One for each update."""
    managed_losses: tuple[float, ...]
    differing_weights: tuple[TensorDifference, ...]
    """In the order of the model's state dict; empty when every bit is the same."""
    stats: SessionStats
    """Of the managed run."""

    @property
    def tolerance(self) -> float:
        """What the recipe accepts."""
        return self.recipe.tolerance

    @property
    def max_loss_difference(self) -> float:
        """Over all updates."""
        pairs = zip(self.plain_losses, self.managed_losses, strict=True)
        return max((_distance(plain, managed) for plain, managed in pairs), default=0.0)

    @property
    def max_weight_difference(self) -> float:
        """Over all parameters and buffers after the last update."""
        return max((tensor.max_difference for tensor in self.differing_weights), default=0.0)

    @property
    def first_differing_step(self) -> int | None:
        """Number of the first update, from 0, whose losses are not the same; None when all are."""
        pairs = zip(self.plain_losses, self.managed_losses, strict=True)
        return next((step for step, (plain, managed) in enumerate(pairs) if plain != managed), None)

    @property
    def first_difference(self) -> str | None:
        """In words, with steps counted from 1, the earliest difference that was seen; None when there is none."""
        step = self.first_differing_step
        if step is not None:
            return f"the loss of step {step + 1}: {self.plain_losses[step]!r} against {self.managed_losses[step]!r}"
        if self.differing_weights:
            first = self.differing_weights[0]
            return f"{first.name!r} after the last step, by {first.max_difference:.3g}"
        return None

    @property
    def is_identical(self) -> bool:
        """Whether every loss and every bit of the weights is the same."""
        return self.first_differing_step is None and not self.differing_weights

    @property
    def passed(self) -> bool:
        """Identical, or within the tolerance where the recipe gives one."""
        return self.is_identical or (
            self.tolerance > 0.0 and max(self.max_loss_difference, self.max_weight_difference) <= self.tolerance
        )

    def to_dict(self) -> dict[str, Plain]:
        """Plain data for JSON. A number that is not finite becomes text, since JSON has none."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "identical": self.is_identical,
            "tolerance": self.tolerance,
            "first_difference": self.first_difference,
            "max_loss_difference": _number(self.max_loss_difference),
            "max_weight_difference": _number(self.max_weight_difference),
            "differing_weights": [
                {"name": tensor.name, "max_difference": _number(tensor.max_difference)}
                for tensor in self.differing_weights
            ],
            "plain_losses": [_number(loss) for loss in self.plain_losses],
            "managed_losses": [_number(loss) for loss in self.managed_losses],
            "device": self.device,
            "recipe": to_plain(self.recipe),
            "stats": self.stats.to_dict(),
        }


def compare_tensors(plain: Mapping[str, Tensor], managed: Mapping[str, Tensor]) -> tuple[TensorDifference, ...]:
    """The tensors of two state dicts that differ in any bit.

    A name that only one of them has, or another dtype or shape, is a difference without bound.
    """
    return tuple(_differences(plain, managed))


def _differences(plain: Mapping[str, Tensor], managed: Mapping[str, Tensor]) -> Iterator[TensorDifference]:
    for name in dict.fromkeys([*plain, *managed]):
        first, second = plain.get(name), managed.get(name)
        if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
            yield TensorDifference(name=name, max_difference=math.inf)
        elif not torch.equal(_bits(first), _bits(second)):
            yield TensorDifference(name=name, max_difference=_max_difference(first, second))


def _bits(tensor: Tensor) -> Tensor:
    # Equal values are not the same bits: -0.0 equals 0.0, and NaN does not equal itself.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _max_difference(first: Tensor, second: Tensor) -> float:
    # In double: the difference of two bf16 numbers need not be one.
    wide = (first.detach().cpu().double(), second.detach().cpu().double())
    same = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())
    return float((wide[0] - wide[1]).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max())


def _distance(first: float, second: float) -> float:
    if first == second:
        return 0.0
    difference = abs(first - second)
    return math.inf if math.isnan(difference) else difference


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
