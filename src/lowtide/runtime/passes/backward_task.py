"""BackwardTask: one running backward, what it has opened, the hooks that tell of gradients, and why it is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from lowtide import compat
from lowtide.errors import HigherOrderError, SecondBackwardError, SessionError, StaleBackwardError
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.passes.window import Visit, Window


def refuse_old_weights(group: ManagedGroup, generation: int) -> None:
    """Refuse a backward through weights as they were in that generation, if they are not that any more."""
    if group.is_consumed:
        raise SecondBackwardError(
            f"a second backward reached group {group.label} before step(), and the first one has updated its "
            "weights already. Use the schedule 'deferred' to accumulate gradients over several backwards"
        )
    if group.generation != generation:
        raise StaleBackwardError(
            f"this backward goes through the weights of group {group.label} as they were {group.generation - generation} "
            "update(s) ago, and they are gone; run the forward again after optimizer.step(). Nothing was updated"
        )


def refuse_other_memory(group: ManagedGroup, shown: tuple[int, ...]) -> None:
    """Refuse a backward through streamed weights whose parameters had other memory in the forward."""
    group.adopt_foreign_data()
    if not group.is_resident and group.shown_memory != shown:
        raise StaleBackwardError(
            f"this backward goes through the weights of group {group.label} as they were before p.data was set to other memory, "
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


def graph_through_used_up(group: ManagedGroup) -> HigherOrderError:
    """Gradients of gradients would need gradients that the update has used up."""
    return HigherOrderError(
        f"backward(create_graph=True) keeps gradients for more gradients, and the schedule 'in_backward' uses up "
        f"those of group {group.label} at once; use the schedule 'deferred' with resident groups, or "
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


def why_step_is_lost(
    moved: Sequence[str], num_groups: int, where: str = "the backward of this step", *, is_torn: bool = False
) -> str:
    """After a backward, or a `step()`, that raised when it had updated these groups, of so many.

    Where it `is_torn`, it raised in the middle of an update on the device.
    """
    if moved:
        by_half = ", one of them perhaps by half" if is_torn else ""
        return (
            f"{where} raised after it had updated "
            f"{len(moved)} of {num_groups} groups ({', '.join(moved[:8])}{', ...' if len(moved) > 8 else ''}); "
            f"these have taken the step{by_half}, the others have not. Load a checkpoint, or call zero_grad() to go on"
        )
    return (
        f"{where} raised, so its gradients are incomplete; weights and optimizer are as "
        "before the step. Call zero_grad() and repeat the step"
    )


class BackwardTask:
    """Lives from the first gradient that reaches a managed module to the end of the backward."""

    def __init__(self, number: int, callers: set[int]) -> None:
        self.number = number
        self.callers = callers
        """Threads of which one has called `backward`."""
        self.groups: dict[str, ManagedGroup] = {}
        self.open_visits: list[Visit] = []
        self.late: list[ManagedGroup] = []
        """Groups whose visits have ended, and which stay open for hooks of the user's that are still to come."""

    def enter(self, group: ManagedGroup) -> None:
        """The backward uses the group: gradients on the host are set aside, so that autograd starts afresh."""
        if group.name in self.groups:
            return
        self.groups[group.name] = group
        group.num_tasks += 1
        if group.num_tasks == 1:
            group.awaits_hooks = False
            group.awaited.clear()
            for managed in group.members:
                managed.has_fired = False
                has_other_hooks = managed.hook is not None and compat.make_last_gradient_hook(
                    managed.parameter, managed.hook
                )
                managed.is_hooked = has_other_hooks or (
                    not group.is_resident and compat.has_gradient_hooks(managed.parameter)
                )
                managed.is_hook_awaited = managed.is_hooked
                group.awaits_hooks = group.awaits_hooks or managed.is_hooked
                managed.is_written_in_backward = False
                managed.version_in_backward = compat.version_of(managed.parameter)
                if is_away(managed):
                    managed.stashed, managed.parameter.grad = _on_host(managed, managed.parameter.grad), None
                    managed.is_whole = has_other_hooks and managed.stashed is not None
                    if managed.is_whole and managed.stashed is not None:
                        # Hooks of the user's find the sum at the parameter, as in plain torch.
                        managed.parameter.grad = managed.stashed.to(managed.parameter.device, copy=True)
                else:
                    _bring_gradient(managed.parameter)

    def leave(self) -> list[ManagedGroup]:
        """The backward is over; the groups that no other backward uses."""
        left: list[ManagedGroup] = []
        for group in self.groups.values():
            group.num_tasks -= 1
            if group.num_tasks == 0:
                left.append(group)
        self.groups.clear()
        return left


def _bring_gradient(parameter: torch.Tensor) -> None:
    """Weights used outside of their module's call, on the host, have left a gradient there: autograd adds to it here."""
    gradient = parameter.grad
    if gradient is not None and gradient.device != parameter.device:
        parameter.grad = gradient.to(parameter.device)


def _on_host(managed: ManagedParameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What is there already; where the user set it beside resident weights on the device, a copy on the host."""
    if gradient is None or managed.host_target is None or gradient.device == managed.host_target.device:
        return gradient
    return gradient.detach().to(managed.host_target.device)


def is_away(managed: ManagedParameter) -> bool:
    """Whether the gradient goes to the host."""
    return managed.host_target is not None


class GradientHooks:
    """The session's hooks on parameters, until `remove`."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(
        self,
        group: ManagedGroup,
        on_gradient: Callable[[ManagedGroup, ManagedParameter, torch.Tensor], None],
        before_gradient: Callable[[ManagedGroup, torch.Tensor], None],
    ) -> None:
        """Hook the group's parameters.

        Args:
            group: Whose parameters that are trained are hooked.
            on_gradient: A method; called when a parameter's gradient is complete.
            before_gradient: A method; called before that for resident weights whose gradients go to the host.
        """
        for managed in group.members:
            if managed.parameter.requires_grad:
                hook = _weakly(on_gradient, group, managed)
                managed.hook = managed.parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(managed.hook)
                if group.is_resident and is_away(managed):
                    self._handles.append(managed.parameter.register_hook(_weakly(before_gradient, group)))

    def remove(self) -> None:
        """Parameters are without them. May be repeated."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _weakly(method: Callable[..., None], *arguments: object) -> Callable[[torch.Tensor], None]:
    """The method as a hook on a parameter. It holds nothing: Python's collector does not see what such hooks hold, and a
    session that is forgotten with its model would live for ever.
    """
    weak_method = weakref.WeakMethod(method)
    weak_arguments = [weakref.ref(argument) for argument in arguments]

    def hook(tensor: torch.Tensor) -> None:
        call = weak_method()
        if call is not None:
            call(*[reference() for reference in weak_arguments], tensor)

    return hook
