"""GhostMover: carries ghosts between the ghost device and the host, where they cost the device nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide.memory.mover import Copied, Ticket


class _Point:
    """Ghosts have no clock: what is asked for has happened."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def time_s(self) -> float:
        return 0.0


class GhostMover:
    """See `memory.mover`. Copies happen at once. It holds nothing: a stash holds what it sends by itself.

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
