"""Precision in words: what a user asks for, as the type of the weights and how updates land in them."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError, UnknownNameError
from lowtide.optim.update_types import BLOCK, STATE_NAMES, Adam, ElementwiseRule, Moments, Numerics, Rounding, Sgd


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The type of trained weights, and how an fp32 result lands in it."""

    dtype: torch.dtype
    rounding: Rounding


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(dtype=torch.float32, rounding=Rounding.NEAREST),
    "bf16 exact": Precision(dtype=torch.bfloat16, rounding=Rounding.EXACT),
    "bf16 stochastic": Precision(dtype=torch.bfloat16, rounding=Rounding.STOCHASTIC),
    "bf16 nearest": Precision(dtype=torch.bfloat16, rounding=Rounding.NEAREST),
    "fp16 exact": Precision(dtype=torch.float16, rounding=Rounding.MASTER),
}
"""fp16 has another range than fp32's upper half, so that its exact format keeps a whole fp32 master."""


def numerics_of(precision: str, moments: str | Moments = Moments.FP32, *, seed: int = 0) -> tuple[Precision, Numerics]:
    """From words.

    Example:
        >>> numerics_of("bf16 exact", "8bit")[1].moments.value
        '8bit'

    Raises:
        UnknownNameError: A word is none.
        ConfigError: The seed is no whole number.
    """
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    try:
        stored = Moments(moments)
    except ValueError:
        raise UnknownNameError("format of moments", str(moments), [member.value for member in Moments]) from None
    try:
        whole = operator.index(seed)
    except TypeError:
        # Else the first update would find out, in the middle of a step.
        raise ConfigError(f"seed is {seed!r}; give a whole number", key="seed") from None
    found = PRECISIONS[precision]
    return found, Numerics(rounding=found.rounding, moments=stored, seed=whole)


def rounding_for(weight: torch.Tensor, numerics: Numerics) -> Rounding:
    """How results land in this weight: in fp32 there is nothing to round.

    Raises:
        ConfigError: The weight is of a type that the format is not for.
    """
    if weight.dtype is torch.float32:
        return Rounding.NEAREST
    if numerics.rounding in (Rounding.EXACT, Rounding.STOCHASTIC) and weight.dtype is not torch.bfloat16:
        raise ConfigError(
            f"a {numerics.rounding.value} update is for bf16 weights, and this one is {weight.dtype}; convert the model "
            "with model.to(torch.bfloat16), or choose the precision 'fp16 exact'",
            key="precision",
        )
    return numerics.rounding


def state_names(rule: ElementwiseRule) -> tuple[str, ...]:
    """The states that a rule keeps for each element."""
    if isinstance(rule, Sgd) and not rule.momentum:
        return ()
    more = ("max_exp_avg_sq",) if isinstance(rule, Adam) and rule.amsgrad else ()
    return STATE_NAMES[type(rule)] + more


def kept_bytes(num_elements: int, dtype: torch.dtype, numerics: Numerics) -> int:
    """Bytes beside a weight that its rounding keeps: a remainder or a master."""
    if dtype is torch.float32:
        return 0
    return {Rounding.EXACT: 2, Rounding.MASTER: 4}.get(numerics.rounding, 0) * num_elements


def moment_bytes(num_elements: int, moments: Moments) -> int:
    """Bytes of one state with a number for each element."""
    if moments is Moments.INT8:
        return num_elements + 4 * -(-num_elements // BLOCK)
    return (4 if moments is Moments.FP32 else 2) * num_elements
