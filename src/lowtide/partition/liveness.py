"""The peak of a program: which buffers are alive at each step, and how many bytes they are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.partition.lifetimes import moments, unread_inputs
from lowtide.partition.program import Program


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of live bytes."""

    num_bytes: int
    step: str
    """The first step at which it is reached; "start" where nothing later needs as much as the inputs."""


def find_peak(program: Program, *, kept: Collection[str] = (), donated: Collection[str] | None = None) -> Peak:
    """The peak of a program over all its steps; `kept` and `donated` as for `lifetimes.moments`."""
    alive = sum(program.sizes[buffer] for buffer in program.inputs)
    peak = Peak(alive, "start")
    alive -= sum(program.sizes[buffer] for buffer in unread_inputs(program, kept))
    for moment in moments(program, kept=kept, donated=donated):
        alive += sum(program.sizes[buffer] for buffer in moment.begins)
        if alive > peak.num_bytes:
            peak = Peak(alive, moment.step.name)
        alive -= sum(program.sizes[buffer] for buffer in moment.ends)
    return peak
