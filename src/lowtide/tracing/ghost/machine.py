"""GhostMachine: a process in which torch believes in a CUDA device of a given kind.

Installs, once per process: the ghost device, its choice of attention, and the optimizers' defaults for CUDA. Autocast rules and
kernels that only CUDA or only the host has change with the target. Code outside of torch that has to accept ghosts does: scipy's
matching, and what offloads activations. Only the tracing subprocess becomes one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from lowtide import compat
from lowtide.activations.saved import Geometry
from lowtide.hardware import Hardware, release_of
from lowtide.tracing.attention.use import Attention, AttentionChoices
from lowtide.tracing.ghost import autocast, recurrent
from lowtide.tracing.ghost.costs import Costs
from lowtide.tracing.ghost.device import register_device
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.shapes import HOST_SHAPES, SHAPES
from lowtide.tracing.ghost.tensor import Ghost, Known
from lowtide.tracing.recorder import StorageRecorder

aten = torch.ops.aten
MATCHING_NOTE = (
    "the loss matches predictions with targets by costs that depend on weights: "
    "some matching of the right size was taken"
)


class GhostMachine:
    """The process-wide part of tracing. `mode_for` gives the part that belongs to one trace."""

    def __init__(self) -> None:
        self.device = register_device()
        self._casts = autocast.WeightCasts()
        self._attention: Attention | None = None
        self._mode: GhostMode | None = None
        self._libraries = [autocast.register_fallback()]
        self._target_library: torch.library.Library | None = None
        self._is_host: bool | None = None
        library = torch.library.Library("aten", "IMPL")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl("scaled_dot_product_attention", lambda *args, **kwargs: self.attention(*args, **kwargs), key)
        for name in compat.operators_with_fallback():
            library.impl(name, _never_called, "PrivateUse1")  # its presence keeps torch from taking the operator apart
        # `torch.tensor(..., device=)` and indexing with a list make their tensors below any dispatch mode.
        library.impl("empty.memory_format", self._empty, "PrivateUse1")
        library.impl("empty_strided", self._empty_strided, "PrivateUse1")
        library.impl("_copy_from", self._copy_from, "PrivateUse1")
        library.impl("_local_scalar_dense", self._number, "PrivateUse1")
        self._libraries.append(library)
        compat.allow_foreach_on(Ghost)
        compat.treat_cuda_as(self.device.type, self._casts.clear)
        _accept_in_matching(lambda text: self._current_mode.note(text))
        _accept_in_stashes()

    @classmethod
    @functools.cache
    def get(cls) -> GhostMachine:
        """The machine of this process."""
        return cls()

    def mode_for(
        self,
        recorder: StorageRecorder,
        hardware: Hardware,
        torch_version: str,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> GhostMode:
        """The dispatch mode of a trace on a device under a torch version; `on_fatal` as for the mode."""
        release = release_of(torch_version)
        choices = AttentionChoices(hardware.compute_capability, release)
        self._attention = Attention(choices, lambda: recorder.module)
        self._casts.begin_trace(release)
        self._register_for(is_host=hardware.is_host)
        costs = Costs(hardware, torch_version)
        mode = self._mode = GhostMode(
            recorder, self.device, costs, HOST_SHAPES if hardware.is_host else SHAPES, on_fatal
        )
        mode.learn_owner_count()
        return mode

    def _register_for(self, *, is_host: bool) -> None:
        """Put kernels in place that CUDA and the host do not share."""
        if is_host is self._is_host:
            return
        if self._target_library is not None:
            compat.unregister_kernels(self._target_library)
        library = self._target_library = torch.library.Library("aten", "IMPL")
        autocast.register(self._casts, library, is_host=is_host)
        for name, kernel in (recurrent.HOST_KERNELS if is_host else recurrent.KERNELS).items():
            library.impl(name, kernel, "AutogradPrivateUse1")
        if is_host:
            library.impl("dropout", _dropout_on_host, "AutogradPrivateUse1")
        else:
            library.impl("group_norm", _group_norm_on_cuda, "AutogradPrivateUse1")
        if not is_host and compat.find_overload("_fused_rms_norm") is not None:
            library.impl("_fused_rms_norm", _never_called, "PrivateUse1")
        self._is_host = is_host

    @property
    def has_cast(self) -> bool:
        """Whether autocast cast anything in the current trace."""
        return self._casts.has_cast

    @property
    def attention(self) -> Attention:
        """The attention of the current trace."""
        assert self._attention is not None, "no trace has begun"
        return self._attention

    def _empty(self, size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self._current_mode.place(torch.empty(size, dtype=dtype, device="meta"))

    def _empty_strided(self, size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self._current_mode.place(torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    @property
    def _current_mode(self) -> GhostMode:
        assert self._mode is not None, "no trace has begun"
        return self._mode

    def _copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, Ghost):
            target.write(source.value() if isinstance(source, Ghost) else Known(source.detach().clone()))
        return target

    def _number(self, tensor: Tensor) -> Any:
        return self._current_mode.__torch_dispatch__(aten._local_scalar_dense.default, (), (tensor,))


def _dropout_on_host(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Keeps the noise in the tensor's type, where CUDA keeps a mask of one byte for each number."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def _group_norm_on_cuda(
    tensor: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """CUDA's kernel wants channels first and copies what has them last; torch leaves the layout to a spare backend."""
    batch, channels = tensor.shape[0], tensor.shape[1]
    count = tensor.numel() // max(batch * channels, 1)
    out: Tensor = aten.native_group_norm(tensor.contiguous(), weight, bias, batch, channels, count, num_groups, eps)[0]
    return out


def _never_called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a ghost operator reached its backend kernel")


def _accept_in_matching(note: Callable[[str], None]) -> None:
    """`scipy.optimize.linear_sum_assignment`, the Hungarian matching in the loss of detection models, wants numbers.

    How many pairs it returns follows from the shape of the costs alone, and so do all shapes that come after it. On ghosts,
    whose costs depend on weights, the pairs are the first rows with the first columns.
    """
    original = scipy.optimize.linear_sum_assignment

    @functools.wraps(original)
    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> Any:
        if not isinstance(cost_matrix, Ghost) or cost_matrix.value() is not None:
            return original(cost_matrix, maximize)
        note(MATCHING_NOTE)
        pairs = min(cost_matrix.shape)
        return np.arange(pairs), np.arange(pairs)

    scipy.optimize.linear_sum_assignment = linear_sum_assignment


def _accept_in_stashes() -> None:
    """Make stashes bring ghosts back: they set plain tensors over a storage, byte by byte."""
    plain = Geometry.over

    def over(geometry: Geometry, memory: Tensor) -> Tensor:
        if not isinstance(memory, Ghost):
            return plain(geometry, memory)
        inner = compat.meta_tensor_over(
            memory.untyped_storage(), geometry.dtype, geometry.size, geometry.stride, geometry.offset
        )
        return Ghost(inner, memory.device, memory.life)

    Geometry.over = over  # type: ignore[method-assign, assignment]  # its first argument has another name
