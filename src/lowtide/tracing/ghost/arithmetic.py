"""Floating point operations of the operators that do most of them, for the estimated time axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

BACKWARD_ATTENTION = 2.5
"""Products in the backward of fused attention (five) over those in its forward (two)."""


def num_flops(name: str, args: tuple[Any, ...], out: Any) -> float:
    """Operations of one call; 0 for operators that are bound by memory traffic anyway."""
    formula = _FORMULAS.get(name)
    return 0.0 if formula is None else float(formula(args, out))


def _product(left: int) -> Callable[[tuple[Any, ...], Any], Any]:
    def formula(args: tuple[Any, ...], out: Any) -> Any:
        return 2.0 * math.prod(out.shape) * args[left].shape[-1]

    return formula


def _grouped_product(args: tuple[Any, ...], out: Any) -> Any:
    if args[0].dim() == 2 and args[1].dim() == 2:  # the weights' gradients: each row is used by one group only
        return 2.0 * math.prod(out.shape[1:]) * args[0].shape[-1]
    return 2.0 * math.prod(out.shape) * args[0].shape[-1]


def _attention(scale: float, first: int) -> Callable[[tuple[Any, ...], Any], Any]:
    def formula(args: tuple[Any, ...], out: Any) -> Any:
        query, key = args[first], args[first + 1]
        batch, heads, length, size = query.shape
        return scale * 4.0 * batch * heads * length * key.shape[2] * size

    return formula


def _convolution(args: tuple[Any, ...], out: Any) -> Any:
    return 2.0 * math.prod(out.shape) * math.prod(args[1].shape[1:])


def _convolution_backward(args: tuple[Any, ...], out: Any) -> Any:
    return 4.0 * math.prod(args[0].shape) * math.prod(args[2].shape[1:])


_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], Any]] = {
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.addmm": _product(1),
    "aten.baddbmm": _product(1),
    "aten._addmm_activation": _product(1),
    "aten._grouped_mm": _grouped_product,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    **{f"aten._scaled_dot_product_{kind}_attention": _attention(1.0, 0) for kind in ("cudnn", "flash", "efficient")},
    **{
        f"aten._scaled_dot_product_{kind}_attention_backward": _attention(BACKWARD_ATTENTION, 1)
        for kind in ("cudnn", "flash", "efficient")
    },
}
