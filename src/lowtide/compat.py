"""Every private torch touchpoint, in one file, so that a new torch version is checked in one place (2.11 to 2.13)."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def autograd_references(holder: object) -> list[object]:
    """What a tensor or an autograd node keeps alive from C++, where the garbage collector cannot see it.

    For a tensor: its node, its gradient, the base it is a view of, its indices and values. For a node: the nodes before
    it, the leaf it accumulates into, what it saved for the backward. Packed values (`saved_tensors_hooks`) come as they
    were packed together with their unpack hook; nothing is unpacked, because that may copy or recompute.
    """
    if isinstance(holder, torch.Tensor):
        # A subclass would get to see these attribute reads through __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            return _tensor_references(holder)
    references: list[object] = [function for function, _ in getattr(holder, "next_functions", ()) if function is not None]
    references.append(getattr(holder, "variable", None))
    for name in dir(type(holder)):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(holder, name)
            except RuntimeError:  # a list of saved tensors that the backward has freed already
                continue
            for entry in saved if isinstance(saved, list | tuple) else (saved,):
                references += (entry.data, entry.unpack_hook)
    return [reference for reference in references if reference is not None]


def _tensor_references(tensor: torch.Tensor) -> list[object]:
    references: list[object] = [tensor.grad_fn, tensor._base]
    if tensor.is_leaf or tensor.retains_grad:  # reading it elsewhere warns
        references.append(tensor.grad)
    if tensor.layout is torch.sparse_coo:
        references += (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        references += (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        references += (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return [reference for reference in references if reference is not None]


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
        except (NotImplementedError, RuntimeError):
            return None
    return None if storage.device.type == "meta" else storage
