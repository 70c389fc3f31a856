"""Program: a traced forward or backward as plain data, and what it does to memory.

Steps in order, with the buffers that they read and write. A buffer lives from the step that writes it to the last that reads
it; an output lives to the end. A step's results are there together with all that it reads.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

WRITTEN_INTO = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Kernels that write into a buffer they are given; others bring their results along."""


class Work(enum.Enum):
    """How a step is run, and so whether its result needs a buffer."""

    KERNEL = "kernel"
    """By a kernel of its own, which reads and writes memory: products, attention, convolutions, scatters."""
    POINTWISE = "pointwise"
    """Each element by itself: a compiler can compute it inside of its readers."""
    REDUCTION = "reduction"
    """Fewer elements than it reads: what it reads may be computed on the way, its result is written."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """What a kernel of its own is called with: libraries take memory by the form of their arguments."""

    operator: Any
    """Torch's overload, such as `aten.mm.default`."""
    args: tuple[Any, ...]
    """Tensors are on the meta device."""
    out: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One operator. A view is no step: it is another name of a buffer."""

    name: str
    reads: tuple[str, ...]
    """Buffers that the step reads, each once."""
    writes: tuple[str, ...]
    """Buffers that begin here; none for a step that writes over an argument."""
    work: Work
    turned: frozenset[str] = frozenset()
    """What it reads through a view that cuts or turns it: element by element it cannot be written over."""
    is_heavy: bool = False
    """Whether an element is slow to compute on a processor: exponentials and logarithms."""
    extent: int = 0
    """Elements that its code goes over: of its result, or of what it reduces."""
    over_rows: bool = True
    """For a reduction: whether it sums along the last dimension, as pointwise code next to it runs."""
    operator: str = ""
    """The operator's name without its overload, such as `aten.mm`."""
    call: KernelCall | None = None
    """For those with a kernel of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps in the order they run in."""

    inputs: tuple[str, ...]
    """Buffers that are there before the first step."""
    steps: tuple[Step, ...]
    outputs: frozenset[str]
    """Buffers that must be there after the last step; inputs may be among them."""
    sizes: Mapping[str, int]
    """Bytes of each buffer."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one step does to memory: results begin, then the step runs, then what is not read any more ends."""

    step: Step
    begins: tuple[str, ...]
    """Buffers that are allocated."""
    replaces: Mapping[str, str]
    """Results that are written over a buffer, which ends by that, and over which."""
    ends: tuple[str, ...]
    """Buffers that are given back."""


def unread_inputs(program: Program, kept: Collection[str]) -> tuple[str, ...]:
    """Inputs that are given back before the first step."""
    read = {buffer for step in program.steps for buffer in step.reads}
    return tuple(buffer for buffer in program.inputs if buffer not in read | program.outputs | set(kept))


def effects(
    program: Program, *, kept: Collection[str] = (), donated: Collection[str] | None = None
) -> Iterator[Effect]:
    """The life of a program's buffers, step by step.

    Args:
        program: What runs.
        kept: Inputs that live throughout, also after their last reader: weights, the batch.
        donated: Where given, a pointwise step writes over a buffer that it is the last to read, if both have the same number
            of bytes and the step does not see it turned, as inductor does: over one that the program has made, or over one
            of these inputs.
    """
    last_reads = {buffer: index for index, step in enumerate(program.steps) for buffer in step.reads}
    lasting = program.outputs | set(kept)
    fixed = set(program.inputs) - set(donated or ())
    for index, step in enumerate(program.steps):
        ending = [buffer for buffer in step.reads if last_reads[buffer] == index and buffer not in lasting]
        reusable = [buffer for buffer in ending if buffer not in fixed and buffer not in step.turned]
        replaces = {} if donated is None else _replaced(program, step, reusable)
        unread = [buffer for buffer in step.writes if buffer not in last_reads and buffer not in lasting]
        over = set(replaces.values())
        yield Effect(
            step=step,
            begins=tuple(buffer for buffer in step.writes if buffer not in replaces),
            replaces=replaces,
            ends=tuple(buffer for buffer in (*ending, *unread) if buffer not in over),
        )


def _replaced(program: Program, step: Step, reusable: list[str]) -> dict[str, str]:
    """Results that take the place of a buffer: one buffer serves one result."""
    replaces: dict[str, str] = {}
    for buffer in step.writes if step.work is Work.POINTWISE else ():
        fitting = (old for old in reusable if program.sizes[old] == program.sizes[buffer])
        if (old := next(fitting, None)) is not None:
            reusable.remove(old)
            replaces[buffer] = old
    return replaces


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of live bytes."""

    num_bytes: int
    step: str
    """The first step at which it is reached; "start" where nothing later needs as much as the inputs."""


def find_peak(program: Program, *, kept: Collection[str] = (), donated: Collection[str] | None = None) -> Peak:
    """The peak of a program over all its steps; `kept` and `donated` as for `effects`."""
    alive = sum(program.sizes[buffer] for buffer in program.inputs)
    peak = Peak(alive, "start")
    alive -= sum(program.sizes[buffer] for buffer in unread_inputs(program, kept))
    for effect in effects(program, kept=kept, donated=donated):
        alive += sum(program.sizes[buffer] for buffer in effect.begins)
        if alive > peak.num_bytes:
            peak = Peak(alive, effect.step.name)
        alive -= sum(program.sizes[buffer] for buffer in effect.ends)
    return peak


def with_reuse(program: Program, effects: Iterable[Effect]) -> list[Effect]:
    """The effects of a program where results take the place of dead buffers, as in inductor's memory planning.

    A result takes the place of a buffer of its size that has ended, which is then not given back in between. It is done where
    the step that makes the result follows on the one that read the buffer last, or where the longer life does not raise the
    peak. The peak stays; addresses, and with them fragments, do not.
    """
    planned = list(effects)
    live = _live_bytes(program.sizes, planned)
    peak = max(live, default=0)
    dead: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for index, effect in enumerate(planned):
        replaces = dict(effect.replaces)
        takes_buffers = effect.step.work is not Work.KERNEL or effect.step.operator in WRITTEN_INTO
        for buffer in effect.begins if takes_buffers else ():
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
        begins = tuple(buffer for buffer in effect.begins if buffer not in replaces)
        planned[index] = replace(planned[index], begins=begins, replaces=replaces)
        for buffer in effect.ends:
            if buffer not in program.inputs and program.sizes[buffer]:
                dead[program.sizes[buffer]].append((index, buffer))
    return planned


def _live_bytes(sizes: Mapping[str, int], effects: Iterable[Effect]) -> list[int]:
    """What is alive while each step runs, beyond what was there before the first."""
    alive, found = 0, []
    for effect in effects:
        alive += sum(sizes[buffer] for buffer in effect.begins)
        found.append(alive)
        alive -= sum(sizes[buffer] for buffer in effect.ends)
    return found
