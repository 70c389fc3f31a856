"""A second allocator, written to be plainly right rather than fast, for the fast one to be compared with.

It knows no blocks and no pools: only who uses which bytes. What is free is worked out anew from that at every request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

KiB, MiB = 1024, 1024**2


@dataclass
class Line:
    """One stretch of addresses: a segment, or the address space of an expandable one."""

    start: int
    size: int
    is_small: bool
    stream: int
    used: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Handle: first byte and number of bytes."""
    mapped: set[int] = field(default_factory=set)
    """Pages with memory behind them, by number; expandable only."""

    def holes(self) -> list[tuple[int, int]]:
        """(first byte, size) of all that is not in use."""
        cursor, holes = self.start, []
        for first, size in sorted(self.used.values()):
            if first > cursor:
                holes.append((cursor, first - cursor))
            cursor = first + size
        if cursor < self.start + self.size:
            holes.append((cursor, self.start + self.size - cursor))
        return holes


class NaiveAllocator:
    """Default mode: segments never grow."""

    def __init__(self, capacity: int | None = None, max_split: int | None = None) -> None:
        self.capacity = capacity
        self.max_split = max_split if max_split is not None else 2**60
        self.lines: list[Line] = []
        self.top = 2 * MiB

    @property
    def allocated(self) -> int:
        return sum(size for line in self.lines for _, size in line.used.values())

    @property
    def reserved(self) -> int:
        return sum(line.size for line in self.lines)

    def malloc(self, handle: int, requested: int, stream: int = 0) -> bool:
        """False when the memory is full."""
        if requested == 0:
            return True
        need = (requested + 511) // 512 * 512
        is_small = need <= MiB
        fits = [
            (size, first, line)
            for line in self.lines
            if line.is_small == is_small and line.stream == stream
            for first, size in line.holes()
            if size >= need
        ]
        best = min(fits, key=lambda fit: fit[:2], default=None)
        if best is not None and best[0] >= self.max_split and (need < self.max_split or best[0] >= need + 20 * MiB):
            best = None
        if best is None:
            if is_small:
                segment = 2 * MiB
            elif need < 10 * MiB:
                segment = 20 * MiB
            else:
                segment = (need + 2 * MiB - 1) // (2 * MiB) * 2 * MiB
            if not self._make_room(segment, need, is_small, stream):
                return False
            line = Line(self.top, segment, is_small, stream)
            self.top += segment
            self.lines.append(line)
            best = (segment, line.start, line)
        size, first, line = best
        rest = size - need
        is_split = rest >= 512 if is_small else need < self.max_split and rest > MiB
        line.used[handle] = (first, need if is_split else size)
        return True

    def free(self, handle: int) -> None:
        for line in self.lines:
            line.used.pop(handle, None)

    def _make_room(self, segment: int, need: int, is_small: bool, stream: int) -> bool:
        if self.capacity is None or self.reserved + segment <= self.capacity:
            return True
        if self.max_split < 2**60:
            mine = [
                line for line in self.lines if not line.used and line.is_small == is_small and line.stream == stream
            ]
            oversize = sorted(
                (line for line in mine if line.size >= self.max_split), key=lambda line: (line.size, line.start)
            )
            enough = [line for line in oversize if line.size >= max(need, self.max_split)]
            if enough:
                self.lines.remove(enough[0])
            released = 0
            while not enough and oversize and released < max(need, self.max_split):
                released += oversize[-1].size
                self.lines.remove(oversize.pop())
            if (enough or released >= max(need, self.max_split)) and self.reserved + segment <= self.capacity:
                return True
        self.lines = [line for line in self.lines if line.used]
        return self.reserved + segment <= self.capacity


