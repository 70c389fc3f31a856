"""The peak of a program: which buffers are alive at each step, and how many bytes they are.

A buffer lives from the step that writes it to the last that reads it; an output lives to the end. A step's results are there
together with all that it reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.lab.budget.program import Program, Step, Work


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of live bytes."""

    num_bytes: int
    step: str
    """The first step at which it is reached; "start" where nothing later needs as much as the inputs."""


def find_peak(program: Program, *, kept: Collection[str] = (), donated: Collection[str] | None = None) -> Peak:
    """The peak of a program over all its steps.

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
    alive = sum(program.sizes[buffer] for buffer in program.inputs)
    peak = Peak(alive, "start")
    # What nobody reads is given back at once: inputs before the first step, results after the step that makes them.
    alive -= sum(program.sizes[b] for b in program.inputs if b not in last_reads and b not in lasting)
    for index, step in enumerate(program.steps):
        ending = [buffer for buffer in step.reads if last_reads[buffer] == index and buffer not in lasting]
        written = sum(program.sizes[buffer] for buffer in step.writes)
        reusable = [buffer for buffer in ending if buffer not in fixed and buffer not in step.turned]
        reused = 0 if donated is None else _reused_bytes(program, step, reusable)
        if alive + written - reused > peak.num_bytes:
            peak = Peak(alive + written - reused, step.name)
        unread = [buffer for buffer in step.writes if buffer not in last_reads and buffer not in lasting]
        alive += written - sum(program.sizes[buffer] for buffer in (*ending, *unread))
    return peak


def _reused_bytes(program: Program, step: Step, reusable: list[str]) -> int:
    """Bytes of results that take the place of a buffer: one buffer serves one result."""
    if step.work is not Work.POINTWISE:
        return 0
    free = [program.sizes[buffer] for buffer in reusable]
    reused = 0
    for buffer in step.writes:
        size = program.sizes[buffer]
        if size in free:
            free.remove(size)
            reused += size
    return reused
