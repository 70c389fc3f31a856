"""Place: the part of the step an event falls in, finer than its phase and in words a person uses.

"At the loss" and "in the backward of the loss" are where most peaks are, and what a technique can do there differs from
what it can do elsewhere: no gradient exists yet.
"""

from __future__ import annotations

import enum

from lowtide.tracing.instant import instant_of
from lowtide.tracing.step_trace import Category, Phase, StepTrace


class Place(enum.StrEnum):
    """Parts of a step, in order."""

    START = "start"
    """Before the first event."""
    FORWARD = "forward"
    LOSS = "loss"
    """After the last layer."""
    LOSS_BACKWARD = "loss backward"
    """From the loss back to the last layer: no weight has been read yet."""
    RECOMPUTE = "recompute"
    """A layer's forward, run again in the backward."""
    BACKWARD = "backward"
    UPDATE_IN_BACKWARD = "update in backward"
    UPDATE = "update"

    @property
    def is_before_gradients(self) -> bool:
        """Whether no gradient of this backward can exist yet."""
        return self in (Place.START, Place.FORWARD, Place.LOSS, Place.LOSS_BACKWARD)


_WORDS = {
    Place.START: "before the step begins",
    Place.FORWARD: "in the forward of {module}",
    Place.LOSS: "at the loss",
    Place.LOSS_BACKWARD: "in the backward of the loss",
    Place.RECOMPUTE: "in the backward, where {module} is recomputed",
    Place.BACKWARD: "in the backward of {module}",
    Place.UPDATE_IN_BACKWARD: "in an update inside the backward",
    Place.UPDATE: "in the update",
}


def place_of(trace: StepTrace, event: int) -> Place:
    """The place of an event (-1: before the step)."""
    if event < 0:
        return Place.START
    happened = trace.events[event]
    if happened.phase is not Phase.BACKWARD:
        return Place(happened.phase.value)
    allocation = trace.allocations[happened.allocation]
    if _is_before_layers(trace, happened.op):
        return Place.LOSS_BACKWARD
    if allocation.phase is Phase.BACKWARD and allocation.category is Category.ACTIVATIONS and not happened.is_free:
        return Place.RECOMPUTE
    return Place.UPDATE_IN_BACKWARD if _is_update(trace, happened.op) else Place.BACKWARD


def where(trace: StepTrace, event: int) -> str:
    """The place of an event, to follow "the peak is": `in the backward of layers.3.mlp`."""
    module = instant_of(trace, event).module or "code outside the model"
    return _WORDS[place_of(trace, event)].format(module=module)


def _is_before_layers(trace: StepTrace, op: int) -> bool:
    """Whether no weight has been read between the start of this backward and the end of an op."""
    uses = [allocation.uses for allocation in trace.allocations if allocation.category is Category.WEIGHTS]
    if not any(uses):
        return False  # an observation may know no uses; then nothing is claimed
    start = op
    while start > 0 and trace.ops[start - 1].phase is Phase.BACKWARD:
        start -= 1
    return not any(start <= use <= op for of_weight in uses for use in of_weight)


def _is_update(trace: StepTrace, op: int) -> bool:
    """Whether an op of the backward belongs to an update: it stands at the same line as one that touches state."""
    if trace.settings.get("update") != "in_backward":
        return False
    touching = {
        use for allocation in trace.allocations if allocation.category is Category.OPTIMIZER for use in allocation.uses
    }
    lines = {(trace.ops[use].module, trace.ops[use].source) for use in touching}
    return (trace.ops[op].module, trace.ops[op].source) in lines
