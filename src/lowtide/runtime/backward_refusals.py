"""Why a backward is refused, and why a step that broke off in one is lost: each with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import HigherOrderError, SecondBackwardError, SessionError, StaleBackwardError
from lowtide.runtime.unit import Unit
from lowtide.runtime.window import Window


def refuse_old_weights(unit: Unit, generation: int) -> None:
    """Refuse a backward through weights as they were in that generation, if they are not that any more."""
    if unit.is_consumed:
        raise SecondBackwardError(
            f"a second backward reached group {unit.label} before step(), and the first one has updated its "
            "weights already. Use the schedule 'deferred' to accumulate gradients over several backwards"
        )
    if unit.generation != generation:
        raise StaleBackwardError(
            f"this backward goes through the weights of group {unit.label} as they were {unit.generation - generation} "
            "update(s) ago, and they are gone; run the forward again after optimizer.step(). Nothing was updated"
        )


def session_was_closed(window: Window) -> SessionError:
    """The graph has outlived the session that its streamed weights were in."""
    return SessionError(
        f"this backward goes through the streamed weights of {window.path or 'the model'} in a session that was "
        "closed since; they are gone. Run the forward again: the model is plain now, and nothing was updated"
    )


def graph_through_streamed(window: Window) -> HigherOrderError:
    """Gradients of gradients would need weights that have left the device."""
    return HigherOrderError(
        f"create_graph=True asks for gradients of gradients through {window.path or 'the model'}, whose "
        "weights are streamed and gone by then; make its group resident. Nothing was updated"
    )


def graph_through_used_up(unit: Unit) -> HigherOrderError:
    """Gradients of gradients would need gradients that the update has used up."""
    return HigherOrderError(
        f"backward(create_graph=True) keeps gradients for more gradients, and the schedule 'in_backward' uses up "
        f"those of group {unit.label} at once; use the schedule 'deferred' with resident groups, or "
        "torch.autograd.grad(create_graph=True). Nothing was updated"
    )


def why_step_is_lost(moved: Sequence[str], num_groups: int) -> str:
    """After a backward that raised when it had updated these groups, of so many."""
    if moved:
        return (
            "the backward of this step raised after it had updated "
            f"{len(moved)} of {num_groups} groups ({', '.join(moved[:8])}{', ...' if len(moved) > 8 else ''}); "
            "these have taken the step, the others have not. Load a checkpoint, or call zero_grad() to go on"
        )
    return (
        "the backward of this step raised, so its gradients are incomplete; weights and optimizer are as "
        "before the step. Call zero_grad() and repeat the step"
    )
