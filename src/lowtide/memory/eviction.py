"""Which groups leave the device to make room, and which come next, from the order in which a step uses them.

The order is learnt from the cycle before. A cycle is what one training step (or one evaluation call) uses, forward and
backward. The first cycle is unknown and nothing is prefetched in it; from the second on, the order of the one before is
expected. A cycle that differs costs copies that are not used or come late, never a wrong value. Of the groups on the
device, the one whose next use is farthest leaves first (Belady's rule).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable

MAX_CYCLE = 100_000
"""Uses after which a cycle ends by itself: a model whose parts are called by themselves never says that one ended."""

_NEVER = 1 << 62
"""The next use of a group that the known cycle does not use: later than any other."""


class AccessOrder:
    """The order of one kind of cycle.

    Example:
        >>> order = AccessOrder()
        >>> for name in ("a", "b", "b", "a"): order.access(name)
        >>> order.end_cycle()
        >>> order.access("a"); order.upcoming(2), order.next_use("b"), order.next_use("a")
        (['b', 'a'], 1, 3)
    """

    def __init__(self) -> None:
        self._known: list[str] = []
        self._places: dict[str, list[int]] = {}
        self._recorded: list[str] = []
        self._position = 0
        self.num_uses = 0
        """Counts expected uses."""
        self.epoch = 0
        """Counts surprises. As long as it stays, `next_use` of a group changes by nothing but its own use."""

    @property
    def known(self) -> tuple[str, ...]:
        """The last whole cycle."""
        return tuple(self._known)

    def access(self, group: str) -> None:
        """A group is used now."""
        self._recorded.append(group)
        if len(self._recorded) >= MAX_CYCLE:
            self.end_cycle()
        place = self._next_place(group)
        if place is not None:
            if place != self._position:
                self.epoch += 1
            self.num_uses += 1
            self._position = (place + 1) % len(self._known)

    def end_cycle(self) -> None:
        """The step is over: what was recorded is expected again."""
        if self._recorded:
            places: dict[str, list[int]] = {}
            for place, group in enumerate(self._recorded):
                places.setdefault(group, []).append(place)
            self._known, self._places, self._recorded = self._recorded, places, []
        self._position = 0
        self.epoch += 1

    def forget_cycle(self) -> None:
        """The cycle broke off: it says nothing about the next."""
        self._recorded = []
        self._position = 0
        self.epoch += 1

    def upcoming(self, count: int) -> list[str]:
        """The next `count` different groups, the nearest first; across the end of the cycle into the next."""
        known, place = self._known, self._position
        found: list[str] = []
        for _ in range(min(count, len(self._places))):
            while known[place] in found:
                place = (place + 1) % len(known)
            found.append(known[place])
        return found

    def next_use(self, group: str) -> int:
        """The number of the use at which the group is next expected; `_NEVER` where none is."""
        place = self._next_place(group)
        if place is None:
            return _NEVER
        return self.num_uses + (place - self._position) % len(self._known)

    def _next_place(self, group: str) -> int | None:
        places = self._places.get(group)
        if not places:
            return None
        index = bisect_left(places, self._position)
        return places[index] if index < len(places) else places[0]


class LeavingQueue:
    """Chooses the groups that leave, without looking at every group each time.

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
