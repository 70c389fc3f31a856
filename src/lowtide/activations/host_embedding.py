"""put_on_host: a huge embedding whose table stays on the host, where it is looked up and updated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.activations.host_lookup import Lookup, RowSums, look_up
from lowtide.errors import ActivationError, ConfigError, ModelChangedError, UnknownNameError
from lowtide.units import format_bytes


def put_on_host(
    model: nn.Module,
    path: str,
    *,
    device: torch.device | str,
    row_sums: RowSums = RowSums.ON_HOST,
    on_host: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> HostEmbedding:
    """Keep an embedding's table on the host: only the rows of a batch travel, and only their gradients come back.

    The module and its Parameter stay the same objects, in the model, its state dictionary and its optimizer; the
    gradient is a dense tensor on the host, and any optimizer updates the table there. Outputs, gradients and so training are
    the same to the bit as with `F.embedding(ids.cpu(), weight).to(device)`. Ids on a GPU are waited for; give ids on the
    host to avoid that. The device holds what a batch looks up, and nothing of the table.

    Args:
        model: Holds the embedding.
        path: Of the embedding, such as "model.embed_tokens".
        device: Where the rows are wanted. The CPU is allowed.
        row_sums: Where the gradients of ids that repeat are added.
        on_host: Entered for what is computed on the host, where the host also plays the device.

    Raises:
        UnknownNameError: The model has no module at that path.
        ConfigError: The module is no embedding that can be looked up by itself, or its table is used elsewhere too.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 2))
        >>> handle = put_on_host(model, "0", device="cpu")
        >>> model(torch.tensor([[3, 5]])).sum().backward()
        >>> int(model[0].weight.grad.any(dim=1).sum())
        2
        >>> handle.remove()
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        raise UnknownNameError("module", path, modules)
    module = modules[path]
    if not isinstance(module, nn.Embedding):
        raise ConfigError(f"{path!r} is a {type(module).__name__}; give the path of an nn.Embedding", key=path)
    _refuse_tied(model, path, module)
    if compat.uncompiled(compat.call_of(module)) is not None:
        raise ConfigError(
            f"{path!r} is compiled, and its lookup cannot be taken out of the compiled code; leave the embedding eager "
            "and compile the blocks",
            key=path,
        )
    if module.weight.is_meta:
        raise ConfigError(f"the table of {path!r} is on meta; give it values before it is put on the host", key=path)
    return HostEmbedding(module, path, torch.device(device), row_sums, on_host)


def _refuse_tied(model: nn.Module, path: str, module: nn.Embedding) -> None:
    own = f"{path}.weight" if path else "weight"
    key = compat.storage_key(module.weight)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != own and not parameter.is_meta and compat.storage_key(parameter) == key:
            raise ConfigError(
                f"the table of {path!r} ({format_bytes(module.weight.nbytes)}) is tied to {name!r}, which needs all of it on "
                "the device; untie them (give the other its own Parameter), or stream the table instead",
                key=path,
            )


class HostEmbedding:
    """What `put_on_host` gives back: stands in the embedding's calls until `remove`."""

    def __init__(
        self,
        module: nn.Embedding,
        path: str,
        device: torch.device,
        row_sums: RowSums,
        on_host: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.module = module
        self.path = path
        self.device = device
        self.row_sums = row_sums
        self.on_host = on_host
        self._came_from = module.weight.device
        self._table = module.weight
        self._is_installed = True
        _move(module.weight, torch.device("cpu"))
        self._inner = compat.replace_call(module, self._call)

    def remove(self) -> None:
        """Give the module its own calls back, and the table its place. May be repeated.

        Where others have taken the calls since, they pass through here to what was before.
        """
        if self._is_installed:
            self._is_installed = False
            if compat.call_of(self.module) == self._call:
                compat.replace_call(self.module, self._inner)
            _move(self.module.weight, self._came_from)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner: Callable[..., Any] = self._inner or compat.plain_call(self.module)
        if not self._is_installed:
            return inner(*args, **kwargs)
        if self.module.weight is not self._table and compat.is_functional_call():
            return inner(*args, **kwargs)  # with a table of the user's for this call, which is where the user put it
        if compat.is_in_transform():
            raise ActivationError(
                f"a transform of torch.func calls the embedding at {self.path!r}, whose table "
                f"({format_bytes(self.module.weight.nbytes)}) is on the host; give it a table of your own on {self.device} for "
                "the call, by torch.func.functional_call"
            )
        if self.module.weight.device.type != "cpu":
            raise ModelChangedError(
                f"the table of {self.path!r} ({format_bytes(self.module.weight.nbytes)}) was moved to "
                f"{self.module.weight.device} after it was put on the host; move the model first, then put the table on the "
                "host"
            )
        with _LookupsOnHost(self) as lookups:
            output = inner(*args, **kwargs)
        if not lookups.num_lookups:
            raise ConfigError(
                f"{type(self.module).__name__} at {self.path!r} did not look its table up by F.embedding, so that nothing "
                "could be kept on the host; remove() the handle",
                key=self.path,
            )
        return output


class _LookupsOnHost(TorchFunctionMode):
    """Takes the lookups of one table out of whatever the module computes around them; its hooks run as ever."""

    def __init__(self, owner: HostEmbedding) -> None:
        super().__init__()
        self.owner = owner
        self.num_lookups = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            return self._embedding(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _embedding(
        self,
        input: Tensor,  # noqa: A002  # torch's own names, which may be given as keywords
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if weight is not self.owner.module.weight:
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        self.num_lookups += 1
        if max_norm is not None:
            # Writes to the table, which is here: as torch does, and under its version counter.
            with torch.no_grad():
                torch.embedding_renorm_(weight.detach(), input.to("cpu", torch.int64).contiguous(), max_norm, norm_type)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        lookup = Lookup(
            device=self.owner.device,
            row_sums=self.owner.row_sums,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            on_host=self.owner.on_host,
        )
        return look_up(input, weight, lookup)


def _move(weight: Tensor, device: torch.device) -> None:
    """The same Parameter, its values and gradient elsewhere."""
    if weight.device != device:
        gradient, weight.grad = weight.grad, None
        weight.data = weight.data.to(device)
        weight.grad = None if gradient is None else gradient.to(device)
