"""Replay of torch's CUDA caching allocator: what requests and frees cost in allocated and reserved bytes."""

from __future__ import annotations

from lowtide.tracing.allocator.caching import CachingAllocator
from lowtide.tracing.allocator.conf import parse_allocator_conf
from lowtide.tracing.allocator.driver import AddressPolicy
from lowtide.tracing.allocator.full_error import AllocatorFullError
from lowtide.tracing.allocator.settings import AllocatorSettings
from lowtide.tracing.allocator.snapshot import BlockInfo, SegmentInfo

__all__ = [
    "AddressPolicy",
    "AllocatorFullError",
    "AllocatorSettings",
    "BlockInfo",
    "CachingAllocator",
    "SegmentInfo",
    "parse_allocator_conf",
]
