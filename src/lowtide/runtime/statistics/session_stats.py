"""SessionStats: what a session did since its first step, in numbers: bytes moved, time, residency, peaks.

The numbers are sums over all steps, unlike a `Timeline`, which may hold the last steps only. They are written as JSON
under the schema `lowtide.session_stats/2` and read back strictly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.activations.apply import ActivationStats
from lowtide.config import from_plain, to_plain
from lowtide.errors import BadRecordError, ConfigError
from lowtide.plain_text import Plain
from lowtide.planning.timeline import Reason
from lowtide.units import format_bytes, format_seconds

SCHEMA = "lowtide.session_stats/2"

_AGAIN = "take the statistics again with session.stats(), or read an undamaged copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRow:
    """Copies in one direction for one reason."""

    direction: str
    """`to device` or `to host`, as the lanes are called."""
    reason: Reason
    num_bytes: int
    num_copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Where the time of the training loop went: four phases that follow each other without gap or overlap.

    On an emulated device this is the host's clock, read in the thread of the loop. On CUDA it is the device's: an event
    on the computation's stream at each change of phase, which nothing waits for until the statistics are asked for. What
    runs beside the loop, copies and updates on the host, is in none of them, except where the loop waits for it.
    """

    forward_s: float = 0.0
    """In calls of the model, evaluations too. Where only parts of it are called, in calls of those that are managed."""
    backward_s: float = 0.0
    """From when a backward reaches the model's output to its end, forwards that run again included."""
    update_s: float = 0.0
    """In `optimizer.step`, and in updates on the device in the middle of a backward."""
    rest_s: float = 0.0
    """Between these: data, a loss outside of the model, `zero_grad`, logging, and whatever a loop does that is compiled
    as a whole."""

    @property
    def total_s(self) -> float:
        """All four together: from the start of the first forward to the end of the last phase."""
        return math.fsum((self.forward_s, self.backward_s, self.update_s, self.rest_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """One chunk: what the plan says of it and how often it travelled."""

    name: str
    group: str
    num_bytes: int
    weights: str
    """`resident` or `streamed`."""
    site: str
    """The update site of the chunk: `device` or `host`."""
    num_fetches: int
    resident_share: float
    """The part of the session's time, 0 to 1, in which it held bytes of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """The cache of released buffers."""

    hits: int = 0
    misses: int = 0
    held_bytes: int = 0
    """Kept now for the next request."""

    @property
    def hit_rate(self) -> float | None:
        """Hits of all requests; None before the first request."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """The most bytes one tier held at once."""

    tier: str
    peak_bytes: int
    budget_bytes: int | None = None
    predicted_bytes: int | None = None

    @property
    def prediction_error(self) -> float | None:
        """Predicted over observed, less 1; None where either is missing."""
        if self.predicted_bytes is None or self.peak_bytes == 0:
            return None
        return self.predicted_bytes / self.peak_bytes - 1

    @property
    def is_within_budget(self) -> bool | None:
        """Whether the peak kept to the budget; None without one."""
        return None if self.budget_bytes is None else self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A plan that the session went on under."""

    step: int
    """Steps that were taken before it."""
    reason: str
    """Why the plan was made."""
    predicted_peak_bytes: int | None = None
    """Device bytes of tensors that its step was predicted to take; None where that was not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRow:
    """A checkpoint that was written, or was not."""

    step: int
    num_bytes: int
    """Of its tensors."""
    seconds: float
    """From the call of `save` until it was whole."""
    stalled_s: float
    """For which the loop, or an update on the host, waited for it: at most so long was training held up."""
    peak_staging_bytes: int
    """The most host memory that it took."""
    error: str | None = None
    """Why it was not written; None where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRow:
    """What this rank has exchanged with the others."""

    rank: int
    size: int
    sent_bytes: int
    """Gradients that were added up, once for each sum, however the backend sends them."""
    waited_s: float
    """Time in which the loop waited for sums. On CUDA the device waits instead, which is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One of the devices over which one process has replicated its model."""

    device: str
    peak_bytes: int
    """The most that it held; on CUDA what the allocator has reserved."""
    budget_bytes: int | None
    copied_bytes: int
    """What went from the first device to this one and back. Streamed weights come from the host, and are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """What `session.stats()` gives."""

    num_steps: int
    moved: tuple[MovedRow, ...]
    """One row for each direction and reason that occurred."""
    exposed_copy_s: float
    """Time in which compute stood still for a copy or an update, that is, the copy time that was not hidden. It is part of
    the phases in which it happened."""
    seconds: PhaseSeconds
    chunks: tuple[ChunkRow, ...]
    """In the order of the layout."""
    cache: CacheRow
    tiers: tuple[TierRow, ...]
    activations: ActivationStats | None = None
    """What activation policies did; None where everything that is saved stays on the device."""
    is_emulated: bool = False
    """The device was a tier of host memory: the times say nothing about a GPU."""
    host_update_s: float = 0.0
    """Time in which the worker updated chunks on the host: beside the loop, so no part of `seconds`."""
    plans: tuple[PlanRow, ...] = ()
    """Every plan that was made after the first, in order."""
    saves: tuple[SaveRow, ...] = ()
    """Every save that is over, in order."""
    ranks: RanksRow | None = None
    """None where one process trains."""
    replicas: tuple[ReplicaRow, ...] = ()
    """By device, where one process replicates the model over several."""

    def __str__(self) -> str:
        """A summary in some ten lines, for `print`."""
        return stats_text(self)

    def moved_bytes(self, direction: str | None = None, reason: Reason | None = None) -> int:
        """Bytes copied, in one direction and for one reason where these are given.

        Raises:
            ConfigError: There is no such direction.
        """
        if direction not in (None, "to device", "to host"):
            raise ConfigError(f"direction is {direction!r}; give 'to device' or 'to host'", key="direction")
        return sum(
            row.num_bytes
            for row in self.moved
            if direction in (None, row.direction) and (reason is None or row.reason is reason)
        )

    def to_dict(self) -> dict[str, Plain]:
        """Plain data for JSON; `from_dict` is its inverse.

        Raises:
            ConfigError: A number is not finite.
        """
        return {"schema": SCHEMA, **to_plain(self)}

    @classmethod
    def from_dict(cls, record: object) -> SessionStats:
        """The statistics that `to_dict` wrote.

        Raises:
            BadRecordError: The schema is another one, a key is unknown or missing, or a value does not fit.
        """
        if not isinstance(record, dict):
            raise BadRecordError(f"statistics of a session are a mapping, got {type(record).__name__}; {_AGAIN}")
        if record.get("schema") != SCHEMA:
            raise BadRecordError(f"the schema is {record.get('schema')!r}, this Lowtide reads {SCHEMA!r}; {_AGAIN}")
        try:
            stats = from_plain(cls, {key: value for key, value in record.items() if key != "schema"})
        except ConfigError as error:
            raise BadRecordError(f"these are not statistics of a session: {error}; {_AGAIN}") from error
        for complaint in _out_of_range(stats):
            raise BadRecordError(f"{complaint}; {_AGAIN}")
        return stats


def _out_of_range(stats: SessionStats) -> Iterator[str]:
    """What no session could have counted. Checked when reading only: a session's own numbers must never stop it."""
    numbers: dict[str, float | None] = {
        "num_steps": stats.num_steps,
        "exposed_copy_s": stats.exposed_copy_s,
        "host_update_s": stats.host_update_s,
        "cache.hits": stats.cache.hits,
        "cache.misses": stats.cache.misses,
        "cache.held_bytes": stats.cache.held_bytes,
    }
    numbers |= {f"seconds.{key}_s": getattr(stats.seconds, f"{key}_s") for key in _PHASE_KEYS}
    for row in stats.moved:
        what = f"moved {row.direction}, {row.reason}"
        numbers |= {f"{what}: num_bytes": row.num_bytes, f"{what}: num_copies": row.num_copies}
    for chunk in stats.chunks:
        numbers |= {f"{chunk.name}: num_bytes": chunk.num_bytes, f"{chunk.name}: num_fetches": chunk.num_fetches}
        if not 0.0 <= chunk.resident_share <= 1.0 + 1e-9:
            yield f"the resident share of chunk {chunk.name!r} is {chunk.resident_share}, not between 0 and 1"
    for save in stats.saves:
        for key in ("step", "num_bytes", "seconds", "stalled_s", "peak_staging_bytes"):
            numbers[f"checkpoint of step {save.step}: {key}"] = getattr(save, key)
    for tier in stats.tiers:
        for key in ("peak_bytes", "budget_bytes", "predicted_bytes"):
            numbers[f"{tier.tier}: {key}"] = getattr(tier, key)
    for key, number in numbers.items():
        if number is not None and number < 0:
            yield f"{key} is {number}, which is below 0"


_PHASE_KEYS = ("forward", "backward", "update", "rest")


def stats_text(stats: SessionStats) -> str:
    """Plain text, about ten lines."""
    steps = max(stats.num_steps, 1)
    whole_s = stats.seconds.total_s
    emulated = " on an emulated device" if stats.is_emulated else ""
    lines = [
        f"{stats.num_steps:,} steps{emulated}, {format_seconds(whole_s)}, {format_seconds(whole_s / steps)} a step"
    ]
    for name in ("forward", "backward", "update", "rest"):
        seconds = getattr(stats.seconds, f"{name}_s")
        share = seconds / whole_s if whole_s else 0.0
        lines.append(f"  {name:<12}{format_seconds(seconds / steps):>10} a step {share:>6.1%}")
    lines.append(f"  waiting     {format_seconds(stats.exposed_copy_s / steps):>10} a step, inside of these")
    if stats.host_update_s:
        lines.append(f"  host updates{format_seconds(stats.host_update_s / steps):>10} a step, beside these")
    to_device, to_host = (format_bytes(stats.moved_bytes(way) / steps) for way in ("to device", "to host"))
    lines.append(f"copied a step: {to_device} to the device, {to_host} to the host")
    lines += [_tier(row) for row in stats.tiers]
    resident = sum(chunk.weights == "resident" for chunk in stats.chunks)
    lines.append(f"{len(stats.chunks):,} chunks, {resident:,} of them resident")
    if stats.ranks is not None:
        told = stats.ranks
        lines.append(
            f"rank {told.rank} of {told.size}: {format_bytes(told.sent_bytes / steps)} of gradients a step to the others, waited "
            f"{format_seconds(told.waited_s / steps)} a step for theirs"
        )
    for row in stats.replicas:
        budget = "" if row.budget_bytes is None else f" of {format_bytes(row.budget_bytes)}"
        copied = format_bytes(row.copied_bytes / steps)
        lines.append(
            f"replica on {row.device}: peak {format_bytes(row.peak_bytes)}{budget}, {copied} a step from and to the first"
        )
    lines += [f"new plan after {row.step:,} steps: {row.reason}" for row in stats.plans]
    lines += [_save(row) for row in stats.saves]
    return "\n".join(lines)


def _save(row: SaveRow) -> str:
    if row.error is not None:
        return f"checkpoint of step {row.step:,} failed: {row.error}"
    return (
        f"checkpoint of step {row.step:,}: {format_bytes(row.num_bytes)} in {format_seconds(row.seconds)}, held training up "
        f"for {format_seconds(row.stalled_s)}, took {format_bytes(row.peak_staging_bytes)} of the host"
    )


def _tier(row: TierRow) -> str:
    words = f"{row.tier} peak: {format_bytes(row.peak_bytes)}"
    if row.budget_bytes is not None:
        words += f" of {format_bytes(row.budget_bytes)}"
        words += "" if row.is_within_budget else ", OVER THE BUDGET"
    return words
