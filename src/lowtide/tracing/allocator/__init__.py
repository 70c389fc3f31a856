"""Replay of torch's CUDA caching allocator: what requests and frees cost in allocated and reserved bytes."""

from __future__ import annotations

from lowtide.tracing.allocator.blocks import BlockInfo, SegmentInfo
from lowtide.tracing.allocator.caching import AllocatorFullError, CachingAllocator
from lowtide.tracing.allocator.driver import AddressPolicy
from lowtide.tracing.allocator.settings import AllocatorSettings, parse_allocator_conf

__all__ = [
    "AddressPolicy",
    "AllocatorFullError",
    "AllocatorSettings",
    "BlockInfo",
    "CachingAllocator",
    "SegmentInfo",
    "parse_allocator_conf",
]
