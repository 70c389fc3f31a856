"""Trace identical layers once: the calls of most blocks of a run are replaced by one node each, and written out afterwards.

Of a run of N blocks that are alike, blocks 0, 1, N-3, N-2 and N-1 run for real, with all that the model's own code does around
them. Between them a call becomes a node that makes the block's output, its input's gradient and its weights' gradients,
and marks its place in the record; `unroll` fills in what the block in N-2 did there. The replacement is believed only when
blocks 1, N-3 and N-2 left exactly the same record, up to their names, and when every tensor that crosses a block's border
was seen to die where that record says. Anything else raises `CannotRepeatError`, and the step is traced in full.

Note [Where a backward begins]: autograd runs the nodes of one thread in the reverse order of their creation. Blocks that
create their nodes without a gap between them therefore run their backwards one after the other, each from its last node
on, and a hook there splits the record exactly.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.tracing import block_signature
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.number_watch import NumberWatch
from lowtide.tracing.recorder import Recorder
from lowtide.tracing.repeat_calls import CannotRepeatError
from lowtide.tracing.repeat_run import Run
from lowtide.tracing.segment_words import Window, agree
from lowtide.tracing.step_trace import Phase
from lowtide.tracing.unroll import unroll

SHORTEST_RUN = 7
"""Five blocks of a run are traced for real; below two more there is nothing to win."""


class RepeatedBlocks:
    """Watches the calls of a model's repeated blocks, and replaces most of them. A context manager around the steps."""

    def __init__(self, model: nn.Module, mode: GhostMode, *, is_on: bool = True) -> None:
        self.mode = mode
        self.windows: list[Window] = []
        """The replaced calls' places in the record, in order of time."""
        self._members: dict[int, tuple[Run, int]] = {}
        self._originals: dict[type[nn.Module], Callable[..., Any] | None] = {}
        self._runs: list[Run] = []
        self._watch = NumberWatch()
        uses = _num_uses(model)
        for blocks in block_signature.equal_runs(model, SHORTEST_RUN) if is_on else ():
            if all(_num_uses(block).items() <= uses.items() for _, block in blocks):  # no weight is shared
                run = Run(blocks, mode, self.windows, self._watch)
                self._runs.append(run)
                self._watch.add(block_signature.own_numbers(blocks[1][1], blocks[2][1]))
                self._members |= {id(block): (run, rank) for rank, (_, block) in enumerate(blocks)}

    def __enter__(self) -> None:
        for kind in {type(block) for run in self._runs for block in run.blocks}:
            self._originals[kind] = vars(kind).get("__call__")
            kind.__call__ = self._wrap(kind.__call__)  # type: ignore[method-assign]
        self._watch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()
        for kind, original in self._originals.items():
            if original is None:
                del kind.__call__
            else:
                kind.__call__ = original  # type: ignore[method-assign]
        self._originals.clear()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # A class and not the instance, because `block(...)` looks there; it must be the outermost layer: Hugging Face's
        # blocks checkpoint themselves in a `__call__` of their own.
        @functools.wraps(original)
        def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            member = self._members.get(id(block))
            if member is None or self.mode.recorder.phase is not Phase.FORWARD:
                return original(block, *args, **kwargs)
            run, rank = member
            return run.call(rank, functools.partial(original, block), args, kwargs)

        return call

    @property
    def is_active(self) -> bool:
        """Whether any block is watched."""
        return bool(self._runs)

    def check(self) -> None:
        """Raise if the blocks turn out not to repeat each other; after each step, so that no more time is lost."""
        for run in self._runs:
            if run.failure:  # found in the backward, where raising is not safe
                raise CannotRepeatError(run.failure)
            if run.has_repeated:
                agree(self.mode.recorder, run.record())

    def unroll(self, first_event: int, first_op: int) -> tuple[Recorder, int, int]:
        """The record as it would be had every block run, and where in it the events and ops of interest begin."""
        for run in self._runs:
            if run.failure:
                raise CannotRepeatError(run.failure)
        if not self.windows:
            return self.mode.recorder, first_event, first_op
        records = [run.record() for run in self._runs]
        return unroll(self.mode.recorder, records, self.windows, first_event, first_op)


def _num_uses(model: nn.Module) -> dict[int, int]:
    """How many places of a model refer to each storage."""
    tensors = [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    return Counter(tensor.life.number for tensor in tensors if isinstance(tensor, Ghost))
