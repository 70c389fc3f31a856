"""The order in which compiled code runs its kernels: of several, the one whose peak inductor takes to be the lowest.

As in inductor's `reorder_for_peak_memory`: the graph's own order, then three others, each compared by a sum of live bytes in
which nothing is written over; the first of those that are equal is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import replace

from lowtide.partition.joining import behind
from lowtide.partition.liveness import find_peak
from lowtide.partition.program import Program, Step


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
        makers = {buffer: index for index, step in enumerate(self.steps) for buffer in step.writes}
        self.before = [sorted({makers[buffer] for buffer in step.reads if buffer in makers}) for step in self.steps]
        self.after: list[list[int]] = [[] for _ in self.steps]
        for index, makers_of in enumerate(self.before):
            for maker in makers_of:
                self.after[maker].append(index)
        self.made = set(makers)

    def counts(self, step: Step) -> list[str]:
        """Of what a step reads, what can end."""
        return [buffer for buffer in step.reads if buffer in self.made or buffer in self.freeable]

    def written(self, step: Step) -> int:
        """Bytes of a step's results."""
        return sum(self.sizes[buffer] for buffer in step.writes)

    def least_peak_first(self) -> list[int]:
        """Greedy: of the steps that stay below the peak so far, the one that leaves the least; else the one of least peak."""
        waiting = [len(before) for before in self.before]
        readers: dict[str, int] = {}
        for step in self.steps:
            for buffer in self.counts(step):
                readers[buffer] = readers.get(buffer, 0) + 1
        for buffer in self.outputs:
            readers[buffer] = readers.get(buffer, 0) + 1
        live = sum(self.sizes[buffer] for buffer in self.freeable)
        results = sum(self.sizes[buffer] for buffer in self.outputs if buffer in self.made | self.freeable)
        highest = max(live, results)
        ready = [index for index, count in enumerate(waiting) if not count]
        order: list[int] = []
        while ready:
            freed = {
                index: sum(self.sizes[b] for b in self.counts(self.steps[index]) if readers[b] == 1) for index in ready
            }
            unread = {
                index: sum(self.sizes[b] for b in self.steps[index].writes if not readers.get(b)) for index in ready
            }
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
        """Of the steps that can run, the one whose makers have run the earliest."""
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
