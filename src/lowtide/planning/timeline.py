"""Timeline: what each lane of a session did and when, and which chunks were on the device meanwhile.

A lane is a queue that works in order: the compute stream, the two copy streams, the host's update worker. Times are
seconds from the start of the session's first step. All of this is plain data; the runtime fills it from events, and
the report and the Perfetto export read it.
"""

from __future__ import annotations

import bisect
import enum
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from lowtide.errors import ConfigError

WAIT_PREFIX = "wait:"
"""How the name of a compute span begins in which the device waited; the group it waited for follows."""

_CHUNK_NAME = re.compile(r"(?P<group>.*)/\d+", re.DOTALL)


class Lane(enum.StrEnum):
    """A queue of work."""

    COMPUTE = "compute"
    """Forward, backward and device updates, and the waits between them."""
    TO_DEVICE = "to device"
    TO_HOST = "to host"
    HOST_UPDATE = "host update"
    BETWEEN_RANKS = "between ranks"
    """Collectives, where there are several ranks; one rank has no such lane, and is not shown one."""


def lanes_that_work(busy: Collection[Lane]) -> tuple[Lane, ...]:
    """The lanes that are shown, where these have work: all of one rank, and the one between ranks where it is among them."""
    return tuple(lane for lane in Lane if lane is not Lane.BETWEEN_RANKS or lane in busy)


