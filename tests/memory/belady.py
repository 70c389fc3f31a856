"""Belady's rule, by looking at every group: what `LeavingQueue` must choose, and the bytes that a cycle then fetches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group on the device that nobody reads."""

    group: str
    num_bytes: int
    """What its leaving frees."""
    distance: int
    """How many uses away its next use is."""


def choose_leaving(candidates: Sequence[Candidate], needed_bytes: int, *, nearer_than: int | None) -> list[str] | None:
    """The groups to drop so that `needed_bytes` become free, farthest next use first; None where they do not suffice.

    Args:
        candidates: What may leave.
        needed_bytes: What is missing; nothing leaves for 0 or less.
        nearer_than: For a prefetch: only groups that are used later than this may leave for it, since to drop a group
            that is needed sooner would only exchange one copy for another. None: the group is needed now.

    Example:
        >>> near, far = Candidate(group="a", num_bytes=8, distance=1), Candidate(group="b", num_bytes=8, distance=5)
        >>> choose_leaving([near, far], 6, nearer_than=None)
        ['b']
    """
    leaving: list[str] = []
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.distance, candidate.group)):
        if needed_bytes <= 0:
            break
        if nearer_than is not None and candidate.distance <= nearer_than:
            break
        leaving.append(candidate.group)
        needed_bytes -= candidate.num_bytes
    return leaving if needed_bytes <= 0 else None


def simulate(order: Sequence[str], sizes: Mapping[str, int], room_bytes: int, *, cycles: int = 2) -> int:
    """Bytes fetched in the last of `cycles` rounds over `order` with this rule and no prefetch: what a plan will move."""
    places: dict[str, list[int]] = {}
    for place, group in enumerate(order):
        places.setdefault(group, []).append(place)

    def distance(group: str, now: int) -> int:
        later = [place for place in places[group] if place > now]
        return (later[0] if later else places[group][0] + len(order)) - now

    present: set[str] = set()
    fetched = 0
    for _ in range(cycles):
        fetched = 0
        for now, group in enumerate(order):
            if group in present:
                continue
            used = sum(sizes[name] for name in present)
            missing = used + sizes[group] - room_bytes
            candidates = [
                Candidate(group=name, num_bytes=sizes[name], distance=distance(name, now)) for name in present
            ]
            leaving = choose_leaving(candidates, missing, nearer_than=None)
            assert leaving is not None, f"{group} alone is larger than {room_bytes} bytes"
            present.difference_update(leaving)
            present.add(group)
            fetched += sizes[group]
    return fetched
