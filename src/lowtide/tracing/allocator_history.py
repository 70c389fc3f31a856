"""Complete the profiler's record of memory from the allocator's own history.

The profiler sees memory change only in threads, and at moments, that it watches. Autograd's device thread gives up its last
references to a node's inputs after it has left the profiler's sight, so hundreds of frees of an ordinary backward are missing.
The allocator's history misses nothing, but knows neither operators nor the true size of a block. Both list the same
changes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lowtide.tracing.profile_events import Change
from lowtide.tracing.timeline import Block

_UNIT = 512
"""Blocks are multiples of this; the true size of one that the profiler never saw may be larger."""


def complete_changes(
    changes: list[Change], entries: Iterable[Mapping[str, Any]], blocks: Iterable[Block], reserved_bytes: int
) -> list[Change]:
    """All changes of memory, in order: the profiler's where it saw them, else made from the history's.

    Args:
        changes: What the profiler saw, in order of time.
        entries: The allocator's history over the same time, oldest first.
        blocks: What was in use before.
        reserved_bytes: What was reserved before.
    """
    sizes = {block.address: block.bytes for block in blocks}
    completed: list[Change] = []
    position = 0
    time_ns = changes[0].time_ns if changes else 0
    thread = changes[0].thread if changes else 0
    for entry in entries:
        if entry["action"] not in ("alloc", "free_completed"):
            continue
        is_free, address = entry["action"] == "free_completed", entry["addr"]
        seen = changes[position] if position < len(changes) else None
        if seen is not None and seen.address == address and (seen.bytes < 0) == is_free:
            position += 1
            change = seen
        else:
            size = sizes.get(address, 0) if is_free else -(-entry["size"] // _UNIT) * _UNIT
            change = Change(
                time_ns=time_ns,
                thread=thread,
                address=address,
                bytes=-size if is_free else size,
                reserved_bytes=reserved_bytes,
                op=None,
                inside="",
            )
        if is_free:
            sizes.pop(address, None)
        else:
            sizes[address] = change.bytes
        time_ns, thread, reserved_bytes = change.time_ns, change.thread, change.reserved_bytes
        completed.append(change)
    return completed
