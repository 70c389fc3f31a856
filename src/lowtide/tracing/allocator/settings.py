"""AllocatorSettings: what can be tuned in the CUDA caching allocator, and the size rules that follow from it.

Names and limits follow `PYTORCH_ALLOC_CONF`, the text by which people set up the allocator; `parse_allocator_conf` reads it. The
rules are the same in torch 2.11 to 2.13, so the version is not an input.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.errors import ConfigError, did_you_mean
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

_NUM_DIVISION_INTERVALS = 16
"""Power-of-two rounding is set per interval of sizes: up to 2 MiB, up to 4 MiB, ... and from 32 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the allocator is set up. The default is torch's default on a device without end."""

    capacity_bytes: int | None = None
    """What the driver can give this process: the device less the CUDA context and other processes. None: no end."""
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
        if divisions and (len(divisions) != _NUM_DIVISION_INTERVALS or any(not _is_power2_or_0(d) for d in divisions)):
            raise ConfigError(
                f"roundup_power2_divisions must be {_NUM_DIVISION_INTERVALS} powers of two or 0, got {divisions}",
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
            divisions = self.roundup_power2_divisions[min(max(interval, 0), _NUM_DIVISION_INTERVALS - 1)]
            if divisions > 1 and requested_bytes > BLOCK_BYTES * divisions:
                # With 4 divisions, 1200 lies between 1024 and 2048, whose steps are 1024, 1280, 1536, 1792: the answer is 1280.
                step = (1 << (requested_bytes.bit_length() - 1)) >> (divisions.bit_length() - 1)
                return -(-requested_bytes // step) * step
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


def _is_power2_or_0(value: int) -> bool:
    """Whether torch would take the value as a number of divisions."""
    return value >= 0 and value & (value - 1) == 0


def parse_allocator_conf(
    conf: str, *, capacity_bytes: int | None = None, total_bytes: int | None = None
) -> AllocatorSettings:
    """The settings that a `PYTORCH_ALLOC_CONF` (or `PYTORCH_CUDA_ALLOC_CONF`) text stands for.

    Keys that only concern pinned memory, locking or graph capture change no size and are passed over. A key that torch
    does not know is warned about, as is a backend other than the native one, which is what will be replayed.

    Args:
        conf: For example `expandable_segments:True,max_split_size_mb:128`.
        capacity_bytes: Becomes the setting of that name.
        total_bytes: Memory of the device, for `per_process_memory_fraction`; default: `capacity_bytes`.

    Example:
        >>> parse_allocator_conf("expandable_segments:True,max_split_size_mb:128").max_split_bytes
        134217728

    Raises:
        ConfigError: A value is missing, of the wrong type or out of range.
    """
    fields: dict[str, Any] = {"capacity_bytes": capacity_bytes}
    for key, value in _split_conf(conf).items():
        if key in _READERS:
            field, read = _READERS[key]
            fields[field] = read(key, value)
        elif key == "per_process_memory_fraction":
            fields["allowed_bytes"] = _allowed_bytes(_parse_float(key, value), total_bytes or capacity_bytes)
        elif key == "backend":
            if value != "native":
                _warn(f"the allocator backend {value!r} is not modelled; the native one is replayed instead")
        elif key not in _WITHOUT_EFFECT:
            advice = did_you_mean(key, (*_READERS, *_WITHOUT_EFFECT, "per_process_memory_fraction", "backend"))
            _warn(f"unknown allocator setting {key!r} is ignored; {advice}")
    return AllocatorSettings(**fields)


def _split_conf(conf: str) -> dict[str, str]:
    """`a:1,b:[2:3,>:4]` as a mapping; a list keeps its brackets. A key that comes twice keeps its last value."""
    text = "".join(conf.split())
    values: dict[str, str] = {}
    while text:
        key, colon, behind = text.partition(":")
        end = behind.find("]") + 1 if behind.startswith("[") else behind.find(",") if "," in behind else len(behind)
        value, text = behind[:end], behind[end:]
        if not key or not colon or not value or (text and not text.startswith(",")):
            raise ConfigError(f"{conf!r} is not an allocator configuration near {key!r}; write key:value,key:value")
        values[key] = value
        text = text[1:]
    return values


def _allowed_bytes(fraction: float, total_bytes: int | None) -> int | None:
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"per_process_memory_fraction must be between 0 and 1, got {fraction}")
    if fraction == 1.0:
        return None
    if total_bytes is None:
        _warn("per_process_memory_fraction is ignored, because the memory of the device is not known; pass total_bytes")
        return None
    return int(fraction * total_bytes)


def _parse_float(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"the allocator setting {key} needs a number, got {value!r}", key=key) from None


def _parse_int(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"the allocator setting {key} needs a whole number, got {value!r}", key=key)
    return int(value)


def _parse_mb(key: str, value: str) -> int:
    return _parse_int(key, value) * MiB


def _parse_bool(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ConfigError(f"the allocator setting {key} needs True or False, got {value!r}", key=key)
    return value == "True"


def _parse_divisions(key: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or `[256:1,1024:4,>:8]`: divisions by interval, in MiB.

    The first interval also covers everything below it; one that is skipped stays off. `>` covers what lies above the
    last one.
    """
    if not value.startswith("["):
        return (_parse_int(key, value),) * _NUM_DIVISION_INTERVALS
    divisions = [0] * _NUM_DIVISION_INTERVALS
    last: int | None = None
    for pair in value.strip("[]").split(","):
        limit, _, count = pair.partition(":")
        steps = _parse_int(key, count)
        if limit == ">":
            start = 1 if last is None else last + 1
            divisions[start:] = [steps] * len(divisions[start:])
            continue
        size_mb = _parse_int(key, limit)
        if size_mb <= 0 or not _is_power2_or_0(size_mb):
            raise ConfigError(f"the intervals of {key} must be powers of two, got {limit}", key=key)
        index = min(size_mb.bit_length() - 1, _NUM_DIVISION_INTERVALS - 1)
        if last is None:
            divisions[:index] = [steps] * index
        divisions[index] = steps
        last = index
    return tuple(divisions)


_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "large_segment_size_mb": ("large_segment_bytes", _parse_mb),
    "max_split_size_mb": ("max_split_bytes", _parse_mb),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _parse_mb),
    "garbage_collection_threshold": ("garbage_collection_threshold", _parse_float),
    "roundup_power2_divisions": ("roundup_power2_divisions", _parse_divisions),
    "expandable_segments": ("expandable_segments", _parse_bool),
}

_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
)  # fmt: skip


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
