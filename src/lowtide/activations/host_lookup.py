"""Look up rows of a table that stays on the host: rows travel to the device, rows of gradients travel back.

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
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide import compat

LEAST_IDS = 64
"""Fewer are not searched for repetitions."""
MOST_UNIQUE = 0.9
"""Rows are sent once and repeated on the device where the different ones are at most this share of the ids."""


class RowSums(enum.Enum):
    """Where gradient rows of one table row are added up."""

    ON_HOST = "on_host"
    """Every gradient row travels: the sums are those of plain torch on the host, to the bit."""
    ON_DEVICE = "on_device"
    """Added in fp32 on the device, and one row for each different id travels. Fewer bytes; other rounding, and on CUDA
    another one each time unless deterministic algorithms are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """How a table is looked up: the arguments of `torch.nn.functional.embedding`, and what is ours."""

    device: torch.device
    """Where the rows are wanted."""
    row_sums: RowSums = RowSums.ON_HOST
    padding_idx: int | None = None
    """The row that gets no gradient; not negative."""
    scale_grad_by_freq: bool = False
    sparse: bool = False
    on_host: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered for what is computed on the host, where the host also plays the device and its bytes are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Ids as positions among the different ones."""

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


def look_up(ids: Tensor, weight: Tensor, lookup: Lookup) -> Tensor:
    """`F.embedding(ids.cpu(), weight).to(device)`, with less to copy. The ids may be on either side."""
    ids = ids.to("cpu", torch.int64)
    repeats = find_repeats(ids)
    # `apply` has no types.
    rows: Tensor = _HostLookup.apply(weight, ids, repeats, lookup)  # type: ignore[no-untyped-call]
    return rows


class _HostLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, repeats: Repeats | None, lookup: Lookup) -> Tensor:
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


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete: through locked memory where that is faster."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staging.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return staging


def _table_gradient(weight: Tensor, gradient: Tensor, ids: Tensor, repeats: Repeats | None, lookup: Lookup) -> Tensor:
    """The gradient of the table from those of the looked-up rows, which are `[ids, width]` on the device."""
    if lookup.sparse:
        # As torch gives it: a row for each id, not summed.
        return _embedding_backward(to_host(gradient), ids, weight.shape[0], lookup)
    adds_in_place = _can_add_rows(weight)
    sums_on_device = repeats is not None and lookup.row_sums is RowSums.ON_DEVICE and not lookup.scale_grad_by_freq
    if not adds_in_place and not sums_on_device:
        return _embedding_backward(to_host(gradient), ids, weight.shape[0], lookup)
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
    """Whether there is a dense gradient to add to, which this backward does, and nobody looks at the addend on its way."""
    if not weight.is_leaf:
        return False
    there = weight.grad
    is_dense = there is not None and there.layout is torch.strided and there.device == weight.device
    return is_dense and not compat.has_gradient_hooks(weight) and compat.accumulates_into(weight)


def _summed(gradient: Tensor, repeats: Repeats, lookup: Lookup) -> Tensor:
    """One gradient row for each different id, by the kernel that torch uses for the whole table."""
    padding_idx = -1
    if lookup.padding_idx is not None:
        found = (repeats.rows == lookup.padding_idx).nonzero()
        padding_idx = int(found[0]) if found.numel() else -1
    return _dense_backward(
        to_host(gradient), repeats.positions, repeats.rows.numel(), padding_idx, lookup.scale_grad_by_freq
    )


def _summed_on_device(gradient: Tensor, repeats: Repeats, lookup: Lookup) -> Tensor:
    positions = to_device(repeats.positions.reshape(-1), gradient.device)
    sums = torch.zeros((repeats.rows.numel(), gradient.shape[1]), dtype=torch.float32, device=gradient.device)
    sums.index_add_(0, positions, gradient.float())
    on_host = to_host(sums.to(gradient.dtype))
    if lookup.padding_idx is not None:
        on_host[repeats.rows == lookup.padding_idx] = 0.0
    return on_host


def _embedding_backward(gradient: Tensor, ids: Tensor, num_rows: int, lookup: Lookup) -> Tensor:
    padding_idx = -1 if lookup.padding_idx is None else lookup.padding_idx
    backward = torch.ops.aten.embedding_backward
    found: Tensor = backward(
        _shaped(gradient, ids), ids, num_rows, padding_idx, lookup.scale_grad_by_freq, lookup.sparse
    )
    return found


def _dense_backward(gradient: Tensor, positions: Tensor, num_rows: int, padding_idx: int, by_frequency: bool) -> Tensor:
    backward = torch.ops.aten.embedding_dense_backward
    found: Tensor = backward(_shaped(gradient, positions), positions, num_rows, padding_idx, by_frequency)
    return found


def _shaped(gradient: Tensor, ids: Tensor) -> Tensor:
    """A row for each id. With the width said: it cannot be told from no elements."""
    return gradient.view(*ids.shape, gradient.shape[-1])
