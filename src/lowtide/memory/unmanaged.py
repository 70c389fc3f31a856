"""Parameters that are left as they are, and why."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide import compat

_INTEGERS = frozenset({
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip

SPARSE_GRADIENT = "its gradient is sparse (sparse=True)"
"""The reason of a table whose lookups give sparse gradients."""


def unmanaged_parameters(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(name, reason) of each parameter that Lowtide does not move: plain, dense tensors alone can live in a chunk.

    Example:
        >>> unmanaged_parameters(nn.Embedding(4, 2, sparse=True))
        (('weight', 'its gradient is sparse (sparse=True)'),)
    """
    by_module = _by_module(model)
    aliases = _aliases(model)
    found = []
    for name, parameter in model.named_parameters():
        reason = _reason(parameter) or by_module.get(id(parameter)) or aliases.get(id(parameter))
        if reason is not None:
            found.append((name, reason))
    return tuple(found)


def _reason(parameter: Tensor) -> str | None:
    if isinstance(parameter, nn.UninitializedParameter):
        return "it has no shape yet; run one batch through the lazy module first"
    # A plan may be made for a model that is managed: while something is pending its parameters are of a class of ours.
    if type(parameter) is not nn.Parameter and not getattr(type(parameter), "is_plain_when_settled", False):
        return f"it is a {type(parameter).__name__}, not a plain Parameter"
    if parameter.layout is not torch.strided:
        return f"its layout is {str(parameter.layout).removeprefix('torch.')}, not strided"
    if parameter.is_quantized:
        return f"it is quantised ({str(parameter.dtype).removeprefix('torch.')})"
    if not (parameter.dtype.is_floating_point or parameter.dtype.is_complex or parameter.dtype in _INTEGERS):
        return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.numel() == 0:
        return "it has no elements"
    if not is_dense(tuple(parameter.shape), parameter.stride()):
        return f"its elements overlap or have gaps between them (shape {tuple(parameter.shape)}, stride {parameter.stride()})"
    return None


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill its bytes exactly once, in whatever order of dimensions.

    Example:
        >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (4, 1)), is_dense((2, 3), (0, 1))
        (True, False, False)
    """
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _by_module(model: nn.Module) -> dict[int, str]:
    """Reasons that lie in how a module uses its weight."""
    found = {}
    for module in model.modules():
        # A lazy or a parametrized module may not have it: only what is registered counts.
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            for parameter in module.parameters():
                if module.sparse:
                    found[id(parameter)] = SPARSE_GRADIENT
                elif module.max_norm is not None:
                    # The change would be made to the device's copy, which is dropped after the call.
                    found[id(parameter)] = f"the forward rewrites it in place (max_norm={module.max_norm})"
    return found


def _aliases(model: nn.Module) -> dict[int, str]:
    """Different parameters over the same bytes: each would get a place of its own, and their tie would be cut."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if _reason(parameter) is None:
            by_storage.setdefault(compat.storage_key(parameter), []).append((name, parameter))
    found = {}
    for sharing in by_storage.values():
        end, last = -1, None
        for name, parameter in sorted(sharing, key=lambda item: item[1].storage_offset() * item[1].element_size()):
            start = int(parameter.storage_offset()) * parameter.element_size()
            if last is not None and start < end:
                found[id(parameter)] = f"it shares its bytes with {last[0]!r}; tie them by one Parameter object instead"
                found[id(last[1])] = f"it shares its bytes with {name!r}; tie them by one Parameter object instead"
            if start + parameter.nbytes > end:
                end, last = start + parameter.nbytes, (name, parameter)
    return found
