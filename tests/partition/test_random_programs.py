"""Fusion, joining and reordering over random programs: nothing is read before it is written, and nothing is lost."""

from __future__ import annotations

import random

import pytest

from lowtide.partition.fusion import fuse
from lowtide.partition.joining import join
from lowtide.partition.ordering import reorder
from lowtide.partition.program import Program, Step, Work

KINDS = (Work.KERNEL, Work.POINTWISE, Work.POINTWISE, Work.REDUCTION)
SIZES = (4, 64, 1024)


def random_program(chance: random.Random) -> Program:
    inputs = tuple(f"input {index}" for index in range(chance.randint(1, 4)))
    buffers, steps = list(inputs), []
    for index in range(chance.randint(2, 30)):
        work = chance.choice(KINDS)
        reads = tuple(chance.sample(buffers, min(len(buffers), chance.randint(0, 4))))
        writes = tuple(f"{index}.{part}" for part in range(chance.randint(1, 3) if work is Work.KERNEL else 1))
        turned = frozenset(buffer for buffer in reads if chance.random() < 0.3)
        is_heavy, over_rows = chance.random() < 0.2, chance.random() < 0.8
        extent = chance.choice((8, 8, 64))
        steps.append(
            Step(f"step {index}", reads, writes, work, turned, is_heavy=is_heavy, extent=extent, over_rows=over_rows)
        )
        buffers += writes
    outputs = frozenset(chance.sample(buffers, chance.randint(1, min(5, len(buffers)))))
    return Program(
        inputs=inputs,
        steps=tuple(steps),
        outputs=outputs,
        sizes={buffer: chance.choice(SIZES) for buffer in buffers},
    )


def sources(program: Program) -> dict[str, frozenset[str]]:
    """The inputs that each output is computed from; fails where a step reads what is not there, or writes what is."""
    known = {buffer: frozenset([buffer]) for buffer in program.inputs}
    for step in program.steps:
        found = frozenset[str]().union(*(known[buffer] for buffer in step.reads))
        assert not set(step.writes) & known.keys()
        known |= dict.fromkeys(step.writes, found)
    return {buffer: known[buffer] for buffer in program.outputs}


def kernels(program: Program) -> list[str]:
    return sorted(step.name for step in program.steps if step.work is Work.KERNEL)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_outputs_come_from_the_same_inputs(seed: int, on_host: bool) -> None:
    program = random_program(random.Random(seed))
    fused = fuse(program, on_host=on_host)
    assert sources(fused) == sources(program)
    joined = join(fused)
    for later in (joined, reorder(joined, ())):
        # A joined step reads for all of its results.
        assert all(found >= sources(program)[buffer] for buffer, found in sources(later).items())
        assert kernels(later) == kernels(program)
