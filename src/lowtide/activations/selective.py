"""Selective recomputation: outputs of matmuls and attention are kept, the rest runs again.

Note [Random operators are never kept]
A kept operator does not run again. One that draws random numbers would leave the generator behind, and every dropout mask
after it would be another than in the forward. So attention with dropout, and whatever else draws, runs again even where
the rule would keep it. What draws is told by torch's tag, or by a share of dropout among the arguments: an operator of another
package that has neither must not be named by a rule.

Note [Casts of weights are not counted]
Under autocast a weight is cast once, and whoever uses it next (a group that is called twice, a tied weight, a second forward in
the same context) finds the cast in autocast's cache. The second run of a group may find it there, or not, the other way
round than the first did. The operators of the two runs are paired by counting them, so these casts must go past that.

Note [What is asked once]
A block runs hundreds of operators, and the host tells the device of each. So a rule is asked once for each operator, and
what torch says of it is read once; operators that are not kept are not even counted. That is why the two modes are our own:
torch's ask, count and note at each call, which took as long as the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lowtide import compat
from lowtide.activations.policy import KeepRule
from lowtide.activations.saved import version_of
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
    """What checkpoints need to keep the outputs of the operators that the rule names; for any number of calls."""
    return partial(_contexts, _Operators(rule or is_expensive))


def explain_fault(error: RuntimeError, label: str, rule: KeepRule | None) -> ActivationError | None:
    """What a complaint in the second run of a selective group means; None for any other error."""
    if isinstance(error, _WrittenError):
        kept = "a matmul, a convolution or an attention" if rule is None else "an operator that the rule names"
        return ActivationError(
            f"{label} writes in place to the output of {kept}, which Selective keeps for the backward (dropout on the CPU writes "
            "to an empty_like); give the group Recompute, or a rule that does not keep that operator"
        )
    if isinstance(error, _UsedUpError):
        return ActivationError(
            f"a second backward through {label}, whose kept outputs are used up in the first; give the group Recompute or Keep"
        )
    return None


class _WrittenError(RuntimeError):
    """A kept output is not what it was."""


class _UsedUpError(RuntimeError):
    """A kept output was taken already."""


def _contexts(operators: _Operators) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept: dict[object, list[Any]] = {}
    return _FirstRun(operators, kept), _LaterRun(operators, kept)


@dataclass(slots=True)
class _Operator:
    """What is known of an operator before it is called."""

    may_be_kept: bool
    is_cast: bool = False
    is_overload: bool = True
    dropouts: tuple[tuple[int, str, Any], ...] = ()
    """Places, names and defaults of arguments that are shares of dropout."""

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call of an operator that may be kept draws random numbers."""
        for place, name, default in self.dropouts:
            share = args[place] if place < len(args) else kwargs.get(name, default)
            if isinstance(share, int | float) and share:
                return True
        return False


@dataclass(slots=True)
class _Operators:
    """What is known of each operator; see Note [What is asked once]."""

    rule: KeepRule
    known: dict[object, _Operator] = field(default_factory=dict)

    def describe(self, operator: Any) -> _Operator:
        """Describe an operator that runs for the first time."""
        arguments = compat.operator_arguments(operator)
        dropouts = tuple((place, *item) for place, item in enumerate(arguments.items()) if "dropout" in item[0])
        draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()) and "dropout_p" not in arguments
        # One that writes to its argument and does not run again would leave it unwritten.
        is_out = draws or compat.writes_argument(operator) or operator in compat.uncounted_operators()
        is_cast, is_overload = compat.operator_name(operator) == "_to_copy", compat.is_overload(operator)
        found = _Operator(not is_out and bool(self.rule(operator)), is_cast, is_overload, dropouts)
        self.known[operator] = found
        return found


class _Run(compat.WatchingMode):
    def __init__(self, operators: _Operators, kept: dict[object, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._operators = operators
        self._known = operators.known
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = self._known.get(func) or self._operators.describe(func)
        # See Note [Casts of weights are not counted].
        if not operator.may_be_kept or (operator.is_cast and args[0].is_leaf and args[0].requires_grad):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._run(
            func if operator.is_overload else compat.operator_key(func, args), operator, func, args, kwargs or {}
        )

    def _run(self, key: object, operator: _Operator, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _FirstRun(_Run):
    def _run(self, key: object, operator: _Operator, func: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        self._kept.setdefault(key, []).append(None if operator.draws(args, kwargs) else _KeptOutput.detached(output))
        return output


class _LaterRun(_Run):
    def __init__(self, operators: _Operators, kept: dict[object, list[Any]]) -> None:
        super().__init__(operators, kept)
        self._places: dict[object, int] = {}

    def __enter__(self) -> _LaterRun:
        self._places.clear()  # the backward may come again, where its graph was retained
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types
        return self

    def _run(self, key: object, operator: _Operator, func: Any, args: Any, kwargs: Any) -> Any:
        outputs, place = self._kept.get(key, []), self._places.get(key, 0)
        self._places[key] = place + 1
        if place >= len(outputs):
            raise RuntimeError(
                f"{func} ran {len(outputs)} time(s) in the forward of a selective group and more often in its backward: what "
                "the group runs depends on something that has changed in between"
            )
        output = outputs[place]
        if output is None:
            return func(*args, **kwargs)
        outputs[place] = _USED_UP
        return output.taken()


@dataclass(slots=True)
class _KeptOutput:
    """What an operator gave in the first run, for the later ones."""

    value: Any
    """Tensors detached: their own history would hold them for ever."""
    versions: list[int]

    @classmethod
    def detached(cls, value: Any) -> _KeptOutput:
        """Keep what an operator gave. This runs below autograd, which has not recorded the output yet."""
        if isinstance(value, torch.Tensor):
            return cls(compat.detached_below_autograd(value), [version_of(value)])
        leaves, structure = compat.flatten(value)
        kept = [compat.detached_below_autograd(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return cls(compat.unflatten(kept, structure), [version_of(tensor) for tensor in compat.tensors_in(kept)])

    def taken(self) -> Any:
        """The output, unless it was written to since the first run."""
        if [version_of(tensor) for tensor in compat.tensors_in(self.value)] != self.versions:
            raise _WrittenError("an output that a selective group keeps was written to in place")
        return self.value


class _UsedUp:
    def taken(self) -> Any:
        raise _UsedUpError("an output that a selective group kept was taken by a backward before")


_USED_UP = _UsedUp()
