"""Fusion, in a simple form of inductor's: which results are never written, because whoever reads them computes them.

A pointwise result is not written unless

- it is an output: a saved tensor, a gradient, the loss;
- a step with a kernel of its own reads it: a product, attention. It is written when that step comes, however early it was
  there: who reads it before has computed it inside, who reads it after reads what is written. On the host it is written at
  once, which is nearer to the peaks that were measured there;
- computing it inside of its readers would have them read too much: more than four written buffers where there are several
  readers, more than eight where there is one (inductor's `realize_reads_threshold` and `realize_acc_reads_threshold`);
- on the host, it has several readers and takes an exponential or a logarithm, which a processor is slow at.

What an unwritten result is computed from lives on until its last reader has run. Reductions are always written; their
results are small. Left out of the model: inductor writes a result whose formula has over 30 operations, joins kernels that
read the same buffers and then drops what only they exchange, and chooses among several orders the one of the least peak.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lowtide.partition.program import Program, Step, Work

MAX_READS_OF_SEVERAL = 4
"""Written buffers that a result with several readers may be computed from, in each of them."""
MAX_READS_OF_ONE = 8
"""Written buffers that a result with one reader may be computed from, in it."""


def fuse(program: Program, *, on_host: bool = False) -> Program:
    """The program without the results that are never written, its steps reading what those were computed from.

    Args:
        program: As it was traced.
        on_host: It is compiled for a processor, not for a card.
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
