"""Why a backward is refused, and why a step that broke off in one is lost: each with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import HigherOrderError, SecondBackwardError, SessionError, StaleBackwardError
from lowtide.planning.plan import Schedule
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


def refuse_other_memory(unit: Unit, shown: tuple[int, ...]) -> None:
    """Refuse a backward through streamed weights whose parameters had other memory in the forward."""
    unit.adopt_foreign_data()
    if not unit.is_resident and unit.shown_memory != shown:
        raise StaleBackwardError(
            f"this backward goes through the weights of group {unit.label} as they were before p.data was set to other memory, "
            "and they are not on the device any more; set p.data before the forward or after the backward, or make the group "
            "resident. Nothing was updated"
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


def second_backward_in_step(schedule: Schedule) -> str:
    """Why the step is lost in whose middle another thread began a backward."""
    if schedule is Schedule.IN_BACKWARD:
        condition = "weights may have taken both. Load a checkpoint, or call zero_grad() to go on"
    else:
        condition = "weights and optimizer are as before the step. Call zero_grad() and repeat the step"
    return (
        "another thread began a backward in the middle of this step, and was refused: gradients may hold a part of it; "
        + condition
    )


def why_step_is_lost(moved: Sequence[str], num_groups: int, where: str = "the backward of this step") -> str:
    """After a backward, or a `step()`, that raised when it had updated these groups, of so many."""
    if moved:
        return (
            f"{where} raised after it had updated "
            f"{len(moved)} of {num_groups} groups ({', '.join(moved[:8])}{', ...' if len(moved) > 8 else ''}); "
            "these have taken the step, the others have not. Load a checkpoint, or call zero_grad() to go on"
        )
    return (
        f"{where} raised, so its gradients are incomplete; weights and optimizer are as "
        "before the step. Call zero_grad() and repeat the step"
    )
