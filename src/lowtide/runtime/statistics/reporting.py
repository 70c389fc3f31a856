"""Reporter: what a session did so far, as plain data, when somebody asks. It reads the other parts and changes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowtide.activations.apply import Applied
from lowtide.distributed.ranks import Ranks
from lowtide.memory.chunk import Chunk
from lowtide.memory.store import ChunkStore
from lowtide.memory.tier import Tier
from lowtide.planning.plan import Plan
from lowtide.planning.timeline import Timeline
from lowtide.runtime.assembly import SessionSetup
from lowtide.runtime.host_memory import HostNeed, HostPool, Tiers
from lowtide.runtime.parameters.group import ManagedGroup, chunks_in
from lowtide.runtime.passes.device_switch import DeviceSwitch
from lowtide.runtime.statistics.observer import Gauge
from lowtide.runtime.statistics.recording import Recorder, is_resident
from lowtide.runtime.statistics.session_stats import (
    CacheRow,
    ChunkRow,
    RanksRow,
    ReplicaRow,
    SessionStats,
    TierRow,
)


class DevicePeak:
    """Remembers what a reset makes the device forget.

    Args:
        setup: Knows the device.
        before_bytes: The most under the plans before; None under the first.
        gauge: Of an observer, which resets the device's record too.
    """

    def __init__(self, setup: SessionSetup, before_bytes: int | None, gauge: Gauge | None) -> None:
        self._setup = setup
        self._before_bytes = before_bytes
        self._gauge = gauge
        self._taken_bytes = 0
        """What the statistics would show, had `take` not begun a new peak."""

    def take(self) -> int:
        """The most in use since this was last called, or since the start; a new peak begins."""
        if self._setup.tracked is not None:
            peak_bytes = shown_bytes = self._setup.tracked.reset_peak()
        else:
            device = self._setup.mover.device
            peak_bytes, shown_bytes = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._taken_bytes = max(self._taken_bytes, shown_bytes)
        return peak_bytes

    def so_far(self) -> int:
        """The most in use since `take` was last called, or since the start."""
        if self._setup.tracked is not None:
            return self._setup.tracked.peak_bytes
        return torch.cuda.max_memory_allocated(self._setup.mover.device)

    def highest_bytes(self) -> int | None:
        """The most of the whole session, on CUDA as reserved by the allocator; None where only chunks are known."""
        if self._setup.tracked is not None:
            peaks = [self._setup.tracked.peak_bytes, self._taken_bytes]
        elif self._setup.is_on_cuda:
            peaks = [torch.cuda.max_memory_reserved(self._setup.mover.device), self._taken_bytes]
        else:
            peaks = []
        if self._before_bytes is not None:
            peaks.append(self._before_bytes)
        if self._gauge is not None:
            peaks.append(self._gauge.highest_bytes)
        return max(peaks, default=None)


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
    """Rows for the device as a whole, its chunks, the host, and the host's pinned memory.

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


def chunk_rows(plan: Plan, groups: Mapping[str, ManagedGroup], timeline: Timeline) -> tuple[ChunkRow, ...]:
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
        for chunk, site in zip(groups[group.name].stored.chunks, group.sites, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reporter:
    """Over the parts that know what happened."""

    setup: SessionSetup
    plan: Plan
    groups: Mapping[str, ManagedGroup]
    recorder: Recorder
    pool: HostPool
    store: ChunkStore
    tiers: Tiers
    need: HostNeed
    peak: DevicePeak
    applied: Applied | None
    """Activation policies; None where all keep what they save."""
    switch: DeviceSwitch | None
    """Between the devices of a replicated model; None where there is one."""

    @property
    def num_steps(self) -> int:
        """Steps so far; forwards where nobody tells of updates."""
        return self.recorder.num_updates or self.recorder.step

    def timeline(self) -> Timeline:
        """What the lanes did in the last steps. Waits for the work that is under way."""
        self.setup.mover.drain()
        resident = [chunk for chunk in chunks_in(self.groups.values()) if is_resident(chunk)]
        return self.recorder.timeline(
            self.setup.mover.now(), is_emulated=self.setup.tracked is not None, resident=resident
        )

    def stats(self) -> SessionStats:
        """What happened so far. Waits for the work that is under way."""
        timeline = self.timeline()
        cache, _ = self.pool.counts()
        return SessionStats(
            num_steps=self.num_steps,
            moved=self.recorder.moved(),
            exposed_copy_s=self.recorder.exposed_copy_s(timeline),
            seconds=self.recorder.phases.seconds(),
            host_update_s=self.recorder.host_update_s(),
            chunks=chunk_rows(self.plan, self.groups, timeline),
            cache=CacheRow(hits=cache.num_hits, misses=cache.num_misses, held_bytes=cache.held_bytes),
            tiers=self._tiers(),
            is_emulated=self.setup.tracked is not None,
            activations=None if self.applied is None else self.applied.stats(),
            ranks=None if self.setup.ranks is None else _ranks_row(self.setup.ranks),
            replicas=() if self.switch is None else _replica_rows(self.switch),
        )

    def device_peak_bytes(self) -> int:
        """The most that the device held so far, as the statistics show it."""
        return next(row.peak_bytes for row in self._tiers() if row.tier == "device")

    def _tiers(self) -> tuple[TierRow, ...]:
        return tier_rows(
            self.store,
            chunks_in(self.groups.values()),
            device_peak_bytes=self.peak.highest_bytes(),
            device_budget_bytes=self.plan.budgets.device_bytes,
            host=self.tiers.host,
            pinned=self.tiers.pinned,
            host_predicted_bytes=self.need.everything_bytes,
        )


def _replica_rows(switch: DeviceSwitch) -> tuple[ReplicaRow, ...]:
    return tuple(
        ReplicaRow(
            device=device.name,
            peak_bytes=device.peak_bytes,
            budget_bytes=device.budget_bytes,
            copied_bytes=copied_bytes,
        )
        for device, copied_bytes in zip(switch.devices.devices, switch.copied_bytes, strict=True)
    )


def _ranks_row(ranks: Ranks) -> RanksRow:
    return RanksRow(
        rank=ranks.rank,
        size=ranks.size,
        sent_bytes=sum(each.sent_bytes for each in ranks.connections),
        waited_s=sum(each.waited_s for each in ranks.connections),
    )
