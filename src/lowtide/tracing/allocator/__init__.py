"""Replay of torch's CUDA caching allocator: what requests and frees cost in allocated and reserved bytes."""

from __future__ import annotations

from lowtide.tracing.allocator.caching import AllocatorFullError, CachingAllocator
from lowtide.tracing.allocator.settings import AllocatorSettings, parse_allocator_conf

__all__ = ["AllocatorFullError", "AllocatorSettings", "CachingAllocator", "parse_allocator_conf"]
