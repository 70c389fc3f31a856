"""What compiled code does with a traced program: fuse, join, reorder, in a simple form of inductor's.

Note [Fusion]
A pointwise result is not written, and computed again by its readers, unless

- it is an output: a saved tensor, a gradient, the loss;
- a step with a kernel of its own reads it: a product, attention. It is written when that step comes, however early it was
  there: readers before it have computed it inside, readers after it read what is written. On the host it is written at
  once, which is nearer to the peaks that were measured there;
- computing it inside of its readers would have them read too much: more than four written buffers where there are several
  readers, more than eight where there is one (inductor's `realize_reads_threshold` and `realize_acc_reads_threshold`);
- on the host, it has several readers and takes an exponential or a logarithm, which a processor is slow at.

What an unwritten result is computed from lives on until its last reader has run. Reductions are always written; their
results are small. Left out of the model: inductor writes a result whose formula has over 30 operations, joins kernels that
read the same buffers and then drops what only they exchange, and chooses among several orders the one of the least peak.

Note [Joining]
Kernels of fused code that read the same buffers become one. It writes all of its results at a time, so that results exist
earlier than the graph would make them, and what they are computed from ends earlier. Pairs are joined by the bytes that
they share, the most first, where

- both go over as many elements, and reduce alike: along rows, which pointwise code can follow, or along columns;
- not each of them is the only reader of a result of one size, which it could have given back or written over by itself,
  unless they share a good part of what that is;
- nothing that one of them needs waits for the other by way of a third.

Left out of the model: limits on the size of a kernel, loops in another order, reductions along rows and columns in one kernel.

Note [Order]
As in inductor's `reorder_for_peak_memory`: the graph's own order, then three others, each compared by a sum of live bytes in
which nothing is written over; the first of those that are equal is taken.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lowtide.tracing.compiled.program import Program, Step, Work, find_peak

MAX_READS_OF_SEVERAL = 4
"""Written buffers that a result with several readers may be computed from, in each of them."""
MAX_READS_OF_ONE = 8
"""Written buffers that a result with one reader may be computed from, in it."""
MAX_ROUNDS = 10
"""Most rounds of joining kernels, as in inductor."""
MAX_DISTANCE = 64
"""Steps between two that are joined for what both read; beyond, what lies between would have to wait for too long."""
LOST_PER_SHARED = 32
"""Elements that two kernels may forgo to write over, for each byte that both read: inductor's, which calls it arbitrary."""


def schedule(program: Program, *, freeable: Collection[str] = ()) -> Program:
    """The program as code compiled for a device would run it.

    Args:
        program: As it was traced.
        freeable: Inputs that end with their last reader: what a forward has saved for its backward.
    """
    return reorder(join(fuse(program)), freeable)


def fuse(program: Program, *, on_host: bool = False) -> Program:
    """The program without the results that are never written, its steps reading what those were computed from.

    Args:
        program: As it was traced.
        on_host: It is compiled for a processor, not for a device.
    """
    num_readers = Counter(buffer for step in program.steps for buffer in step.reads)
    read_by_kernels = {buffer for step in program.steps if step.work is Work.KERNEL for buffer in step.reads}
    written = program.outputs | read_by_kernels if on_host else program.outputs
    unwritten: dict[str, Step] = {}
    steps = []
    for step in program.steps:
        if step.work is Work.KERNEL:
            steps += [unwritten.pop(buffer) for buffer in step.reads if buffer in unwritten]
        fused = _with_sources(step, unwritten)
        several = num_readers[step.writes[0]] > 1 if step.writes else False
        if _is_unwritten(fused, written, several=several) and not (on_host and several and fused.is_heavy):
            unwritten[step.writes[0]] = fused
        else:
            steps.append(fused)
    return replace(program, steps=tuple(steps))


def _with_sources(step: Step, unwritten: dict[str, Step]) -> Step:
    """The step, reading what unwritten results are computed from in their place."""
    reads: list[str] = []
    turned: set[str] = set()
    for buffer in step.reads:
        source = unwritten.get(buffer)
        seen = (buffer,) if source is None else source.reads
        reads += seen
        turned |= set(seen) if buffer in step.turned else source.turned if source is not None else set()
    is_heavy = step.is_heavy or any(unwritten[buffer].is_heavy for buffer in step.reads if buffer in unwritten)
    return replace(step, reads=tuple(dict.fromkeys(reads)), turned=frozenset(turned), is_heavy=is_heavy)


def _is_unwritten(step: Step, written: frozenset[str], *, several: bool) -> bool:
    if step.work is not Work.POINTWISE or len(step.writes) != 1 or step.writes[0] in written:
        return False
    return len(step.reads) <= (MAX_READS_OF_SEVERAL if several else MAX_READS_OF_ONE)


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
    return [given[index] for index in behind(range(len(given)), _makers(given))]


def _makers(steps: Sequence[Step]) -> list[list[int]]:
    """For each step the numbers of those that make what it reads, in the order of its reads."""
    makers = {buffer: index for index, step in enumerate(steps) for buffer in step.writes}
    return [[makers[buffer] for buffer in step.reads if buffer in makers] for step in steps]


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
    # Results that one step alone reads; parts of a kernel's several results do not count.
    num_readers = Counter(buffer for step in steps for buffer in step.reads)
    single = {buffer for step in steps if step.call is None or len(step.writes) == 1 for buffer in step.writes}
    single = {buffer for buffer in single if num_readers[buffer] == 1}
    alone = [{program.sizes[buffer] for buffer in step.reads if buffer in single} for step in steps]
    pairs = []
    for (first, one), (second, other) in itertools.combinations(enumerate(steps), 2):
        if Work.KERNEL in (one.work, other.work) or (one.extent, one.over_rows) != (other.extent, other.over_rows):
            continue
        # One that reads what the other makes is never too far.
        if second - first > MAX_DISTANCE and not set(one.writes) & set(other.reads):
            continue
        common = {*one.reads, *one.writes} & {*other.reads, *other.writes}
        shared = sum(program.sizes[buffer] for buffer in common)
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


