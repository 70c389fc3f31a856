"""Which groups leave the device to make room: the one whose next use is farthest leaves first (Belady's rule)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowtide.memory.access_order import AccessOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group on the device that nobody reads."""

    group: str
    num_bytes: int
    """What its leaving frees."""
    distance: int
    """How many uses away its next use is."""


class LeavingQueue:
    """Gives what `choose_leaving` gives, without looking at every group each time.

    A heap of groups by their next use, which does not change before the group is used again, unless the order of uses
    surprises: then the heap is made anew. Entries that are out of date are found when they come up. The heap only saves
    time: where a group is needed now and the heap does not suffice, all groups are asked.

    Args:
        groups: Names of all groups.
        idle_bytes: What the leaving of a group would free; 0 where it is absent or in use.
    """

    def __init__(self, groups: Iterable[str], idle_bytes: Callable[[str], int]) -> None:
        self._groups = tuple(groups)
        self._idle_bytes = idle_bytes
        self._heap: list[tuple[int, str]] = []
        self._made_for: tuple[AccessOrder, int] | None = None

    def enter(self, group: str, order: AccessOrder) -> None:
        """The group is on the device, and nobody uses it from now on."""
        heapq.heappush(self._heap, (-order.next_use(group), group))

    def choose(
        self, needed_bytes: int, order: AccessOrder, *, staying: str, later_than: int | None = None
    ) -> list[str] | None:
        """The groups to drop so that `needed_bytes` become free; None where they do not suffice.

        Args:
            needed_bytes: What is missing.
            order: When groups are used next.
            staying: The group that needs the room.
            later_than: For a prefetch: only groups whose next use is later than this one may leave.
        """
        if self._made_for is not None and self._made_for[0] is order and self._made_for[1] == order.epoch:
            leaving = self._take(needed_bytes, order, staying, later_than)
            if leaving is not None or later_than is not None:
                return leaving
        self._heap = [(-order.next_use(name), name) for name in self._groups if self._idle_bytes(name)]
        heapq.heapify(self._heap)
        self._made_for = (order, order.epoch)
        return self._take(needed_bytes, order, staying, later_than)

    def _take(self, needed_bytes: int, order: AccessOrder, staying: str, later_than: int | None) -> list[str] | None:
        taken: dict[str, tuple[int, str]] = {}
        heap = self._heap
        while needed_bytes > 0 and heap:
            entry = heap[0]
            next_use, name = -entry[0], entry[1]
            if later_than is not None and next_use <= later_than:
                break
            heapq.heappop(heap)
            if name in taken or name == staying or next_use != order.next_use(name):
                continue
            if idle_bytes := self._idle_bytes(name):
                taken[name] = entry
                needed_bytes -= idle_bytes
        if needed_bytes > 0:
            for entry in taken.values():
                heapq.heappush(heap, entry)
            return None
        return list(taken)


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
