"""The copies of activation policies: they go through the session's own queues, and the host's tiers are charged for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide import compat
from lowtide.memory.mover import Copied, Mover, Ticket
from lowtide.memory.tier import Tier
from lowtide.planning.timeline import Reason
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.statistics.recording import Recorder

WHAT = "activations"


class ActivationMover:
    """Copies through the session's own queues, with host memory charged to its tiers.

    Args:
        mover: The session's.
        tiers: The host, and what is locked of it.
        tracked: The emulated device's books, which must not count the host's memory; None on a real one.
        recorder: Is told of each copy.
    """

    def __init__(self, mover: Mover, tiers: Sequence[Tier], tracked: TrackedMemory | None, recorder: Recorder) -> None:
        self._mover = mover
        self._recorder = recorder
        self._tiers = tuple(tiers)
        self._tracked = tracked

    @property
    def device(self) -> torch.device:
        """Where the computation runs."""
        return self._mover.device

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory for one saved tensor, if the host's budget has it.

        Raises:
            BudgetError: It has not.
        """
        charged: list[Tier] = []
        try:
            for tier in self._tiers:
                tier.charge(num_bytes, WHAT)
                charged.append(tier)
            # It is the host's also where the host plays the device.
            with compat.without_modes():
                buffer = self._mover.host_buffer(num_bytes)
        except BaseException:
            for tier in charged:
                tier.credit(num_bytes, WHAT)
            raise
        if self._tracked is not None:
            self._tracked.exclude(buffer)
        return buffer

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Give it back."""
        self._mover.free_host_buffer(buffer)
        for tier in self._tiers:
            tier.credit(buffer.nbytes, WHAT)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """See `Mover`."""
        return self._mover.device_buffer(num_bytes)

    def grow(self, buffer: torch.Tensor) -> None:
        """See `Mover`."""
        self._mover.grow(buffer)

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """See `Mover`."""
        self._mover.shrink(buffer, after)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """See `Mover`."""
        copied = self._mover.to_device(target, source, after)
        self._recorder.on_activation(copied, Reason.BRING_BACK, source.nbytes)
        return copied

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """See `Mover`."""
        copied = self._mover.to_host(target, source, after, keep=keep)
        self._recorder.on_activation(copied, Reason.OFFLOAD, source.nbytes)
        return copied

    def now(self) -> Ticket:
        """See `Mover`."""
        return self._mover.now()

    def compute_after(self, ticket: Ticket) -> None:
        """See `Mover`."""
        self._mover.compute_after(ticket)

    def drain(self) -> None:
        """See `Mover`."""
        self._mover.drain()
