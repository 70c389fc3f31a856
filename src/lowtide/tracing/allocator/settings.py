"""AllocatorSettings: what can be tuned in the CUDA caching allocator, and the size rules that follow from it.

Names and limits follow `PYTORCH_ALLOC_CONF` (`conf.py` reads that syntax). The rules are the same in torch 2.11 to
2.13, so the version is not an input.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.units import MiB

BLOCK_BYTES = 512
"""Every block is a multiple of this."""
SMALL_REQUEST_BYTES = 1 * MiB
"""Requests up to this size (rounded) live in the small pool."""
SMALL_SEGMENT_BYTES = 2 * MiB
"""What the small pool takes from the driver at a time."""
DEFAULT_LARGE_SEGMENT_BYTES = 20 * MiB
MIN_OWN_SEGMENT_BYTES = 10 * MiB
"""Requests from this size on get a segment of their own size instead of a share of a large segment."""
SEGMENT_ROUND_BYTES = 2 * MiB
"""Segments of their own size are rounded up to this."""

NUM_DIVISION_INTERVALS = 16
"""Power-of-two rounding is set per interval of sizes: up to 2 MiB, up to 4 MiB, ... and from 32 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the allocator is set up. The default is torch's default on a card without end."""

    capacity_bytes: int | None = None
    """What the driver can give this process: the card less the CUDA context and other processes. None: no end."""
    allowed_bytes: int | None = None
    """What `torch.cuda.set_per_process_memory_fraction` allows, in bytes. None: no such limit."""
    expandable_segments: bool = False
    """Segments that grow page by page (2 MiB small, `large_segment_bytes` large) instead of one per large request."""
    large_segment_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    """Segment that requests between 1 and 10 MiB share; the page of large expandable segments."""
    max_split_bytes: int | None = None
    """Blocks of this size and more are never split. None: every block may be."""
    max_non_split_rounding_bytes: int | None = None
    """A block that may not be split serves requests smaller than it by less than this. None: `large_segment_bytes`."""
    garbage_collection_threshold: float | None = None
    """Share of `allowed_bytes` above which idle segments are freed before a new one is made. Needs `allowed_bytes`."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Steps between powers of two that sizes round up to; one for each of 1 MiB, 2 MiB, ... 32 GiB. Empty: off."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "allowed_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                raise ConfigError(f"{name} must be positive, got {limit}; use None for no limit", key=name)
        if self.large_segment_bytes <= MIN_OWN_SEGMENT_BYTES or self.large_segment_bytes % MiB:
            raise ConfigError(
                f"large_segment_bytes must be whole MiB and more than 10 MiB, got {self.large_segment_bytes}",
                key="large_segment_bytes",
            )
        for name in ("max_split_bytes", "max_non_split_rounding_bytes"):
            size = getattr(self, name)
            if size is not None and size < self.large_segment_bytes:
                raise ConfigError(
                    f"{name} must be at least large_segment_bytes ({self.large_segment_bytes}), got {size}", key=name
                )
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0.0 < threshold < 1.0:
            raise ConfigError(
                f"garbage_collection_threshold must be between 0 and 1, got {threshold}; use None for no collection",
                key="garbage_collection_threshold",
            )
        divisions = self.roundup_power2_divisions
        if divisions and (len(divisions) != NUM_DIVISION_INTERVALS or any(not is_power2_or_0(d) for d in divisions)):
            raise ConfigError(
                f"roundup_power2_divisions must be {NUM_DIVISION_INTERVALS} powers of two or 0, got {divisions}",
                key="roundup_power2_divisions",
            )

    @property
    def oversize_slack_bytes(self) -> int:
        """How much larger than the request a block may be that must not be split."""
        return self.max_non_split_rounding_bytes or self.large_segment_bytes

    def block_bytes(self, requested_bytes: int) -> int:
        """The request rounded up, as `torch.cuda.memory_allocated` counts it when the block can be split to size.

        Example:
            >>> AllocatorSettings().block_bytes(1), AllocatorSettings().block_bytes(513)
            (512, 1024)
        """
        if self.roundup_power2_divisions and requested_bytes > BLOCK_BYTES:
            interval = (requested_bytes // MiB).bit_length() - 1
            divisions = self.roundup_power2_divisions[min(max(interval, 0), NUM_DIVISION_INTERVALS - 1)]
            if divisions > 1 and requested_bytes > BLOCK_BYTES * divisions:
                return _next_division(requested_bytes, divisions)
        return max(BLOCK_BYTES, -(-requested_bytes // BLOCK_BYTES) * BLOCK_BYTES)

    def segment_bytes(self, block_bytes: int) -> int:
        """What a block that fits nowhere takes from the driver.

        Example:
            >>> AllocatorSettings().segment_bytes(int(63.28125 * MiB)) // MiB
            64
        """
        if block_bytes <= SMALL_REQUEST_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


def is_power2_or_0(value: int) -> bool:
    """Whether torch would take the value as a number of divisions."""
    return value >= 0 and value & (value - 1) == 0


def _next_division(size: int, divisions: int) -> int:
    # With 4 divisions, 1200 lies between 1024 and 2048, whose steps are 1024, 1280, 1536, 1792: the answer is 1280.
    step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
    return -(-size // step) * step
