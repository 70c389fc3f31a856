"""What a trace takes for granted where the truth depends on weights, and says so when somebody relies on it.

Each is a value a healthy step would show: checks pass, numbers are finite, routers are in balance. They are recipes, evaluated
only if the step reads them, and only then is the note made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.tracing.ghost.operators import Operator
from lowtide.tracing.ghost.values import Known, balanced_choice

CHECKS = "checks of values that depend on weights were taken to pass: `.all()` to be true, `.any()` to be false"
FINITE = "values that depend on weights were taken to be finite"
BALANCE = "choices that depend on weights (a router's topk, argmax or max) were taken to be spread evenly"

_CHECKS = {"aten.all": True, "aten._is_all_true": True, "aten.any": False, "aten._is_any_true": False}

Note = Callable[[str], None]


def assumed(op: Operator, args: Any, result: Any, note: Note) -> tuple[Any, Known] | None:
    """The output an assumption is made about, and its assumed values; None where there is nothing to assume."""
    if op.name in _CHECKS and result.dim() == 0:
        return result, _filled((), _CHECKS[op.name], CHECKS, note)
    if op.name in ("aten.isnan", "aten.isinf"):
        return result, _filled(result.shape, False, FINITE, note)
    if op.name in ("aten.topk", "aten.argmax", "aten.max"):
        return _choice(op, args, result, note)
    return None


def _filled(shape: tuple[int, ...], value: bool, text: str, note: Note) -> Known:
    def make() -> torch.Tensor:
        note(text)
        return torch.full(shape, value)

    return Known(func=make)


def _choice(op: Operator, args: Any, result: Any, note: Note) -> tuple[Any, Known] | None:
    """A choice along the last dimension: of some of its entries, or of the best one."""
    source = args[0]
    if op.name == "aten.topk":
        chosen, count, dim = result[1], args[1], args[2] if len(args) > 2 else -1
    else:
        is_pair = isinstance(result, list | tuple)
        if len(args) < 2 or not isinstance(args[1], int) or (op.name == "aten.max" and not is_pair):
            return None  # over all elements, or the larger of two tensors
        chosen, count, dim = result[1] if is_pair else result, 1, args[1]
    if dim not in (-1, source.dim() - 1) or not source.dim() or count >= source.shape[-1]:
        return None
    make = balanced_choice(source.shape[:-1], source.shape[-1], count)
    shape = chosen.shape  # not the tensor itself: it holds the recipe, and would live until the next garbage collection

    def choose() -> torch.Tensor:
        note(BALANCE)
        return make().view(shape)

    return chosen, Known(func=choose)
