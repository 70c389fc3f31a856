"""Offloading: the hooks through which a group's saved tensors go to a stash."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide import compat
from lowtide.activations.policy import Offload
from lowtide.activations.saved import Held, Saved
from lowtide.activations.stash import Stash
from lowtide.memory.cuda_mover import CudaMover
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Mover

IsWeight = Callable[[torch.Tensor], bool]
"""Whether a tensor is a weight, or shares memory with one: weights never travel as activations."""


class Offloading:
    """The stash of a model, made when the first tensor goes: a model may still be moved before it runs.

    Args:
        mover: Makes the copies. None: one of its own for the device of the first inputs. On the CPU that is an emulated one,
            of use for tests alone.
        is_weight: More weights than the group's own parameters and buffers; None without any.
        poison: See `Stash`.
    """

    def __init__(self, mover: Mover | None, is_weight: IsWeight | None, *, poison: bool) -> None:
        self._mover, self._is_weight, self._poison = mover, is_weight, poison
        self._lock = threading.Lock()
        self.stash: Stash | None = None

    def hooks(self, policy: Offload, module: nn.Module, leaves: Iterable[Any]) -> saved_tensors_hooks:
        """A context for one call of a group: what is saved in it goes to the host, where the policy says so."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        stash = self._stash_for(tensors, module)
        weights = {*module.parameters(), *module.buffers(), *(t for t in tensors if isinstance(t, nn.Parameter))}
        storages = {compat.storage_key(weight) for weight in weights if compat.plain_storage(weight) is not None}
        parcel = stash.open_parcel(policy.depth, module)
        is_weight = self._is_weight or (lambda tensor: False)

        def pack(tensor: torch.Tensor) -> Saved:
            if (
                not stash.accepts(tensor, policy.min_bytes)
                or compat.storage_key(tensor) in storages
                or is_weight(tensor)
            ):
                return Held(tensor)
            return stash.put(parcel, tensor)

        return saved_tensors_hooks(compat.uncompiled_hook(pack), compat.uncompiled_hook(_take))

    def close(self) -> None:
        """Free the stash's host memory."""
        if self.stash is not None:
            self.stash.close()

    def _stash_for(self, tensors: list[torch.Tensor], module: nn.Module) -> Stash:
        with self._lock:
            if self.stash is None:
                tensors = [*tensors, *module.parameters()]
                device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
                own = (
                    EmulatedMover()
                    if device is None
                    else CudaMover(device, max_kept_bytes=sys.maxsize, poison=self._poison)
                )
                self.stash = Stash(self._mover or own, poison=self._poison)
            return self.stash


def _take(saved: Saved) -> torch.Tensor:
    return saved.take()
