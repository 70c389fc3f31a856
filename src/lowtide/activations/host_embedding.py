"""put_on_host: a huge embedding whose table stays on the host, where it is looked up and updated.

Rows travel to the device, rows of gradients travel back.

Note [The same bits]
The output has the bits of `F.embedding(ids.cpu(), weight).to(device)`, because rows are only copied. In the backward torch
adds the gradient rows of a table row one after the other, in the order of the ids, beginning with 0. Here the same
kernel does it in the same order, but over the rows that were looked up instead of over the whole table. So the
sums have the same bits, as long as every gradient row travels: to add them on the device first is faster where ids repeat,
and rounds otherwise (`RowSums.ON_DEVICE`).

Note [Adding to a gradient that is there]
A gradient of the table has the table's size. The first one of a step must be made, since optimizers read it. The next
ones (accumulation) are given to autograd as a sparse tensor of the rows that were looked up, which it adds to the
dense gradient in place: a table of gigabytes is not filled with zeros and read through for each batch. Hooks on the
table's gradient, and `torch.autograd.grad`, get a dense one, as they would from plain torch; hooks that run after the
accumulation see the sum, whatever was added.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.errors import ActivationError, ConfigError, ModelChangedError, UnknownNameError
from lowtide.units import format_bytes

LEAST_IDS = 64
"""Fewer ids than this are not searched for repetitions."""
MOST_UNIQUE = 0.9
"""Rows are sent once and repeated on the device where the different ones are at most this share of the ids."""


class RowSums(enum.Enum):
    """Where gradient rows of one table row are added up."""

    ON_HOST = "on_host"
    """Every gradient row travels: the sums are those of plain torch on the host, to the bit."""
    ON_DEVICE = "on_device"
    """Added in fp32 on the device, and one row for each different id travels. Fewer bytes; other rounding, and on CUDA
    another one each time unless deterministic algorithms are asked for."""


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
        path: Where the embedding is, such as "model.embed_tokens".
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
        self.module, self.path, self.device, self.row_sums = module, path, device, row_sums
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
        lookup = _Lookup(
            device=self.owner.device,
            row_sums=self.owner.row_sums,
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            on_host=self.owner.on_host,
        )
        # `F.embedding(ids.cpu(), weight).to(device)`, with less to copy. The ids may be on either side.
        ids = input.to("cpu", torch.int64)
        # `apply` has no types.
        rows: Tensor = _HostLookup.apply(weight, ids, find_repeats(ids), lookup)  # type: ignore[no-untyped-call]
        return rows


def _move(weight: Tensor, device: torch.device) -> None:
    """Move the values and the gradient of a Parameter, which stays the same object."""
    if weight.device != device:
        gradient, weight.grad = weight.grad, None
        weight.data = weight.data.to(device)
        weight.grad = None if gradient is None else gradient.to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lookup:
    """How a table is looked up: the arguments of `torch.nn.functional.embedding`, and what is ours."""

    device: torch.device
    """The device to which looked-up rows go."""
    row_sums: RowSums = RowSums.ON_HOST
    padding_idx: int | None = None
    """The row that gets no gradient; not negative."""
    scale_grad_by_freq: bool = False
    sparse: bool = False
    on_host: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered for what is computed on the host, where the host also plays the device and its bytes are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Ids as positions in the list of different ids."""

    rows: Tensor
    """The different ids, in order, on the host."""
    positions: Tensor
    """For each id its place in `rows`, on the host, in the shape of the ids."""


def find_repeats(ids: Tensor) -> Repeats | None:
    """The different ids, where few enough of them are different; None where searching or sorting does not pay.

    Example:
        >>> repeats = find_repeats(torch.tensor([7, 3] * 40))
        >>> repeats.rows.tolist(), repeats.positions[:3].tolist()
        ([3, 7], [1, 0, 1])
    """
    if ids.numel() < LEAST_IDS:
        return None
    rows, positions = torch.unique(ids, return_inverse=True)
    return Repeats(rows=rows, positions=positions) if rows.numel() <= MOST_UNIQUE * ids.numel() else None


