"""Selective recomputation: outputs of matmuls and attention are kept, the rest runs again.

Note [Random operators are never kept]
A kept operator does not run again. One that draws random numbers would leave the generator behind, and every dropout mask
after it would be another than in the forward. So attention with dropout, and whatever else draws, runs again even where
the rule would keep it. What draws is told by torch's tag, or by a share of dropout among the arguments: an operator of another
package that has neither must not be named by a rule.

Note [Casts of weights are not counted]
Under autocast a weight is cast once, and whoever uses it next (a group that is called twice, a tied weight, a second forward in
the same context) finds the cast in autocast's cache. The second run of a group may find it there, or not, the other way
round than the first did. Torch pairs the operators of the two runs by counting them, so these casts must go past it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide import compat
from lowtide.activations.policy import KeepRule
from lowtide.errors import ActivationError

MATRIX_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm",
)  # fmt: skip
ATTENTION = (
    "_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_cudnn_attention", "flex_attention", "_flash_attn",
)  # fmt: skip
"""How the names of attention operators begin, torch's and those of the packages that bring their own."""


def is_expensive(operator: object) -> bool:
    """The default rule: whether an operator is a matrix product, a convolution or an attention.

    Example:
        >>> is_expensive(torch.ops.aten.mm.default), is_expensive(torch.ops.aten.gelu.default)
        (True, False)
    """
    name = compat.operator_name(operator)
    return name in MATRIX_PRODUCTS or name.startswith(ATTENTION)


def selective_contexts(
    rule: KeepRule | None,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """What a checkpoint needs to keep the outputs of the operators that the rule names."""
    return partial(_contexts, partial(_decide, rule or is_expensive))


def explain_fault(error: RuntimeError, label: str, rule: KeepRule | None) -> ActivationError | None:
    """What torch's complaint in the second run of a selective group means; None for any other error."""
    text = str(error)
    if "has been mutated" in text:
        kept = "a matmul, a convolution or an attention" if rule is None else "an operator that the rule names"
        return ActivationError(
            f"{label} writes in place to the output of {kept}, which Selective keeps for the backward (dropout on the CPU writes "
            "to an empty_like); give the group Recompute, or a rule that does not keep that operator"
        )
    if "backward an extra time" in text:
        return ActivationError(
            f"a second backward through {label}, whose kept outputs are used up in the first; give the group Recompute or Keep"
        )
    return None


def _contexts(
    decide: Callable[..., CheckpointPolicy],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, later = create_selective_checkpoint_contexts(decide)
    for mode in (first, later):
        kind: type[compat.TorchDispatchMode] = type(mode)
        mode.__class__ = _past_casts(kind)  # type: ignore[arg-type]  # mypy takes the instances' __hash__ for the class's
    return first, later


@cache
def _past_casts(kind: type[compat.TorchDispatchMode]) -> type[compat.TorchDispatchMode]:
    """See Note [Casts of weights are not counted]. Of the same layout as the class that torch made its mode of."""

    class PastCasts(kind):  # type: ignore[misc, valid-type]  # which class it is, is known when it runs
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if compat.operator_name(func) == "_to_copy" and args[0].is_leaf and args[0].requires_grad:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return PastCasts


def _decide(rule: KeepRule, context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context
    # One that writes to its argument and does not run again would leave it unwritten.
    keeps = not _draws(operator, args, kwargs) and not compat.writes_argument(operator) and rule(operator)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    defaults = compat.operator_arguments(operator)
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    shares = [value for name, value in given.items() if "dropout" in name and isinstance(value, int | float)]
    # Other packages' attention has no tag that tells.
    if any(shares):
        return True
    is_tagged = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    return is_tagged and "dropout_p" not in given
