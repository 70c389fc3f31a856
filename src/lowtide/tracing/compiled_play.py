"""Plays a program on the record of a trace: buffers are born and die as they would in the compiled code."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lowtide.partition.lifetimes import Moment, moments, unread_inputs
from lowtide.partition.program import Program, Step
from lowtide.partition.reuse import with_reuse
from lowtide.tracing.ghost.mode import GhostMode
from lowtide.tracing.ghost.operators import Operator, describe
from lowtide.tracing.ghost.tensor import Ghost


def play(
    program: Program,
    given: dict[str, Ghost],
    forms: Mapping[str, Tensor],
    *,
    mode: GhostMode,
    kept: Collection[str],
    donated: Collection[str],
) -> dict[str, Ghost]:
    """Run a program on record; returns its outputs.

    Args:
        program: After fusion: all its buffers are written.
        given: Its inputs. Those that are not kept are let go after their last read: the caller must hold none of them.
        forms: Of each buffer.
        mode: Of the trace.
        kept: As for `lifetimes.moments`.
        donated: As for `lifetimes.moments`.
    """
    for buffer in unread_inputs(program, kept):
        given.pop(buffer, None)  # of the backward's inputs, only those that it reads are given
    for moment in with_reuse(program, moments(program, kept=kept, donated=donated)):
        _run(moment, given, forms, mode)
    return {buffer: given[buffer] for buffer in program.outputs}


def _run(moment: Moment, alive: dict[str, Ghost], forms: Mapping[str, Tensor], mode: GhostMode) -> None:
    step = moment.step
    number = mode.recorder.begin_op(_name(step))
    for buffer in step.reads:
        mode.recorder.use(alive[buffer].life, number)
    for buffer, old in moment.replaces.items():
        alive[buffer] = alive.pop(old)
    for buffer in moment.begins:
        # A result that is no tensor, or an empty one, takes no memory, but is read by its name like the others.
        form = forms.get(buffer)
        alive[buffer] = mode.place(torch.empty(0, device="meta") if form is None else new_storage(form))
    for buffer in step.writes:
        mode.recorder.use(alive[buffer].life, number)
    _charge(step, [forms[buffer] for buffer in (*step.reads, *step.writes) if buffer in forms], mode)
    for buffer in moment.ends:
        del alive[buffer]


def new_storage(form: Tensor) -> Tensor:
    """A meta tensor like a form, with a storage of just its elements."""
    storage = torch.UntypedStorage(form.numel() * form.element_size(), device="meta")
    return torch.empty(0, dtype=form.dtype, device="meta").set_(storage, 0, form.shape, _dense(form))


def _dense(form: Tensor) -> tuple[int, ...]:
    """The strides of a form where its elements are all that its storage holds; else those of a dense tensor."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
    return form.stride() if span <= form.numel() else torch.empty(form.shape, device="meta").stride()


def _name(step: Step) -> str:
    """A kernel by its operator, so that reports know it; fused code by the operator that ends it."""
    return step.operator if step.call is not None else f"fused {step.operator or step.name}"


def _charge(step: Step, tensors: list[Tensor], mode: GhostMode) -> None:
    if step.call is not None and hasattr(step.call.operator, "_schema"):
        mode.charge(describe(step.call.operator), step.call.args, step.call.out)
    else:
        mode.charge(_fused(_name(step)), tuple(tensors), None)


def _fused(name: str) -> Operator:
    return Operator(
        name=name,
        writes=(),
        returns_written=(),
        written_names=(),
        is_chance=False,
        reads_values=False,
        is_view_in_place=False,
    )
