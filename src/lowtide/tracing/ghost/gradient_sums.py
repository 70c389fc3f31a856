"""GradientSums: autograd's own additions of gradients, which it makes in place where nobody else holds the first term."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lowtide import compat
from lowtide.tracing.ghost.making import Maker
from lowtide.tracing.ghost.operators import describe
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.step_trace import Phase

aten = torch.ops.aten


class GradientSums:
    """Of one trace. Under a dispatch mode autograd never adds in place, so that a sum would take memory that it does not."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self.sole_owner_count: int | None = None
        """References to a gradient that only the engine holds; None: the next sum shows it."""

    def is_one(self, func: Any) -> bool:
        """Whether autograd's engine itself adds two gradients: in the backward, with no Python code calling."""
        return (
            func is aten.add.Tensor
            and self._maker.recorder.phase is Phase.BACKWARD
            and self._maker.recorder.is_called_from_engine()
        )

    def in_place(self, args: Any) -> Ghost | None:
        """The first term, which now holds the sum; None where somebody else has a reference to it."""
        old = args[0]
        if not isinstance(old, Ghost) or compat.num_storage_owners(old.inner) > 1:
            return None
        owners = compat.reference_count(old) + sys.getrefcount(old)  # in C++, and of its Python object: a user's hook
        if self.sole_owner_count is None:
            self.sole_owner_count = owners
        if owners > self.sole_owner_count:
            return None
        self._maker.written(old, describe(aten.add_.Tensor), None)
        return old
