"""Changes of memory that the profiler missed are filled in from the allocator's history."""

from __future__ import annotations

from typing import Any

from lowtide.tracing.allocator_history import complete_changes
from lowtide.tracing.profile_events import Change
from lowtide.tracing.roles import Role
from lowtide.tracing.step_trace import Category
from lowtide.tracing.timeline import Block


def change(time_ns: int, address: int, size: int, reserved: int = 4096) -> Change:
    return Change(
        time_ns=time_ns, thread=7, address=address, bytes=size, reserved_bytes=reserved, op=None, inside=f"op {time_ns}"
    )


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def block(address: int, size: int) -> Block:
    role = Role(Category.WEIGHTS, "layer", "parameter weight")
    return Block(address=address, bytes=size, requested_bytes=size, role=role, shape=(size,), dtype="uint8")


def test_nothing_is_added_where_nothing_was_missed() -> None:
    seen = [change(1, 100, 1024), change(2, 200, 512), change(3, 100, -1024)]
    history = [
        entry("alloc", 100, 1000),
        entry("segment_alloc", 0, 2 << 20),
        entry("alloc", 200, 500),
        entry("free_requested", 100, 1000),
        entry("free_completed", 100, 1000),
    ]
    assert complete_changes(seen, history, [], 0) == seen


def test_a_missed_free_stands_where_it_happened_with_the_size_of_its_block() -> None:
    seen = [change(1, 100, 2048, 8192), change(5, 100, 512, 8192)]  # the same address again: freed in between, unseen
    history = [
        entry("alloc", 100, 1100),
        entry("free_requested", 100, 1100),
        entry("free_completed", 100, 1100),
        entry("alloc", 100, 300),
    ]
    completed = complete_changes(seen, history, [], 0)
    assert [(item.address, item.bytes) for item in completed] == [(100, 2048), (100, -2048), (100, 512)]
    assert completed[1].time_ns == 1  # right after what was seen last
    assert completed[1].reserved_bytes == 8192


def test_a_missed_free_of_a_block_from_before_the_step() -> None:
    completed = complete_changes([], [entry("free_completed", 300, 10)], [block(300, 4096)], 1 << 20)
    assert [(item.bytes, item.reserved_bytes) for item in completed] == [(-4096, 1 << 20)]


def test_a_missed_allocation_counts_what_was_requested_in_whole_units() -> None:
    history = [entry("alloc", 100, 513), entry("free_completed", 100, 513)]
    assert [item.bytes for item in complete_changes([], history, [], 0)] == [1024, -1024]
