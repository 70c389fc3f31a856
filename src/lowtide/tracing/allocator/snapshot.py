"""What the allocator holds at one moment, as frozen data: segments and the blocks in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowtide.tracing.allocator.blocks import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """One block of a snapshot."""

    address: int
    bytes: int
    requested_bytes: int
    """0 for a free block."""
    is_allocated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """One segment of a snapshot: memory taken from the driver in one piece (or mapped in a row, when expandable)."""

    address: int
    bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockInfo, ...]
    """In order of address, without gaps."""


def describe_segments(blocks: Iterable[Block], *, is_expandable: bool) -> tuple[SegmentInfo, ...]:
    """The segments that some blocks with memory belong to, in order of address."""
    heads = [block for block in blocks if block.prev is None or not block.prev.is_mapped]
    heads.sort(key=lambda block: block.address)
    return tuple(_describe(head, is_expandable) for head in heads)


def _describe(head: Block, is_expandable: bool) -> SegmentInfo:
    blocks = tuple(_run(head))
    return SegmentInfo(
        address=head.address,
        bytes=sum(info.bytes for info in blocks),
        stream=head.pool.stream,
        is_small=head.pool.is_small,
        is_expandable=is_expandable,
        blocks=blocks,
    )


def _run(block: Block | None) -> Iterator[BlockInfo]:
    while block is not None and block.is_mapped:
        yield BlockInfo(
            address=block.address,
            bytes=block.size,
            requested_bytes=block.requested,
            is_allocated=block.is_allocated,
        )
        block = block.next