class NaiveExpandable(NaiveAllocator):
    """Expandable mode: each line is address space, and pages of it have memory behind them."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.top = 0
        memory = capacity if capacity is not None else 4 * 1024 * 1024 * MiB
        self.address_space = memory + memory // 8

    @property
    def reserved(self) -> int:
        return sum(len(line.mapped) * self._page(line.is_small) for line in self.lines)

    def malloc(self, handle: int, requested: int, stream: int = 0) -> bool:
        if requested == 0:
            return True
        need = (requested + 511) // 512 * 512
        is_small = need <= MiB
        chosen = self._choose(need, is_small, stream)
        if chosen is None:
            chosen = self._grow(need, is_small, stream)
        if chosen is None:
            for line in self.lines:
                line.mapped = {page for page in line.mapped if self._is_touched(line, page)}
            self.lines = [line for line in self.lines if line.mapped]
            chosen = self._grow(need, is_small, stream)
        if chosen is None:
            return False
        line, first = chosen
        line.used[handle] = (first, need)
        return True

    def _page(self, is_small: bool) -> int:
        return 2 * MiB if is_small else 20 * MiB

    def _is_touched(self, line: Line, page: int) -> bool:
        size = self._page(line.is_small)
        return any(first < (page + 1) * size and page * size < first + length for first, length in line.used.values())

    def _pieces(self, line: Line) -> list[tuple[int, int, bool]]:
        """What is not in use, cut where memory begins or ends: (first byte, size, whether there is memory)."""
        page = self._page(line.is_small)
        edges = {line.start, line.start + line.size}
        for number in line.mapped:
            edges |= {
                edge * page for edge in (number, number + 1) if (edge - 1 in line.mapped) != (edge in line.mapped)
            }
        pieces = []
        for first, size in line.holes():
            cuts = [first, *sorted(edge for edge in edges if first < edge < first + size), first + size]
            for low, high in itertools.pairwise(cuts):
                pieces.append((low, high - low, low // page in line.mapped))
        return pieces

    def _choose(self, need: int, is_small: bool, stream: int) -> tuple[Line, int] | None:
        fits = []
        for line in self.lines:
            if line.is_small != is_small or line.stream != stream:
                continue
            pieces = self._pieces(line)
            bare = {first: size for first, size, has_memory in pieces if not has_memory}
            for first, size, has_memory in pieces:
                if has_memory and size >= need:
                    fits.append((size, first, size + bare.get(first + size, 0), line))
        fits.sort(key=lambda fit: fit[:2])
        while len(fits) > 1 and fits[1][2] < fits[0][2]:
            fits.pop(0)
        return (fits[0][3], fits[0][1]) if fits else None

    def _grow(self, need: int, is_small: bool, stream: int) -> tuple[Line, int] | None:
        page = self._page(is_small)
        for line in sorted(self.lines, key=lambda line: line.start):
            if line.is_small != is_small or line.stream != stream:
                continue
            for hole, size in line.holes():
                # Growth starts at bare pages, or at the free piece right before them, and may run on to the hole's end.
                inside = [piece for piece in self._pieces(line) if hole <= piece[0] < hole + size]
                for index, (first, _, has_memory) in enumerate(inside):
                    if has_memory:
                        continue
                    start = inside[index - 1][0] if index else first
                    if hole + size - start >= need:
                        return (line, start) if self._map(line, start, need, page) else None
        space = -(-max(self.address_space, need) // page) * page
        line = Line((self.top // page + 1) * page, space, is_small, stream)
        self.top = line.start + space
        self.lines.append(line)
        return (line, line.start) if self._map(line, line.start, need, page) else None

    def _map(self, line: Line, start: int, need: int, page: int) -> bool:
        missing = [number for number in range(start // page, -(-(start + need) // page)) if number not in line.mapped]
        # Each run of bare pages is mapped in one go or not at all; runs before one that fails stay mapped.
        while missing:
            run = [missing.pop(0)]
            while missing and missing[0] == run[-1] + 1:
                run.append(missing.pop(0))
            if self.capacity is not None and self.reserved + len(run) * page > self.capacity:
                return False
            line.mapped |= set(run)
        return True