class _HostLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, repeats: Repeats | None, lookup: _Lookup) -> Tensor:
        ctx.ids, ctx.repeats, ctx.lookup = ids, repeats, lookup
        # Held, not saved: its values are not needed, and an update before the backward does no harm.
        ctx.weight = weight
        wanted = (ids if repeats is None else repeats.rows).reshape(-1)
        rows = to_device(_gathered(weight, wanted, lookup.device), lookup.device)
        if repeats is not None:
            rows = rows.index_select(0, to_device(repeats.positions.reshape(-1), lookup.device))
        return rows.view(*ids.shape, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradient.reshape(ctx.ids.numel(), gradient.shape[-1])
        with ctx.lookup.on_host():
            found = _table_gradient(ctx.weight, rows, ctx.ids, ctx.repeats, ctx.lookup)
        return found, None, None, None


def _gathered(weight: Tensor, wanted: Tensor, device: torch.device) -> Tensor:
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < weight.shape[0]:
        raise IndexError(
            f"ids from {int(wanted.min())} to {int(wanted.max())} were looked up in a table of {weight.shape[0]} rows"
        )
    # torch's allocator gives locked memory to somebody else only when the copy from it is done.
    is_locked = device.type == "cuda"
    staging = torch.empty((wanted.numel(), weight.shape[1]), dtype=weight.dtype, pin_memory=is_locked)
    return torch.index_select(weight.detach(), 0, wanted, out=staging)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy from the host that the host does not wait for, where the device is another."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete: through locked memory where that is faster."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staging.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return staging


def _table_gradient(weight: Tensor, gradient: Tensor, ids: Tensor, repeats: Repeats | None, lookup: _Lookup) -> Tensor:
    """The gradient of the table from those of the looked-up rows, which are `[ids, width]` on the device."""
    if lookup.sparse:
        # As torch gives it: a row for each id, not summed.
        return _embedding_backward(_to_host(gradient), ids, weight.shape[0], lookup)
    adds_in_place = _can_add_rows(weight)
    sums_on_device = repeats is not None and lookup.row_sums is RowSums.ON_DEVICE and not lookup.scale_grad_by_freq
    if not adds_in_place and not sums_on_device:
        return _embedding_backward(_to_host(gradient), ids, weight.shape[0], lookup)
    if repeats is None:
        rows, positions = torch.unique(ids, return_inverse=True)
        repeats = Repeats(rows=rows, positions=positions)
    sums = _summed_on_device(gradient, repeats, lookup) if sums_on_device else _summed(gradient, repeats, lookup)
    if adds_in_place:
        return torch.sparse_coo_tensor(
            repeats.rows.unsqueeze(0), sums, weight.shape, is_coalesced=True, check_invariants=False
        )
    return torch.zeros_like(weight).index_copy_(0, repeats.rows, sums)


def _can_add_rows(weight: Tensor) -> bool:
    """Whether this backward adds to a dense gradient, and no hook reads the addend."""
    if not weight.is_leaf:
        return False
    there = weight.grad
    is_dense = there is not None and there.layout is torch.strided and there.device == weight.device
    return is_dense and not compat.has_gradient_hooks(weight) and compat.accumulates_into(weight)


def _summed(gradient: Tensor, repeats: Repeats, lookup: _Lookup) -> Tensor:
    """One gradient row for each different id, by the kernel that torch uses for the whole table."""
    padding_idx = -1
    if lookup.padding_idx is not None:
        places = (repeats.rows == lookup.padding_idx).nonzero()
        padding_idx = int(places[0]) if places.numel() else -1
    found: Tensor = torch.ops.aten.embedding_dense_backward(
        _shaped(_to_host(gradient), repeats.positions),
        *(repeats.positions, repeats.rows.numel(), padding_idx, lookup.scale_grad_by_freq),
    )
    return found


def _summed_on_device(gradient: Tensor, repeats: Repeats, lookup: _Lookup) -> Tensor:
    positions = to_device(repeats.positions.reshape(-1), gradient.device)
    sums = torch.zeros((repeats.rows.numel(), gradient.shape[1]), dtype=torch.float32, device=gradient.device)
    sums.index_add_(0, positions, gradient.float())
    on_host = _to_host(sums.to(gradient.dtype))
    if lookup.padding_idx is not None:
        on_host[repeats.rows == lookup.padding_idx] = 0.0
    return on_host


def _embedding_backward(gradient: Tensor, ids: Tensor, num_rows: int, lookup: _Lookup) -> Tensor:
    padding_idx = -1 if lookup.padding_idx is None else lookup.padding_idx
    backward = torch.ops.aten.embedding_backward
    found: Tensor = backward(
        _shaped(gradient, ids), ids, num_rows, padding_idx, lookup.scale_grad_by_freq, lookup.sparse
    )
    return found


def _shaped(gradient: Tensor, ids: Tensor) -> Tensor:
    """A row for each id. The width is given, because it cannot be derived from no elements."""
    return gradient.view(*ids.shape, gradient.shape[-1])
