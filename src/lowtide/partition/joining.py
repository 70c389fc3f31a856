"""Joining, in a simple form of inductor's: kernels of fused code that read the same buffers become one.

One kernel writes all of its results at a time, so that results exist earlier than the graph would make them, and what they
are computed from ends earlier. Pairs are joined by the bytes that they share, the most first, where

- both go over as many elements, and reduce alike: along rows, which pointwise code can follow, or along columns;
- not each of them is alone in reading a result of one size, which it could have given back or written over by itself, unless they
  share a good part of what that is;
- nothing that one of them needs waits for the other by way of a third.

Left out of the model: limits on the size of a kernel, loops in another order, reductions along rows and columns in one kernel.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lowtide.partition.program import Program, Step, Work

MAX_ROUNDS = 10
"""As in inductor."""
MAX_DISTANCE = 64
"""Steps between two that are joined for what both read; beyond, what lies between would have to wait for too long."""
LOST_PER_SHARED = 32
"""Elements that two kernels may forgo to write over, for each byte that both read: inductor's, which calls it arbitrary."""


def join(program: Program) -> Program:
    """The program with kernels joined, in an order that is possible."""
    steps = list(program.steps)
    for _ in range(MAX_ROUNDS):
        joined = _joined_once(program, steps)
        if len(joined) == len(steps):
            break
        steps = joined
    return replace(program, steps=tuple(steps))


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Steps in the order in which they are given, each behind those that make what it reads."""
    given = list(steps)
    makers = {buffer: index for index, step in enumerate(given) for buffer in step.writes}
    before = [[makers[buffer] for buffer in step.reads if buffer in makers] for step in given]
    return [given[index] for index in behind(range(len(given)), before)]


def behind(order: Iterable[int], before: Sequence[Iterable[int]]) -> list[int]:
    """Numbers in an order, each behind those that must come before it, which are taken in their own order."""
    placed: dict[int, None] = {}
    # No recursion: a chain may be longer than Python's stack.
    waiting = list(order)[::-1]
    while waiting:
        missing = [] if waiting[-1] in placed else [index for index in before[waiting[-1]] if index not in placed]
        if missing:
            waiting += reversed(missing)
        else:
            placed[waiting.pop()] = None
    return list(placed)


def _joined_once(program: Program, steps: Sequence[Step]) -> list[Step]:
    """Every step joined with at most one other."""
    alone = _read_alone(program, steps)
    pairs = []
    for (first, one), (second, other) in itertools.combinations(enumerate(steps), 2):
        if not _go_together(one, other):
            continue
        # One that reads what the other makes is never too far.
        if second - first > MAX_DISTANCE and not set(one.writes) & set(other.reads):
            continue
        shared = _shared_bytes(program, one, other)
        if shared and not (alone[first] & alone[second] and one.extent > LOST_PER_SHARED * shared):
            pairs.append((-shared, second - first, first, second))
    left = dict(enumerate(steps))
    order = _Order(steps)
    joined: set[int] = set()
    for *_, first, second in sorted(pairs):
        if first in joined or second in joined or not order.is_free(steps[first].name, steps[second].name):
            continue
        joined |= {first, second}
        left[first] = _merged(program, left, first, second)
        del left[second]
        # With every pair the graph becomes another.
        order = _Order(left.values())
    return in_order(left.values())


def _go_together(one: Step, other: Step) -> bool:
    if Work.KERNEL in (one.work, other.work) or one.extent != other.extent:
        return False
    return one.over_rows == other.over_rows


def _shared_bytes(program: Program, one: Step, other: Step) -> int:
    common = (set(one.reads) | set(one.writes)) & (set(other.reads) | set(other.writes))
    return sum(program.sizes[buffer] for buffer in common)


def _read_alone(program: Program, steps: Sequence[Step]) -> list[set[int]]:
    """For each step the sizes of results that no other step reads; parts of a kernel's several results do not count."""
    num_readers = Counter(buffer for step in steps for buffer in step.reads)
    single = {buffer for step in steps if step.call is None or len(step.writes) == 1 for buffer in step.writes}
    return [
        {program.sizes[buffer] for buffer in step.reads if buffer in single and num_readers[buffer] == 1}
        for step in steps
    ]


class _Order:
    """Which steps must run before which, by name. Sets are bits of a number: a whole model has thousands of steps."""

    def __init__(self, steps: Iterable[Step]) -> None:
        ordered = in_order(steps)
        self._bits = {step.name: 1 << index for index, step in enumerate(ordered)}
        makers = {buffer: step.name for step in ordered for buffer in step.writes}
        before = {step.name: {makers[buffer] for buffer in step.reads if buffer in makers} for step in ordered}
        self._before, self._after = dict.fromkeys(self._bits, 0), dict.fromkeys(self._bits, 0)
        for step in ordered:
            for name in before[step.name]:
                self._before[step.name] |= self._before[name] | self._bits[name]
        for step in reversed(ordered):
            for name in before[step.name]:
                self._after[name] |= self._after[step.name] | self._bits[step.name]

    def is_free(self, one: str, other: str) -> bool:
        """Whether no third step needs one of the two and is needed by the other."""
        return not (self._after[one] & self._before[other] or self._after[other] & self._before[one])


def _merged(program: Program, steps: Mapping[int, Step], first: int, second: int) -> Step:
    one, other = steps[first], steps[second]
    made = {*one.writes, *other.writes}
    others = (step for index, step in steps.items() if index not in (first, second))
    needed = program.outputs.union(*(step.reads for step in others))
    return replace(
        other,
        name=one.name,
        reads=tuple(buffer for buffer in dict.fromkeys((*one.reads, *other.reads)) if buffer not in made),
        # What only the two exchange is never written.
        writes=tuple(buffer for buffer in (*one.writes, *other.writes) if buffer in needed),
        work=Work.REDUCTION if Work.REDUCTION in (one.work, other.work) else Work.POINTWISE,
        # What both read cannot be written over by what one of them makes.
        turned=one.turned | other.turned | (frozenset(one.reads) & frozenset(other.reads)),
    )