class _Order:
    """Which steps must run before which, by name. Sets are bits of a number: a whole model has thousands of steps."""

    def __init__(self, steps: Iterable[Step]) -> None:
        ordered = in_order(steps)
        self._numbers = {step.name: index for index, step in enumerate(ordered)}
        makers = _makers(ordered)
        self._before, self._after = [0] * len(ordered), [0] * len(ordered)
        for index, makers_of in enumerate(makers):
            for maker in makers_of:
                self._before[index] |= self._before[maker] | 1 << maker
        for index, makers_of in reversed(list(enumerate(makers))):
            for maker in makers_of:
                self._after[maker] |= self._after[index] | 1 << index

    def is_free(self, one: str, other: str) -> bool:
        """Whether no third step needs one of the two and is needed by the other."""
        first, second = self._numbers[one], self._numbers[other]
        return not (self._after[first] & self._before[second] or self._after[second] & self._before[first])


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


def reorder(program: Program, freeable: Collection[str]) -> Program:
    """The program in the order that the compiler would choose.

    Args:
        program: After fusion and joining.
        freeable: Inputs that end with their last reader: what a forward has saved for its backward.
    """
    kept = [buffer for buffer in program.inputs if buffer not in freeable]
    graph = _Graph(program, freeable)
    orders: list[Callable[[], list[int]]] = [graph.least_peak_first, graph.breadth_first, graph.depth_first]
    candidates = [program]
    candidates += [replace(program, steps=tuple(program.steps[index] for index in order())) for order in orders]
    return min(candidates, key=lambda candidate: find_peak(candidate, kept=kept).num_bytes)


class _Graph:
    """The steps by number, and who waits for whom."""

    def __init__(self, program: Program, freeable: Collection[str]) -> None:
        self.steps, self.sizes = program.steps, program.sizes
        self.outputs = program.outputs
        self.freeable = set(freeable)
        self.made = {buffer for step in self.steps for buffer in step.writes}
        self.before = [sorted(set(makers)) for makers in _makers(self.steps)]
        self.after: list[list[int]] = [[] for _ in self.steps]
        for index, makers_of in enumerate(self.before):
            for maker in makers_of:
                self.after[maker].append(index)

    def counts(self, step: Step) -> list[str]:
        """What a step reads that can end."""
        return [buffer for buffer in step.reads if buffer in self.made or buffer in self.freeable]

    def written(self, step: Step) -> int:
        """Bytes of a step's results."""
        return sum(self.sizes[buffer] for buffer in step.writes)

    def least_peak_first(self) -> list[int]:
        """Greedy: the step that leaves the least of those that stay below the peak so far; else the one of least peak."""
        waiting = [len(before) for before in self.before]
        readers = Counter(buffer for step in self.steps for buffer in self.counts(step))
        readers.update(self.outputs)
        live = sum(self.sizes[buffer] for buffer in self.freeable)
        results = sum(self.sizes[buffer] for buffer in self.outputs if buffer in self.made | self.freeable)
        highest = max(live, results)
        ready = [index for index, count in enumerate(waiting) if not count]
        order: list[int] = []
        while ready:
            freed = {
                index: sum(self.sizes[b] for b in self.counts(self.steps[index]) if readers[b] == 1) for index in ready
            }
            unread = {index: sum(self.sizes[b] for b in self.steps[index].writes if not readers[b]) for index in ready}
            below = [index for index in ready if live + self.written(self.steps[index]) <= highest]
            if below:
                chosen = min(below, key=lambda i: self.written(self.steps[i]) - freed[i] - unread[i])
            else:
                chosen = min(ready, key=lambda i: self.written(self.steps[i]))
            live += self.written(self.steps[chosen])
            highest = max(highest, live)
            live -= freed[chosen] + unread[chosen]
            for buffer in self.counts(self.steps[chosen]):
                readers[buffer] -= 1
            ready.remove(chosen)
            order.append(chosen)
            for follower in self.after[chosen]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        return order

    def breadth_first(self) -> list[int]:
        """First the steps whose makers have run the earliest."""
        waiting = [len(before) for before in self.before]
        ran: dict[int, int] = {}
        ready: list[tuple[list[int], int]] = [([], index) for index, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        while ready:
            _, chosen = heapq.heappop(ready)
            ran[chosen] = len(ran)
            for follower in self.after[chosen]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (sorted(ran[maker] for maker in self.before[follower]), follower))
        return list(ran)

    def depth_first(self) -> list[int]:
        """The steps that touch the fewest bytes first, each behind its makers."""
        touched = [self.written(step) + sum(self.sizes[buffer] for buffer in self.counts(step)) for step in self.steps]
        smallest = sorted(range(len(self.steps)), key=lambda index: (touched[index], index))
        before = [sorted(makers, key=lambda index: (touched[index], index)) for makers in self.before]
        return behind(smallest, before)
