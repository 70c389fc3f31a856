"""Which kernel turns a chunk's logits into their gradient in one pass, where there is one for the device."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from lowtide import compat
from lowtide.activations.chunked_settings import LossSettings

LossKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, LossSettings], None]
"""Given logits, targets, the gradient of each token's loss (None: the logits stay as they are), and where the losses go.

All are contiguous. Logits become their gradient in place, in their own dtype: no copy of them is made.
"""


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "the chunked loss runs through torch's operators, slower than the Triton kernel and, for logits of 16 bits, with an "
        "fp32 copy of a chunk's: the package 'triton' is not installed; run: pip install triton",
        RuntimeWarning,
        stacklevel=3,
    )


def find_kernel(hidden: Tensor, dtype: torch.dtype) -> LossKernel | None:
    """The kernel for logits of a dtype beside these hidden states; None where torch's operators do the work.

    On a GPU without Triton they do, and a warning says so once.
    """
    if dtype == torch.float64 or hidden.device.type in ("cpu", "meta"):
        return None
    if compat.has_no_values(hidden):
        return _predicted
    if hidden.device.type != "cuda":
        return None
    if not has_triton():
        _warn_once()
        return None
    from lowtide.activations.chunked_triton import loss_in_place

    return loss_in_place


def _predicted(
    logits: Tensor, target: Tensor, row_scale: Tensor | None, losses: Tensor, settings: LossSettings
) -> None:
    """What the kernel allocates, where a step is predicted for a GPU: nothing. Everything else is there already."""
