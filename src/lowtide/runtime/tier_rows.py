"""Peaks by tier, predicted beside observed, for the statistics."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.memory.chunk import Chunk
from lowtide.memory.store import ChunkStore
from lowtide.memory.tier import Tier
from lowtide.runtime.recording import is_resident
from lowtide.runtime.session_stats import TierRow


def tier_rows(
    store: ChunkStore,
    chunks: Sequence[Chunk],
    *,
    device_peak_bytes: int | None,
    device_budget_bytes: int | None,
    host: Tier,
    pinned: Tier,
    host_predicted_bytes: int,
) -> tuple[TierRow, ...]:
    """One for the device as a whole, its chunks, the host, and what is locked of it.

    `device_peak_bytes` is of everything on the device; None where only chunks are known.
    """
    resident_bytes = sum(chunk.spec.nbytes for chunk in chunks if is_resident(chunk))
    streamed_bytes = sum(chunk.spec.nbytes for chunk in chunks) - resident_bytes
    chunk_peak_bytes = resident_bytes + store.peak_bytes
    return (
        TierRow(
            tier="device",
            peak_bytes=chunk_peak_bytes if device_peak_bytes is None else device_peak_bytes,
            budget_bytes=device_budget_bytes,
        ),
        TierRow(
            tier="device chunks",
            peak_bytes=chunk_peak_bytes,
            predicted_bytes=resident_bytes + min(store.window_bytes, streamed_bytes),
        ),
        TierRow(
            tier="host",
            peak_bytes=host.peak_bytes,
            budget_bytes=host.budget_bytes,
            predicted_bytes=host_predicted_bytes,
        ),
        TierRow(tier="pinned", peak_bytes=pinned.peak_bytes, budget_bytes=pinned.budget_bytes),
    )
