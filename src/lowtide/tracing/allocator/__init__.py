"""Replay of torch's CUDA caching allocator: what requests and frees cost in allocated and reserved bytes."""

from __future__ import annotations

from lowtide.tracing.allocator.caching import AllocatorFullError, BlockInfo, CachingAllocator, SegmentInfo
from lowtide.tracing.allocator.conf import parse_allocator_conf
from lowtide.tracing.allocator.settings import AllocatorSettings

__all__ = [
    "AllocatorFullError",
    "AllocatorSettings",
    "BlockInfo",
    "CachingAllocator",
    "SegmentInfo",
    "parse_allocator_conf",
]
