"""Reads `PYTORCH_ALLOC_CONF`, the text by which people set up torch's caching allocator, into AllocatorSettings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

from lowtide.errors import ConfigError, did_you_mean
from lowtide.tracing.allocator.settings import NUM_DIVISION_INTERVALS, AllocatorSettings, is_power2_or_0
from lowtide.units import MiB


def parse_allocator_conf(
    conf: str, *, capacity_bytes: int | None = None, total_bytes: int | None = None
) -> AllocatorSettings:
    """The settings that a `PYTORCH_ALLOC_CONF` (or `PYTORCH_CUDA_ALLOC_CONF`) text stands for.

    Keys that only concern pinned memory, locking or graph capture change no size and are passed over. A key that torch
    does not know is warned about, as is a backend other than the native one, which is what will be replayed.

    Args:
        conf: For example `expandable_segments:True,max_split_size_mb:128`.
        capacity_bytes: Becomes the setting of that name.
        total_bytes: Memory of the card, for `per_process_memory_fraction`; default: `capacity_bytes`.

    Example:
        >>> parse_allocator_conf("expandable_segments:True,max_split_size_mb:128").max_split_bytes
        134217728

    Raises:
        ConfigError: A value is missing, of the wrong type or out of range.
    """
    values = _split_conf(conf)
    settings = AllocatorSettings(capacity_bytes=capacity_bytes)
    # First, because the lower limit of two other settings is this one.
    if "large_segment_size_mb" in values:
        settings = _apply(settings, "large_segment_size_mb", values.pop("large_segment_size_mb"))
    for key, value in values.items():
        if key == "per_process_memory_fraction":
            allowed = _allowed_bytes(_parse_float(key, value), total_bytes or capacity_bytes)
            settings = replace(settings, allowed_bytes=allowed)
        elif key == "backend":
            if value != "native":
                _warn(f"the allocator backend {value!r} is not modelled; the native one is replayed instead")
        elif key in _READERS:
            settings = _apply(settings, key, value)
        elif key not in _WITHOUT_EFFECT:
            advice = did_you_mean(key, (*_READERS, *_WITHOUT_EFFECT, "per_process_memory_fraction", "backend"))
            _warn(f"unknown allocator setting {key!r} is ignored; {advice}")
    return settings


def _split_conf(conf: str) -> dict[str, str]:
    """`a:1,b:[2:3,>:4]` as a mapping; a list keeps its brackets. A key that comes twice keeps its last value."""
    text = "".join(conf.split())
    values: dict[str, str] = {}
    while text:
        key, colon, rest = text.partition(":")
        end = rest.find("]") + 1 if rest.startswith("[") else rest.find(",") if "," in rest else len(rest)
        value, text = rest[:end], rest[end:]
        if not key or not colon or not value or (text and not text.startswith(",")):
            raise ConfigError(f"{conf!r} is not an allocator configuration near {key!r}; write key:value,key:value")
        values[key] = value
        text = text[1:]
    return values


def _apply(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    field, read = _READERS[key]
    changed = {field: read(key, value)}
    return replace(settings, **changed)  # type: ignore[arg-type]  # each reader returns its field's type


def _allowed_bytes(fraction: float, total_bytes: int | None) -> int | None:
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"per_process_memory_fraction must be between 0 and 1, got {fraction}")
    if fraction == 1.0:
        return None
    if total_bytes is None:
        _warn("per_process_memory_fraction is ignored, because the memory of the card is not known; pass total_bytes")
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
        return (_parse_int(key, value),) * NUM_DIVISION_INTERVALS
    divisions = [0] * NUM_DIVISION_INTERVALS
    last: int | None = None
    for pair in value.strip("[]").split(","):
        bound, _, count = pair.partition(":")
        steps = _parse_int(key, count)
        if bound == ">":
            start = 1 if last is None else last + 1
            divisions[start:] = [steps] * len(divisions[start:])
            continue
        size_mb = _parse_int(key, bound)
        if size_mb <= 0 or not is_power2_or_0(size_mb):
            raise ConfigError(f"the intervals of {key} must be powers of two, got {bound}", key=key)
        index = min(size_mb.bit_length() - 1, NUM_DIVISION_INTERVALS - 1)
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

_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
