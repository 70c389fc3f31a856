"""Made-up sessions for the tests of statistics and reports: a small model streamed block by block, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.planning.timeline import Lane, LaneSpan, Reason, ResidencySpan, Timeline
from lowtide.runtime.statistics.session_stats import CacheRow, ChunkRow, MovedRow, PhaseSeconds, SessionStats, TierRow
from lowtide.units import GiB, MiB

MS = 1e-3
CHUNK_BYTES = 96 * MiB
COPY_BYTES_S = 24 * GiB


@dataclass
class Streaming:
    """A schedule of blocks between a resident embedding and a resident head: in-backward updates, depth 1.

    Each block has two chunks. Chunk 1 of every third block is updated on the device and written back, all others on the
    host from gradients that were copied there. The embedding is updated on the device, the head on the host.
    """

    num_blocks: int = 12
    num_steps: int = 3
    forward_s: float = 9 * MS
    prefetch: bool = True
    spans: list[LaneSpan] = field(default_factory=list)
    residency: list[ResidencySpan] = field(default_factory=list)
    free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    updated_s: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of groups on the device: when their copy began and when it was complete."""
    step: int = 0

    def timeline(self, *, is_emulated: bool = False) -> Timeline:
        blocks = [f"layers.{index}" for index in range(self.num_blocks)]
        order = [("embed", "forward"), *((block, "forward") for block in blocks), ("head", "forward")]
        order += [("head", "backward"), *((block, "backward") for block in reversed(blocks)), ("embed", "backward")]
        for step in range(self.num_steps):
            self.step = step
            for position, (group, phase) in enumerate(order):
                following = order[(position + 1) % len(order)][0] if self.prefetch else group
                self.use(group, phase, following)
                upcoming = order[position + 1][0] if position + 1 < len(order) else ""
                if group in self.arrived and upcoming != group:
                    self.release(group)
        end_s = max(span.end_s for span in self.spans)
        for group, num_chunks in (("embed", 1), ("head", 1)):
            self.hold(group, num_chunks, 0.0, end_s, "resident")
        return Timeline(spans=tuple(self.spans), residency=tuple(self.residency), is_emulated=is_emulated)

    def use(self, group: str, phase: str, following: str) -> None:
        wanted_s = self.free_s[Lane.COMPUTE]
        streamed = group.startswith("layers.")
        if streamed and group not in self.arrived:
            self.fetch(group, phase, wanted_s)
        ready_s = max(wanted_s, self.arrived[group][1] if streamed else self.updated_s.get(group, 0.0))
        if ready_s > wanted_s:
            self.add(Lane.COMPUTE, f"wait:{group}", phase, wanted_s, ready_s - wanted_s)
        if following.startswith("layers.") and following not in self.arrived:
            self.fetch(following, phase, ready_s)
        took_s = self.forward_s * (2 if phase == "backward" else 1) * (1 if streamed else 0.6)
        done_s = self.add(Lane.COMPUTE, group, phase, ready_s, took_s)
        if streamed:
            self.hold(group, 2, self.arrived[group][0], ready_s, "fetched")
            self.hold(group, 2, ready_s, done_s, "in use")
            self.arrived[group] = (done_s, done_s)
        if phase == "backward":
            self.update(group, done_s)

    def fetch(self, group: str, phase: str, from_s: float) -> None:
        begin_s = max(from_s, self.free_s[Lane.TO_DEVICE], self.updated_s.get(group, 0.0))
        for chunk in range(2):
            done_s = self.copy(Lane.TO_DEVICE, f"{group}/{chunk}", phase, begin_s, Reason.FETCH_WEIGHTS)
        self.arrived[group] = (begin_s, done_s)

    def release(self, group: str) -> None:
        del self.arrived[group]

    def update(self, group: str, done_s: float) -> None:
        kind, _, number = group.partition(".")
        for chunk in range(2 if kind == "layers" else 1):
            name = f"{group}/{chunk}"
            if kind == "embed" or (kind == "layers" and chunk == 1 and int(number) % 3 == 0):
                ended_s = self.add(Lane.COMPUTE, name, "update", done_s, 1 * MS, CHUNK_BYTES)
                if group != "embed":
                    ended_s = self.copy(Lane.TO_HOST, name, "update", ended_s, Reason.WRITE_BACK)
            else:
                copied_s = self.copy(Lane.TO_HOST, name, "backward", done_s, Reason.GRADIENTS)
                ended_s = self.add(Lane.HOST_UPDATE, name, "update", copied_s, 6 * MS, CHUNK_BYTES)
                if group == "head":
                    ended_s = self.copy(Lane.TO_DEVICE, name, "update", ended_s, Reason.UPLOAD)
            self.updated_s[group] = max(self.updated_s.get(group, 0.0), ended_s)

    def copy(self, lane: Lane, name: str, phase: str, from_s: float, reason: Reason) -> float:
        return self.add(lane, name, phase, from_s, CHUNK_BYTES / COPY_BYTES_S, CHUNK_BYTES, reason)

    def add(
        self,
        lane: Lane,
        name: str,
        phase: str,
        from_s: float,
        took_s: float,
        num_bytes: int = 0,
        reason: Reason | None = None,
    ) -> float:
        start_s = max(from_s, self.free_s[lane])
        self.free_s[lane] = end_s = start_s + took_s
        self.spans.append(
            LaneSpan(
                step=self.step,
                lane=lane,
                name=name,
                phase=phase,
                start_s=start_s,
                end_s=end_s,
                num_bytes=num_bytes,
                reason=reason,
            )
        )
        return end_s

    def hold(self, group: str, num_chunks: int, start_s: float, end_s: float, state: str) -> None:
        for chunk in range(num_chunks):
            self.residency.append(
                ResidencySpan(
                    chunk=f"{group}/{chunk}",
                    group=group,
                    start_s=start_s,
                    end_s=end_s,
                    num_bytes=CHUNK_BYTES,
                    state=state,
                )
            )