class Reason(enum.StrEnum):
    """Why bytes were copied."""

    FETCH_WEIGHTS = "fetch weights"
    """Host to device: a streamed group is about to be used."""
    WRITE_BACK = "write back"
    """Device to host: weights that were updated on the device."""
    GRADIENTS = "gradients"
    """Device to host: a finished gradient whose chunk is updated there."""
    UPLOAD = "upload"
    """Host to device: the updated weights of a resident group."""
    OFFLOAD = "offload"
    """Device to host: what a forward saved waits there for its backward."""
    BRING_BACK = "bring back"
    """Host to device: what was offloaded, for the backward."""
    PAGE_IN = "page in"
    """Host to device: optimizer state that visits for its update."""
    PAGE_OUT = "page out"
    """Device to host: the same on its way home."""
    GATHER = "gather"
    """Between ranks: a group that is spread over them comes together in its window."""
    SUM = "sum"
    """Between ranks: gradients are added up, and each rank gets its part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan:
    """One piece of work on a lane."""

    step: int
    lane: Lane
    name: str
    """A group or a chunk; `wait:GROUP` on the compute lane where compute stood still for that group."""
    phase: str
    """`forward`, `backward` or `update`."""
    start_s: float
    end_s: float
    num_bytes: int = 0
    """What a copy moved, or the weights that an update changed; 0 where it says nothing."""
    reason: Reason | None = None
    """Why a copy was made; None on the other lanes."""

    def __post_init__(self) -> None:
        _check_times(f"the {self.lane} span {self.name!r} of step {self.step}", self.start_s, self.end_s)

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    @property
    def waits_for(self) -> str | None:
        """The group for which compute stood still; None where the span is work."""
        if self.lane is Lane.COMPUTE and self.name.startswith(WAIT_PREFIX):
            return self.name.removeprefix(WAIT_PREFIX)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySpan:
    """A stretch of time in which a chunk held bytes of the device in one state."""

    chunk: str
    group: str
    start_s: float
    end_s: float
    num_bytes: int
    state: str
    """`resident`, `fetched` (there, not yet or no longer used), `in use`, or another word of the runtime's."""

    def __post_init__(self) -> None:
        _check_times(f"the residency of {self.chunk!r}", self.start_s, self.end_s)

    @property
    def duration_s(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s


class Overlap(NamedTuple):
    """How far ahead of its use a copy began."""

    group: str
    """The group that was computing."""
    next_group: str
    """The group used after it, whose weights were copied."""
    lead_s: float
    """From the start of that copy to the end of the computation; 0 or less: the copy was late, nothing overlapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a session recorded, of all its steps or of the last ones."""

    spans: tuple[LaneSpan, ...]
    residency: tuple[ResidencySpan, ...]
    is_emulated: bool
    """The device was a tier of host memory: the times say nothing about a GPU."""

    @property
    def start_s(self) -> float:
        """The first instant that is recorded; 0 when nothing is."""
        starts = (span.start_s for span in self.spans), (span.start_s for span in self.residency)
        return min(chain(*starts), default=0.0)

    @property
    def end_s(self) -> float:
        """The last instant that is recorded; 0 when nothing is."""
        ends = (span.end_s for span in self.spans), (span.end_s for span in self.residency)
        return max(chain(*ends), default=0.0)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with at least one span, in order."""
        return tuple(sorted({span.step for span in self.spans}))

    @property
    def lanes(self) -> frozenset[Lane]:
        """The lanes with at least one span."""
        return frozenset(span.lane for span in self.spans)

    def exposed_copy_s(self) -> float:
        """Time in which compute stood still for a copy or an update: the copy time that was not hidden."""
        return math.fsum(span.duration_s for span in self.spans if span.waits_for is not None)

    def step_starts(self) -> tuple[tuple[int, float], ...]:
        """Each step with the start of its first computation, in order; steps without computation begin with any span."""
        starts: dict[int, tuple[bool, float]] = {}
        for span in self.spans:
            # Work of a step that runs elsewhere, such as a prefetch in the step before, must not move its beginning.
            begins = (span.lane is not Lane.COMPUTE, span.start_s)
            starts[span.step] = min(starts.get(span.step, begins), begins)
        return tuple((step, starts[step][1]) for step in sorted(starts))

    def busy_s(self, lane: Lane) -> float:
        """Time in which a lane works. Modules inside of others count once, and waits inside of modules not at all."""
        on_lane = [span for span in self.spans if span.lane is lane]
        return _covered_s(on_lane) - _covered_s(span for span in on_lane if span.waits_for is not None)

    def last_steps(self, count: int) -> Timeline:
        """The last `count` recorded steps alone; residency is cut at the first instant of these steps.

        Raises:
            ConfigError: `count` is below 1.
        """
        if count < 1:
            raise ConfigError(f"a timeline of {count} steps shows nothing; ask for 1 or more")
        kept = frozenset(self.steps[-count:])
        spans = tuple(span for span in self.spans if span.step in kept)
        # Work of the step before may still run on another lane; where compute is recorded, the step begins there.
        compute = [span for span in spans if span.lane is Lane.COMPUTE] or spans
        start_s = min((span.start_s for span in compute), default=self.start_s)
        if len(kept) == len(self.steps):
            start_s = self.start_s
        residency = tuple(_from(span, start_s) for span in self.residency if span.end_s > start_s)
        return Timeline(spans=spans, residency=residency, is_emulated=self.is_emulated)

    def overlaps(self) -> tuple[Overlap, ...]:
        """For each use of a group that had to be fetched: by how much the fetch led the computation before it.

        Uses are the forward and backward spans of the compute lane in order of their start, taken step by step: the
        first fetch of a step also waits for its own update, so it says nothing about prefetching. A use of a group that
        was on the device already has no fetch and no entry. A fetch serves the first use that ends after it began.
        """
        group_of = self._group_of()
        fetches: dict[str, list[float]] = defaultdict(list)
        waits: dict[str, list[LaneSpan]] = defaultdict(list)
        uses: list[LaneSpan] = []
        for span in sorted(self.spans, key=lambda span: (span.start_s, span.end_s)):
            awaited = span.waits_for
            if awaited is not None:
                waits[awaited].append(span)
            elif span.lane is Lane.COMPUTE and span.phase in ("forward", "backward"):
                uses.append(span)
            elif span.lane is Lane.TO_DEVICE and span.reason is Reason.FETCH_WEIGHTS:
                fetches[_group(span.name, group_of)].append(span.start_s)
        found: list[Overlap] = []
        last_use_s: dict[str, float] = {}
        before: LaneSpan | None = None
        for use in uses:
            since_s = last_use_s.get(use.name, -math.inf)
            copies = fetches.get(use.name, [])
            first = bisect.bisect_left(copies, since_s)
            # A copy that begins inside the use it serves is late, whatever it is called; it must not go unseen.
            served = first < len(copies) and (copies[first] <= use.start_s or copies[first] < use.end_s)
            if served and before is not None and before.step == use.step and before.name != use.name:
                wanted_s = _wanted_s(use, waits.get(use.name, ()), since_s)
                # A module that encloses the next one ends after it; then what counts is when the next was wanted.
                lead_s = min(before.end_s, wanted_s) - copies[first]
                found.append(Overlap(before.name, use.name, lead_s))
            last_use_s[use.name] = use.end_s
            before = use
        return tuple(found)

    def first_late_copy(self) -> Overlap | None:
        """The first copy that began only when the computation before it had ended; None proves that all overlapped."""
        return next((overlap for overlap in self.overlaps() if overlap.lead_s <= 0), None)

    def device_chunk_bytes(self) -> tuple[tuple[float, int], ...]:
        """Bytes that chunks held on the device, as (time, bytes from then on) at each change."""
        changes: dict[float, int] = defaultdict(int)
        for span in self.residency:
            changes[span.start_s] += span.num_bytes
            changes[span.end_s] -= span.num_bytes
        curve: list[tuple[float, int]] = []
        held_bytes = 0
        for time_s in sorted(changes):
            held_bytes += changes[time_s]
            # A chunk that only changes its state leaves and enters at one instant, which is no change here.
            if not curve or curve[-1][1] != held_bytes:
                curve.append((time_s, held_bytes))
        return tuple(curve)

    def _group_of(self) -> dict[str, str]:
        return {span.chunk: span.group for span in self.residency}


def _group(name: str, group_of: Mapping[str, str]) -> str:
    """The group of a copy, which may carry the name of a chunk (`layers.3/0`) or of the group itself."""
    known = group_of.get(name)
    if known is not None:
        return known
    match = _CHUNK_NAME.fullmatch(name)
    return match["group"] if match else name


def _wanted_s(use: LaneSpan, waits: Iterable[LaneSpan], since_s: float) -> float:
    """When compute first asked for a use: the start of its wait, or of the use where it did not wait."""
    return min((wait.start_s for wait in waits if since_s <= wait.start_s <= use.start_s), default=use.start_s)


def _covered_s(spans: Iterable[LaneSpan]) -> float:
    """Length of the time that at least one span covers."""
    covered_s, until_s = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.end_s > until_s:
            covered_s += span.end_s - max(span.start_s, until_s)
            until_s = span.end_s
    return covered_s


def _from(span: ResidencySpan, start_s: float) -> ResidencySpan:
    if span.start_s >= start_s:
        return span
    return ResidencySpan(
        chunk=span.chunk,
        group=span.group,
        start_s=start_s,
        end_s=span.end_s,
        num_bytes=span.num_bytes,
        state=span.state,
    )


def _check_times(what: str, start_s: float, end_s: float) -> None:
    if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
        raise ConfigError(f"{what} runs from {start_s} s to {end_s} s; give finite times, the end not before the start")
