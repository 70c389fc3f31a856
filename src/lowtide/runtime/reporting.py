"""Reporter: what a session did so far, as plain data, when somebody asks. It reads the other parts and changes none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.activations.apply import Applied
from lowtide.memory.store import ChunkStore
from lowtide.planning.plan import Plan
from lowtide.runtime.basis import Basis
from lowtide.runtime.chunk_rows import chunk_rows
from lowtide.runtime.device_peak import DevicePeak
from lowtide.runtime.host_need import HostNeed
from lowtide.runtime.host_pool import HostPool
from lowtide.runtime.plan_tiers import Tiers
from lowtide.runtime.recording import Recorder, is_resident
from lowtide.runtime.session_stats import CacheRow, SessionStats, TierRow
from lowtide.runtime.tier_rows import tier_rows
from lowtide.runtime.timeline import Timeline
from lowtide.runtime.unit import Unit, chunks_in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reporter:
    """Over the parts that know what happened."""

    basis: Basis
    plan: Plan
    units: Mapping[str, Unit]
    recorder: Recorder
    pool: HostPool
    store: ChunkStore
    tiers: Tiers
    need: HostNeed
    peak: DevicePeak
    applied: Applied | None
    """Activation policies; None where all keep what they save."""

    def timeline(self) -> Timeline:
        """What the lanes did in the last steps. Waits for the work that is under way."""
        self.basis.mover.drain()
        resident = [chunk for chunk in chunks_in(self.units.values()) if is_resident(chunk)]
        return self.recorder.timeline(
            self.basis.mover.now(), is_emulated=self.basis.tracked is not None, resident=resident
        )

    def stats(self) -> SessionStats:
        """What happened so far. Waits for the work that is under way."""
        timeline = self.timeline()
        cache, _ = self.pool.counts()
        return SessionStats(
            num_steps=self.recorder.num_updates or self.recorder.step,
            moved=self.recorder.moved(),
            exposed_copy_s=self.recorder.exposed_copy_s(timeline),
            seconds=self.recorder.phases.seconds(),
            host_update_s=self.recorder.host_update_s(),
            chunks=chunk_rows(self.plan, self.units, timeline),
            cache=CacheRow(hits=cache.num_hits, misses=cache.num_misses, held_bytes=cache.held_bytes),
            tiers=self._tiers(),
            is_emulated=self.basis.tracked is not None,
            activations=None if self.applied is None else self.applied.stats(),
        )

    def device_peak_bytes(self) -> int:
        """The most that the device held so far, as the statistics show it."""
        return next(row.peak_bytes for row in self._tiers() if row.tier == "device")

    def _tiers(self) -> tuple[TierRow, ...]:
        return tier_rows(
            self.store,
            chunks_in(self.units.values()),
            device_peak_bytes=self.peak.highest_bytes(),
            device_budget_bytes=self.plan.budgets.device_bytes,
            host=self.tiers.host,
            pinned=self.tiers.pinned,
            host_predicted_bytes=self.need.everything_bytes,
        )
