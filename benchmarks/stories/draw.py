"""Draw: random choices that are the same in every version of Python.

Of the standard library's generator only what is promised never to change is used: the sequence of `random()` that an
integer seed gives. Weights are sums of quotients, which every machine rounds alike; logarithms would not be.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ranked(Generic[T_co]):
    """Choices whose share falls with their place, as the words of a language do: 1 / (place + `flatness`)."""

    __slots__ = ("_cumulative", "_last", "_total", "items")

    def __init__(self, items: Sequence[T_co], *, flatness: float) -> None:
        assert items, "there must be something to choose from"
        self.items = tuple(items)
        self._cumulative = tuple(accumulate(1.0 / (place + flatness) for place in range(1, len(self.items) + 1)))
        self._total = self._cumulative[-1]
        self._last = len(self.items) - 1

    def at(self, uniform: float) -> T_co:
        """The item at a number from 0 up to, not including, 1."""
        return self.items[bisect(self._cumulative, uniform * self._total, 0, self._last)]


@dataclass(frozen=True, slots=True, init=False)
class Draw:
    """A sequence of choices that one seed gives."""

    _random: random.Random

    def __init__(self, seed: int) -> None:
        object.__setattr__(self, "_random", random.Random(seed))

    def uniform(self) -> float:
        """From 0 up to, not including, 1."""
        return self._random.random()

    def chance(self, share: float) -> bool:
        """True that often."""
        return self._random.random() < share

    def between(self, first: int, last: int) -> int:
        """One of the whole numbers from `first` to `last`, both included."""
        return first + int(self._random.random() * (last - first + 1))

    def one_of(self, items: Sequence[T]) -> T:
        """Each equally often."""
        return items[int(self._random.random() * len(items))]

    def ranked(self, choices: Ranked[T]) -> T:
        """Earlier ones more often."""
        return choices.at(self._random.random())

    def several(self, choices: Ranked[T], count: int) -> list[T]:
        """Different ones, earlier ones more often."""
        assert count <= len(choices.items), "there must be enough of them"
        found: list[T] = []
        while len(found) < count:
            item = choices.at(self._random.random())
            if item not in found:
                found.append(item)
        return found

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All of them, in any order."""
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.between(0, last)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed
