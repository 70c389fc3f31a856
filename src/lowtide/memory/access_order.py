"""AccessOrder: in which order groups are used, learnt from the cycle before, so that the next ones can be fetched early.

A cycle is what one training step (or one evaluation call) uses, forward and backward. The first cycle is unknown and
nothing is prefetched in it; from the second on, the order of the one before is expected. A cycle that differs costs
copies that are not used or come late, never a wrong value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

MAX_CYCLE = 100_000
"""Uses after which a cycle ends by itself: a model whose parts are called by themselves never says that one ended."""

NEVER = 1 << 62
"""The next use of a group that the known cycle does not use: later than any other."""


class AccessOrder:
    """The order of one kind of cycle.

    Example:
        >>> order = AccessOrder()
        >>> for name in ("a", "b", "b", "a"): order.access(name)
        >>> order.end_cycle()
        >>> order.access("a"); list(order.upcoming(2)), order.next_use("b"), order.next_use("a")
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

    def upcoming(self, count: int) -> Iterator[str]:
        """The next `count` different groups, the nearest first; across the end of the cycle into the next."""
        count = min(count, len(self._places))
        seen: set[str] = set()
        for step in range(len(self._known)):
            if len(seen) >= count:
                return
            group = self._known[(self._position + step) % len(self._known)]
            if group not in seen:
                seen.add(group)
                yield group

    def next_use(self, group: str) -> int:
        """The number of the use at which the group is next expected; `NEVER` where none is."""
        place = self._next_place(group)
        if place is None:
            return NEVER
        return self.num_uses + (place - self._position) % len(self._known)

    def _next_place(self, group: str) -> int | None:
        places = self._places.get(group)
        if not places:
            return None
        index = bisect_left(places, self._position)
        return places[index] if index < len(places) else places[0]
