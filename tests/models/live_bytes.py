"""Counting the bytes that live tensors hold, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Highest number of bytes in storages that were made inside the block and alive at the same time.

    Storages up to `ignore_bytes` do not count, so that scalars and vectors do not blur the arithmetic on matrices.
    """

    def __init__(self, ignore_bytes: int = 0) -> None:
        super().__init__()
        self.ignore_bytes = ignore_bytes
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                if storage.nbytes() > self.ignore_bytes:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return out


def saved_bytes(run: Callable[[], Tensor], *, but_not: list[Tensor]) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward of what `run` computes.

    Args:
        run: The forward.
        but_not: Tensors that are there anyway (parameters, inputs).
    """
    others = {tensor.untyped_storage()._cdata for tensor in but_not}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in others:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.grad_fn is not None
    return sum(storage.nbytes() for storage in kept.values())
