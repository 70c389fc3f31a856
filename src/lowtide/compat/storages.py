"""Storages: whose memory a tensor shows, who holds it, and memory locked for copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def plain_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage that holds the tensor's bytes; None where it has none of its own (sparse, opaque, meta, fake).

    Torch keeps one Python object per storage alive for as long as the storage lives, whoever holds it: its `id` is a
    key, and a weak reference to it tells of the storage's death.
    """
    # A subclass would get to see these reads through __torch_function__.
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # torch raises either for tensors without a storage, by their kind
            return None
    # A tensor of a trace has no bytes: a meta storage stands for them, and is shared as theirs would be.
    return None if storage.device.type == "meta" and not is_stand_in(tensor) else storage


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a trace: it says so of its class, and stands for a plain one."""
    return getattr(type(tensor), "has_storage_of_its_own", False)


def reference_count(tensor: torch.Tensor) -> int:
    """How many C++ owners a tensor has, its Python object included."""
    counted: Any = tensor
    return int(counted._use_count())


def storage_over(flat: torch.Tensor) -> torch.UntypedStorage:
    """A new storage over exactly the bytes of a flat tensor, which keeps them alive; on any device, without a copy."""
    # Not the public `from_dlpack`: it asks the driver about the memory and records events, at every call.
    shared: torch.Tensor = torch._C._from_dlpack(torch._C._to_dlpack(flat))
    return shared.untyped_storage()


def num_storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors share the storage, `tensor` included."""
    return num_owners(tensor.untyped_storage())


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors share the storage."""
    # Its Python object is one owner itself.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def nums_of_owners(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """`num_owners` of each."""
    count = torch._C._storage_Use_Count
    return [count(storage._cdata) - 1 for storage in storages]


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, on meta too; valid while both live."""
    return int(tensor.untyped_storage()._cdata)


def lock_host_memory(buffer: torch.Tensor) -> str | None:
    """Lock a host tensor's memory for copies; what CUDA answered where it could not, None where it did.

    Registered memory has exactly the tensor's size; torch's own locked allocations are rounded up to a power of two.
    """
    answer = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(answer) == 0:
        return None
    # CUDA keeps the refusal as its last error, and the next kernel that the user starts would be blamed for it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return str(answer)


def unlock_host_memory(address: int) -> None:
    """Undo `lock_host_memory` of the memory that begins there."""
    torch.cuda.cudart().cudaHostUnregister(address)


def without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor on the host that looks like the parameter and has no memory. Not on meta: there torch 2.11 refuses fused
    optimizers.
    """
    with FakeTensorMode():
        return torch.empty_strided(
            parameter.shape,
            parameter.stride(),
            dtype=parameter.dtype,
            device="cpu",
            requires_grad=parameter.requires_grad,
        )


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stand-in for one: on meta, or fake, or of a device that only predicts."""
    # Not torch's spare backend under any other name: that may be a real device.
    without = ("meta", "ghost")
    # By name: importing the class would import the compiler's parts, where nobody predicts.
    return tensor.device.type in without or type(tensor).__name__ == "FakeTensor"
