"""AllocatorFullError: the replay's out-of-memory error, with the numbers a person needs to act on it."""

from __future__ import annotations

from lowtide.errors import TraceError
from lowtide.tracing.allocator.settings import AllocatorSettings
from lowtide.units import format_bytes


class AllocatorFullError(TraceError):
    """The step does not fit on the card, even with all cached memory given back. Use less, or a larger card."""

    def __init__(
        self,
        settings: AllocatorSettings,
        *,
        requested_bytes: int,
        segment_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
    ) -> None:
        limits = (settings.capacity_bytes, settings.allowed_bytes)
        limit = format_bytes(min(limit for limit in limits if limit is not None))
        request, more, in_use = map(format_bytes, (requested_bytes, segment_bytes, allocated_bytes))
        pieces = format_bytes(reserved_bytes - allocated_bytes)
        super().__init__(
            f"a request of {request} needs {more} more from a card of {limit}, of which {in_use} are in use and"
            f" {pieces} are free in pieces that cannot be given back; make the batch smaller, use a technique that"
            " saves memory, or choose a larger card"
        )
        self.requested_bytes = requested_bytes
        """The request that failed."""
        self.allocated_bytes = allocated_bytes
        """In use at that moment."""
        self.reserved_bytes = reserved_bytes
        """Held by the allocator at that moment: in use, or in pieces of segments that are in use."""