def stats_of(timeline: Timeline, *, predicted_bytes: int | None = 520 * MiB) -> SessionStats:
    """The statistics of a whole timeline, as a session that recorded every step would give them."""
    copies = [span for span in timeline.spans if span.reason is not None]
    keys = sorted({(span.lane, span.reason) for span in copies if span.reason is not None})
    moved = []
    for lane, reason in keys:
        sizes = [span.num_bytes for span in copies if (span.lane, span.reason) == (lane, reason)]
        moved.append(MovedRow(direction=lane.value, reason=reason, num_bytes=sum(sizes), num_copies=len(sizes)))
    length_s = timeline.end_s - timeline.start_s
    chunks = []
    for name, group in sorted({(span.chunk, span.group) for span in timeline.residency}, key=_layout_order):
        held = [span for span in timeline.residency if span.chunk == name]
        chunks.append(
            ChunkRow(
                name=name,
                group=group,
                num_bytes=held[0].num_bytes,
                weights="streamed" if group.startswith("layers.") else "resident",
                site="device" if group == "embed" else "host",
                num_fetches=sum(span.name == name and span.reason is Reason.FETCH_WEIGHTS for span in copies),
                resident_share=min(sum(span.duration_s for span in held) / length_s, 1.0),
            )
        )
    work = [span for span in timeline.spans if span.lane is Lane.COMPUTE and span.waits_for is None]
    seconds = {phase: sum(span.duration_s for span in work if span.phase == phase) for phase in _PHASES}
    peak_bytes = max(held_bytes for _, held_bytes in timeline.device_chunk_bytes())
    return SessionStats(
        num_steps=len(timeline.steps),
        moved=tuple(moved),
        exposed_copy_s=timeline.exposed_copy_s(),
        seconds=PhaseSeconds(
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            update_s=seconds["update"],
            rest_s=timeline.exposed_copy_s(),
        ),
        chunks=tuple(chunks),
        cache=CacheRow(hits=66, misses=6, held_bytes=2 * CHUNK_BYTES),
        tiers=(
            TierRow(tier="device", peak_bytes=peak_bytes, budget_bytes=GiB, predicted_bytes=predicted_bytes),
            TierRow(tier="host", peak_bytes=6 * GiB, budget_bytes=8 * GiB),
            TierRow(tier="pinned", peak_bytes=2 * GiB),
        ),
        is_emulated=timeline.is_emulated,
        host_update_s=sum(span.duration_s for span in timeline.spans if span.lane is Lane.HOST_UPDATE),
    )


def _layout_order(chunk: tuple[str, str]) -> tuple[int, int, str]:
    kind, _, number = chunk[1].partition(".")
    return ("embed", "layers", "head").index(kind), int(number or 0), chunk[0]


_PHASES = ("forward", "backward", "update")
