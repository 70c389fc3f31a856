"""When the buffers of a program begin and end.

A buffer lives from the step that writes it to the last that reads it; an output lives to the end. A step's results are there
together with all that it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from lowtide.partition.program import Program, Step, Work


@dataclass(frozen=True, slots=True)
class Moment:
    """What one step does to memory: results begin, then the step runs, then what nobody reads any more ends."""

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


def moments(
    program: Program, *, kept: Collection[str] = (), donated: Collection[str] | None = None
) -> Iterator[Moment]:
    """The life of a program's buffers, step by step.

    Args:
        program: What runs.
        kept: Inputs that live throughout, whoever reads them last: weights, the batch.
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
        yield Moment(
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
