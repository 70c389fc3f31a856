"""FootprintLookup: stands in a trace for an embedding whose table is on the host: only rows come to the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.activations.host_embedding import find_repeats
from lowtide.errors import TraceError


class FootprintLookup:
    """Stands in the embedding's calls until `remove`. What `activations.host_embedding.HostEmbedding` is in a session."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inner = compat.replace_call(module, self._call)

    def remove(self) -> None:
        """The embedding is called as before."""
        compat.replace_call(self._module, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with _Lookups(self._module):
            return (self._inner or compat.plain_call(self._module))(*args, **kwargs)


class _Lookups(TorchFunctionMode):
    """Takes the lookups of the table out of whatever the module computes around them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding or args[1] is not self._module.weight:
            return func(*args, **(kwargs or {}))
        ids, weight = args[:2]
        return _Rows.apply(weight, ids, _num_different(ids))  # type: ignore[no-untyped-call]  # torch's has no types


class _Rows(torch.autograd.Function):
    """Makes what a lookup on the host makes on the device. The table's gradient is made on the host, and so is none here."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, num_different: int | None) -> Tensor:
        del ctx
        width, device = weight.shape[1], weight.device
        rows = torch.empty(
            ids.numel() if num_different is None else num_different, width, dtype=weight.dtype, device=device
        )
        if num_different is not None:
            positions = torch.empty(ids.numel(), dtype=torch.int64, device=device)
            rows = rows.index_select(0, positions)
        return rows.view(*ids.shape, width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        del ctx
        gradient.reshape(-1, gradient.shape[-1])  # a copy where it does not lie in rows
        return None, None, None


def _num_different(ids: Tensor) -> int | None:
    """How many rows are sent, where those that repeat are sent once; None where each id has its own, as `look_up` does it."""
    try:
        values = ids.tolist()
    except TraceError:  # computed in the model: at worst all are different
        return None
    repeats = find_repeats(torch.tensor(values))
    return None if repeats is None else repeats.rows.numel()
