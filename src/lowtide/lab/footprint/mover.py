"""FootprintMover: stands in a trace for the mover of a CUDA device. Nothing is copied; memory comes and goes as there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from lowtide.memory.mover import Copied, Ticket
from lowtide.tracing.prediction.context import DeviceMemory
from lowtide.tracing.recorder import Life


class Point:
    """A trace has no clock: what is asked for has happened. Also an update on the host, which is done when asked about."""

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def time_s(self) -> float:
        """No time passes."""
        return 0.0


class FootprintMover:
    """See `memory.mover`; buffers are meta tensors, and stand for memory of the traced card while they are grown.

    Note [How long sources are kept]
    On a card the source of a copy to the host goes when the copy is done or too much waits. The host is ahead of the card as a
    rule, so that hardly any copy is done when it looks: here none is, and the figure is the most that can be.

    Args:
        memory: Of the traced card.
        max_kept_bytes: As for a `CudaMover`.
    """

    def __init__(self, memory: DeviceMemory, *, max_kept_bytes: int) -> None:
        self._memory = memory
        self._max_kept_bytes = max_kept_bytes
        self._lives: dict[int, Life] = {}
        self._kept: deque[torch.Tensor] = deque()
        self._kept_bytes = 0

    @property
    def device(self) -> torch.device:
        """The ghost device."""
        return self._memory.device

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """A place without memory yet."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """The host's memory is not the card's."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Nothing is locked."""

    def grow(self, buffer: torch.Tensor) -> None:
        """Take the memory."""
        self._lives[id(buffer)] = self._memory.take(buffer.nbytes, "weights")

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """Give it back; the next to get it comes after `after` by itself."""
        del after
        self._memory.give_back(self._lives.pop(id(buffer)))

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Nothing is copied."""
        del target, source, after
        return Copied(Point(), Point())

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """Nothing is copied, but the source waits for it; see Note [How long sources are kept]."""
        del target, after
        if keep:
            self._kept.append(source)
            self._kept_bytes += source.nbytes
            while self._kept_bytes > self._max_kept_bytes:
                self._kept_bytes -= self._kept.popleft().nbytes
        return Copied(Point(), Point())

    def now(self) -> Point:
        """A point that has been reached."""
        return Point()

    def compute_after(self, ticket: Ticket) -> None:
        """There is nothing to wait for."""

    def drain(self) -> None:
        """All copies are done."""
        self._kept.clear()
        self._kept_bytes = 0
