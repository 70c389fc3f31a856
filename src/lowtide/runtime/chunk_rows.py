"""The statistics' rows about chunks: what the plan says of each, and how often it travelled."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.planning.plan import Plan
from lowtide.runtime.session_stats import ChunkRow
from lowtide.runtime.timeline import Timeline
from lowtide.runtime.unit import Unit


def chunk_rows(plan: Plan, units: Mapping[str, Unit], timeline: Timeline) -> tuple[ChunkRow, ...]:
    """One row a chunk, in the order of the plan."""
    length_s = max(timeline.end_s - timeline.start_s, 1e-12)
    present: dict[str, float] = {}
    for span in timeline.residency:
        present[span.chunk] = present.get(span.chunk, 0.0) + span.duration_s
    return tuple(
        ChunkRow(
            name=chunk.spec.name,
            group=group.name,
            num_bytes=chunk.spec.nbytes,
            weights=group.weights.value,
            site=site.value,
            num_fetches=chunk.num_fetches,
            resident_share=min(1.0, present.get(chunk.spec.name, 0.0) / length_s),
        )
        for group in plan.groups
        for chunk, site in zip(units[group.name].group.chunks, group.sites, strict=True)
    )
