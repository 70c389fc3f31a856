"""Operators and their arguments, as the trace needs to know them before it runs one.

An operator has a name, arguments that it writes, and perhaps chance. Its arguments are ghosts, meta tensors that stand for their
shapes, and values that are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.ghost.tensor import MAX_ELEMENTS, Ghost, Known

_CHANCE = (
    "rand", "bernoulli", "dropout", "normal", "uniform", "multinomial", "exponential", "geometric", "cauchy", "poisson",
)  # fmt: skip

_OTHER_STORAGE = ("resize_", "resize_as_", "set_", "set_data", "_resize_output_")
"""Tagged by torch as in-place views, and give their argument other bytes as well."""

READERS = frozenset(f"aten.{name}" for name in (
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_consecutive", "unique_dim", "_unique", "_unique2",
    "repeat_interleave", "bincount", "allclose",
))  # fmt: skip
"""Operators whose result or whose result's shape depends on values."""

FREE = -1
"""In a course: free the scratch memory that was taken last."""
Course = list[int | Tensor]
"""The memory an operator takes, in order: scratch memory of a number of bytes, an output. What is left of the scratch memory is
freed at the end."""
META = torch.device("meta")
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's schema, reduced to what the trace asks."""

    name: str
    writes: tuple[int, ...] = ()
    """Positions of the arguments it writes to."""
    returns_written: tuple[int | None, ...] = ()
    """For each output the position of the argument it is, None for a new tensor or a view."""
    written_names: tuple[str, ...] = ()
    """Written arguments that are keyword-only (`out=`)."""
    is_chance: bool = False
    reads_values: bool = False
    is_view_in_place: bool = False
    """Changes the shape of its argument, not its bytes: `unsqueeze_`."""


@cache
def describe(func: Any) -> Operator:
    """The operator behind an overload such as `torch.ops.aten.mm.default`."""
    schema = func._schema
    name = schema.name.replace("::", ".")
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    writes = tuple(i for i, a in enumerate(positional) if a.alias_info is not None and a.alias_info.is_write)
    written_names = tuple(
        a.name for a in schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )
    returned: list[int | None] = []
    for result in schema.returns:
        position = None
        if result.alias_info is not None and result.alias_info.is_write:
            for i in writes:
                if positional[i].alias_info.before_set == result.alias_info.before_set:
                    position = i
        returned.append(position)
    short = name.split(".")[-1]
    return Operator(
        name=name,
        writes=writes,
        returns_written=tuple(returned),
        written_names=written_names,
        is_chance=any(word in short for word in _CHANCE) or short.startswith("empty"),
        reads_values=name in READERS and func is not torch.ops.aten.repeat_interleave.self_int,
        is_view_in_place=torch.Tag.inplace_view in func.tags and short not in _OTHER_STORAGE,
    )


def collect_ghosts(values: Iterable[Any], found: list[Ghost]) -> None:
    """Add the ghosts among them, however deep."""
    for value in values:
        if isinstance(value, Ghost):
            found.append(value)
        elif isinstance(value, list | tuple):
            collect_ghosts(value, found)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument, or of what an operator returned."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def to_meta(value: Any) -> Any:
    """The argument with every tensor replaced by one on meta: what torch's shape functions take."""
    if isinstance(value, Ghost):
        return value.inner
    if isinstance(value, Tensor):
        return value if value.device.type == "meta" else value.detach().to(META)
    if isinstance(value, list | tuple):
        return type(value)(to_meta(item) for item in value) if type(value) in (list, tuple) else value
    return value


def to_known(value: Any) -> Any:
    """The argument with every tensor replaced by its known value; None where one is not known."""
    if isinstance(value, Ghost):
        return value.value() if value.numel() <= MAX_ELEMENTS else None
    if isinstance(value, Tensor):
        return Known(value.detach())
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            known = to_known(item)
            if known is None and item is not None:
                return None
            items.append(known)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        known = to_known(list(value.values()))
        return None if known is None else dict(zip(value, known, strict=True))
    return value
