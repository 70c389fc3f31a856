"""AccessOrder: in which order groups are used, learnt from the cycle before, so that the next ones can be fetched early.

A cycle is what one training step (or one evaluation call) uses, forward and backward. The first cycle is unknown and
nothing is prefetched in it; from the second on, the order of the one before is expected. A cycle that differs costs
copies that are not used or come late, never a wrong value.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_CYCLE = 100_000
"""Uses after which a cycle ends by itself: a model whose parts are called by themselves never says that one ended."""


class AccessOrder:
    """The order of one kind of cycle.

    Example:
        >>> order = AccessOrder()
        >>> for name in ("a", "b", "b", "a"): order.access(name)
        >>> order.end_cycle()
        >>> order.access("a"); list(order.upcoming(2)), order.distance("a")
        (['b', 'a'], 2)
    """

    def __init__(self) -> None:
        self._known: list[str] = []
        self._places: dict[str, list[int]] = {}
        self._recorded: list[str] = []
        self._position = 0

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
            self._position = (place + 1) % len(self._known)

    def end_cycle(self) -> None:
        """The step is over: what was recorded is expected again."""
        if self._recorded:
            self._known, self._recorded = self._recorded, []
            self._places = {}
            for place, group in enumerate(self._known):
                self._places.setdefault(group, []).append(place)
        self._position = 0

    def forget_cycle(self) -> None:
        """The cycle broke off: it says nothing about the next."""
        self._recorded = []
        self._position = 0

    def upcoming(self, count: int) -> Iterator[str]:
        """The next `count` different groups, the nearest first; across the end of the cycle into the next."""
        seen: set[str] = set()
        for step in range(len(self._known)):
            if len(seen) >= count:
                return
            group = self._known[(self._position + step) % len(self._known)]
            if group not in seen:
                seen.add(group)
                yield group

    def distance(self, group: str) -> int:
        """How many uses away the group's next use is; beyond any known one where none is expected."""
        place = self._next_place(group)
        if place is None:
            return 2 * len(self._known) + 1
        return (place - self._position) % len(self._known)

    def _next_place(self, group: str) -> int | None:
        places = self._places.get(group)
        if not places:
            return None
        return next((place for place in places if place >= self._position), places[0])
