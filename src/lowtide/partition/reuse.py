"""Reuse of dead buffers, as in inductor's memory planning: a result takes the place of a buffer of its size that has ended.

The buffer is then not given back in between. It is done where the step that makes the result follows on the one that read the
buffer last, or where the longer life does not raise the peak. The peak stays; addresses, and with them fragments, do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from lowtide.partition.lifetimes import Moment
from lowtide.partition.program import Program, Step, Work

WRITTEN_INTO = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Kernels that write into a buffer they are given; others bring their results along."""


def with_reuse(program: Program, moments: Iterable[Moment]) -> list[Moment]:
    """The moments of a program where results take the place of dead buffers."""
    planned = list(moments)
    live = _live_bytes(program.sizes, planned)
    peak = max(live, default=0)
    dead: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for index, moment in enumerate(planned):
        replaces = dict(moment.replaces)
        for buffer in moment.begins if _takes_buffers(moment.step) else ():
            size = program.sizes[buffer]
            if not dead[size]:
                continue
            ended, old = dead[size][-1]
            between = slice(ended + 1, index)
            if ended + 1 != index and size + max(live[between]) > peak:
                continue
            dead[size].pop()
            live[between] = [num_bytes + size for num_bytes in live[between]]
            earlier = planned[ended]
            planned[ended] = replace(earlier, ends=tuple(name for name in earlier.ends if name != old))
            replaces[buffer] = old
        begins = tuple(buffer for buffer in moment.begins if buffer not in replaces)
        planned[index] = replace(planned[index], begins=begins, replaces=replaces)
        for buffer in moment.ends:
            if buffer not in program.inputs and program.sizes[buffer]:
                dead[program.sizes[buffer]].append((index, buffer))
    return planned


def _takes_buffers(step: Step) -> bool:
    return step.work is not Work.KERNEL or step.operator in WRITTEN_INTO


def _live_bytes(sizes: Mapping[str, int], moments: Iterable[Moment]) -> list[int]:
    """What is alive while each step runs, beyond what was there before the first."""
    alive, found = 0, []
    for moment in moments:
        alive += sum(sizes[buffer] for buffer in moment.begins)
        found.append(alive)
        alive -= sum(sizes[buffer] for buffer in moment.ends)
    return found
