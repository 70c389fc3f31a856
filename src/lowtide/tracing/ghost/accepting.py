"""Code outside of torch that has to accept ghosts: scipy's matching, and what offloads activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from lowtide.activations.saved import Geometry
from lowtide.memory.mover import Copied, Ticket
from lowtide.tracing.ghost.tensor import Ghost, meta_over

MATCHING_NOTE = (
    "the loss matches predictions with targets by costs that depend on weights: "
    "some matching of the right size was taken"
)
CHUNKED_LOSS_NOTE = "the chunked loss is taken to run its kernel for CUDA, which needs Triton"
"""For a trace with a chunked loss."""


def accept_ghosts(note: Callable[[str], None]) -> None:
    """Make scipy's matching and stashes take ghosts in this process; `note` hears of what is assumed."""
    _accept_in_matching(note)
    _accept_in_stashes()


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
        inner = meta_over(memory.untyped_storage(), geometry.dtype, geometry.size, geometry.stride, geometry.offset)
        return Ghost(inner, memory.device, memory.life)

    Geometry.over = over  # type: ignore[method-assign, assignment]  # its first argument has another name


class _Point:
    """Ghosts have no clock: what is asked for has happened."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def time_s(self) -> float:
        return 0.0


class GhostMover:
    """Carries ghosts between the ghost device and the host (see `memory.mover`).

    Copies happen at once. It holds nothing: a stash holds what it sends by itself.

    Args:
        device: The ghost device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """The ghost device."""
        return self._device

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory of the ghost device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A ghost on the host; a small one is real."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Nothing is locked."""

    def grow(self, buffer: torch.Tensor) -> None:
        """Not for ghosts."""
        raise AssertionError("a ghost's storage cannot be taken away and given back")

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """Not for ghosts."""
        raise AssertionError("a ghost's storage cannot be taken away and given back")

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Copy at once."""
        return _copy(target, source)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """Copy at once."""
        assert not keep, "ghosts are sent by stashes alone, which hold them"
        return _copy(target, source)

    def now(self) -> _Point:
        """A point that has been reached."""
        return _Point()

    def compute_after(self, ticket: Ticket) -> None:
        """There is nothing to wait for."""

    def drain(self) -> None:
        """No copy is under way."""


def _copy(target: torch.Tensor, source: torch.Tensor) -> Copied:
    with torch.no_grad():
        target.copy_(source)
    return Copied(_Point(), _Point())
