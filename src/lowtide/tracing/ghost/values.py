"""Known: the values of a ghost tensor, where they follow from the batch and from constants alone.

Models look at token ids, masks and positions (is the mask all ones? which rows are hit?). Those values are there, so the
trace takes the branch the real step takes. They are computed on the host, only when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 2**27
"""Above this a value is not computed: a quarter of a GiB of booleans takes a second on the host, more is not worth it."""


class Known:
    """The value of one tensor as a recipe: an operator and its arguments, evaluated at most once."""

    __slots__ = ("_args", "_func", "_kwargs", "_output", "_tensor")

    def __init__(
        self,
        tensor: Tensor | None = None,
        *,
        func: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        output: int | None = None,
    ) -> None:
        self._tensor = tensor
        self._func = func
        self._args = args
        self._kwargs = kwargs or {}
        self._output = output

    def get(self) -> Tensor:
        """The value on the host."""
        if self._tensor is None:
            assert self._func is not None
            args = _resolve(self._args)
            kwargs = {key: _resolve(value) for key, value in self._kwargs.items()}
            result = self._func(*args, **kwargs)
            self._tensor = result if self._output is None else result[self._output]
            self._func, self._args, self._kwargs = None, (), {}
        assert self._tensor is not None
        return self._tensor


def _resolve(value: Any) -> Any:
    if isinstance(value, Known):
        return value.get()
    if isinstance(value, list | tuple):
        return type(value)(_resolve(item) for item in value)
    return value


def balanced_choice(rows: torch.Size, choices: int, count: int) -> Callable[[], Tensor]:
    """Indices as a router in balance would pick them: every choice equally often, `count` different ones a row."""

    def make() -> Tensor:
        total = rows.numel()
        flat = torch.arange(total * count).view(total, count) % choices
        return flat.view(*rows, count)

    return make
