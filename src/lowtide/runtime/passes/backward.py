"""BackwardPass: opens groups when a backward reaches their modules, takes their gradients, and starts updates.

See `passes.window` for when a group's backward starts and ends, `passes.backward_task` for what one backward has open.

Note [After an exception]
Any line may raise: an operator that runs out of memory, a hook of the user's, an interrupt. What changes the condition of a
session holds its lock (`passes.lock`), and an exception out of that is noted. The next that takes it and finds neither a
call nor a backward under way puts everything in order from the truth, without asking how far the broken one had come
(`check_broken`): it waits for the host's work, takes every streamed copy off the device, and lets parameters look at the
host. The truth is never in doubt: a chunk says that the device has it before the device changes it, and that the host has
it after the copy; weights say that they moved before they do. So a group is never taken for older than it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from lowtide import compat
from lowtide.memory.mover import Mover, Ticket
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import GradientMover
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.passes.backward_task import (
    BackwardTask,
    GradientHooks,
    graph_through_streamed,
    graph_through_used_up,
    is_away,
    refuse_old_weights,
    refuse_other_memory,
    second_backward_in_step,
    session_was_closed,
    why_step_is_lost,
)
from lowtide.runtime.passes.lock import HELD, SessionLock, locked, other_threads_in_backward, two_threads
from lowtide.runtime.passes.window import Visit
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.phase_clock import watch_nodes
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.finite import GradientWatch, LossWatch
from lowtide.runtime.updates.updater import Finisher


class BackwardPass:
    """Told by visits and by hooks on parameters how far a backward is.

    Args:
        residency: Opens and closes the groups.
        gradients: Takes finished gradients to the host.
        loss: Asked at the start of each backward.
        gradient_watch: Asked there about the backward before.
        observer: Asked at each opening and closing of a window; None costs nothing.
        lock: Shared with the forward pass.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        gradients: GradientMover,
        recorder: Recorder,
        schedule: Schedule,
        *,
        loss: LossWatch,
        gradient_watch: GradientWatch,
        observer: StepObserver | None,
        lock: SessionLock,
    ) -> None:
        self.finisher: Finisher | None = None
        """Set where there is an optimizer that steps through the session."""
        self.lost: str | None = None
        """Why the last step must be repeated; None where nothing broke."""
        self.dropped: dict[int, str] = {}
        """Names of parameters whose gradients the last backward dropped, by their `id`; `step()` does not forget them."""
        self.is_untold = False
        """Whether that step has moved some groups and not others, and the user has not been told which."""
        self._groups = residency.groups
        self._residency = residency
        self._mover = mover
        self._gradients = gradients
        self._recorder = recorder
        self._schedule = schedule
        self._loss = loss
        self._gradient_watch = gradient_watch
        self._observer = observer
        self._lock = lock
        self._hooks = GradientHooks()
        self._tasks: dict[int, BackwardTask] = {}
        self._visit_started: dict[int, Ticket] = {}
        self._is_stopped = False

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has begun and not ended, well or not."""
        return bool(self._tasks)

    def watch_gradients(self) -> None:
        """Be told when a parameter's gradient is complete, where that is not simply left to autograd."""
        for group in self._groups.values():
            if group.is_resident and self._schedule is Schedule.DEFERRED and not any(map(is_away, group.members)):
                continue
            self._hooks.watch(group, self._on_gradient, self._before_gradient)

    def watch_output(self, output: object) -> None:
        """Know of a backward from where it reaches what the model has returned: weights that are left to autograd may have
        gradients before it comes to a window.
        """
        watch_nodes(output, self._on_output_gradient)

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self._is_stopped = True
        self._hooks.remove()

    @locked
    def _on_output_gradient(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._is_stopped:
            self._current_task(next((gradient for gradient in gradients if gradient is not None), None))

    # -- told by visits ------------------------------------------------------------------------------------------------

    @locked
    def reached(self, visit: Visit, gradient: torch.Tensor) -> None:
        """A gradient arrived at a module's output: open its groups."""
        window = visit.window
        if self._is_stopped:
            if all(group.is_resident for group in window.groups):
                return
            raise session_was_closed(window)
        task = self._current_task(gradient)
        if torch.is_grad_enabled() and any(not group.is_resident for group in window.groups):
            raise graph_through_streamed(window)
        if visit.backward == task.number and visit.is_open:
            return
        for group, generation, shown in zip(window.groups, visit.generations, visit.shown, strict=True):
            refuse_old_weights(group, generation)
            if not group.looks_at_device or group.shown_memory != shown:
                refuse_other_memory(group, shown)
        self._recorder.phase = "backward"
        if task.late:
            self._close_late(task)
        for other in list(task.open_visits):
            # Whatever was made later has run by now, or never will: see Note [When a group's backward starts and ends].
            if other.first_node >= visit.next_node:
                self._end_visit(task, other)
        visit.backward = task.number
        self._residency.open_all(window.groups)
        for group in window.groups:
            task.enter(group)
        visit.is_open = True
        task.open_visits.append(visit)
        if self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            self.finisher.prefetch(window.groups)
        self._visit_started[id(visit)] = self._mover.now()
        if self._observer is not None:
            self._observer.take_sample(window.name, "backward")

    @locked
    def left(self, visit: Visit) -> None:
        """The oldest node of a module's call has run: its backward is over."""
        task = self._tasks.get(visit.backward) if visit.backward is not None else None
        if task is not None and visit.is_open:
            self._end_visit(task, visit)

    def _end_visit(self, task: BackwardTask, visit: Visit) -> None:
        if self._observer is not None:
            self._observer.take_sample(visit.window.name, "backward")
        visit.is_open = False
        task.open_visits.remove(visit)
        try:
            for group in visit.window.groups:
                group.visits.discard(visit)
                self._finish(group, task, is_last=False)
        finally:
            started = self._visit_started.pop(id(visit))
            if visit.window.groups:
                ended = self._mover.now()
                self._recorder.on_compute(visit.window.groups[0].name, "backward", started, ended)
                for group in visit.window.groups:
                    if group.awaits_hooks:
                        task.late.append(group)
                    else:
                        self._residency.close(group, ended)

    def _close_late(self, task: BackwardTask) -> None:
        """Gradients of a module's last node are accumulated right after it, and before anything else: hooks have run."""
        while task.late:
            group = task.late.pop()
            try:
                group.awaits_hooks = False
                for managed in group.members:
                    managed.is_hook_awaited = False
                self._keep_writes(group)
            finally:
                self._residency.close(group)

    # -- told by parameters --------------------------------------------------------------------------------------------

    @locked
    def _before_gradient(self, group: ManagedGroup, gradient: torch.Tensor) -> None:
        """Set aside what the host has of the gradient: resident weights that it updates may be used outside of their module."""
        del gradient
        if group.num_tasks == 0 and compat.backward_number() is not None:
            refuse_old_weights(group, group.generation)
            self._current_task(None).enter(group)

    @locked
    def _on_gradient(self, group: ManagedGroup, managed: ManagedParameter, parameter: torch.Tensor) -> None:
        if group.num_tasks == 0:
            if not group.is_resident:
                return  # used outside its module's call, on the host: autograd has put the gradient where it belongs
            task = self._current_task(None if group.is_consumed else parameter.grad)
            refuse_old_weights(group, group.generation)
            task.enter(group)
        task = self._current_task(None)
        if torch.is_grad_enabled() and self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            raise graph_through_used_up(group)
        if managed.chunk.spec.name in group.consumed:
            refuse_old_weights(group, group.generation)
        if managed.is_hooked or compat.version_of(parameter) != managed.version_in_backward:
            self._note_hooks(group, managed, task)
        if is_away(managed):
            with compat.without_torch_function():
                gradient = parameter.grad
            if gradient is None:
                managed.stashed = None  # a hook of the user's has used the gradient up, with what was there before
                return
            if self._is_dropped(parameter):
                managed.stashed = parameter.grad = None
                group.dropped.add(managed.spec.name)
                self.dropped[id(parameter)] = managed.spec.name
            else:
                self._gradients.take(managed)
        managed.has_fired = True
        self._finish(group, task, is_last=False)

    def _note_hooks(self, group: ManagedGroup, managed: ManagedParameter, task: BackwardTask) -> None:
        """Hooks of the user's on the gradient have run, and may have written to the weights on the device."""
        is_written = compat.version_of(managed.parameter) != managed.version_in_backward
        # Past autograd (`p.data.add_(...)`) it cannot be seen. Where nobody else updates the parameter, that is what they are for.
        is_theirs = self.finisher is None or not self.finisher.updater.optimizer.knows(managed.parameter)
        managed.is_written_in_backward = is_written or is_theirs
        managed.is_hook_awaited = False
        group.awaits_hooks = any(other.is_hook_awaited for other in group.members)
        self._keep_writes(group)
        if group in task.late and not group.awaits_hooks:
            task.late.remove(group)
            self._residency.close(group)

    def _keep_writes(self, group: ManagedGroup) -> None:
        """Bring what hooks have written to where the truth is, chunk by chunk, when all hooks of the chunk have run."""
        for chunk in group.stored.chunks:
            members = [managed for managed in group.members if managed.chunk is chunk]
            if any(managed.is_written_in_backward for managed in members) and not any(
                managed.is_hook_awaited for managed in members
            ):
                for managed in members:
                    managed.is_written_in_backward = False
                self._residency.keep_write(group, chunk)

    # -- one backward --------------------------------------------------------------------------------------------------

    def _current_task(self, gradient: torch.Tensor | None) -> BackwardTask:
        number = compat.backward_number()
        assert number is not None
        task = self._tasks.get(number)
        if task is None:
            self._refuse_second_thread()
            if not self._tasks:
                self.dropped.clear()
            task = self._tasks[number] = BackwardTask(number, self._callers())
            self._recorder.phases.backward_begins(number)
            if self.finisher is not None:
                self.finisher.updater.begin_step()
                self.finisher.updater.optimizer.refresh_groups()  # one may have been added since the last step
            compat.call_after_backward(partial(self._end_task, number))
            if self._loss.has_verdict and not self._has_gradients():
                # The user gave the step before up by clearing its gradients, not through the optimizer.
                self._loss.forget()
            # Last: where one of them refuses, the step is known to be lost. First what would explain a loss that is a NaN;
            # the loss is waited for in any case, and comes later.
            self._gradient_watch.check(waits=True)
            self._loss.judge(gradient)
        return task

    @locked
    def _end_task(self, number: int) -> None:
        task = self._tasks[number]
        for visit in list(task.open_visits):
            self._end_visit(task, visit)
        self._close_late(task)
        for group in task.groups.values():
            self._finish(group, task, is_last=True)
        # Not before: what an update raises is the end of a backward that broke off.
        del self._tasks[number]
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        for group in task.leave():
            self._show_host(group)
            self._residency.guard(group)
        self._residency.settle_held()
        self._gradient_watch.send()
        self._residency.store.prefetch()
        self._recorder.phases.backward_ends(number)
        HELD.rest()

    @locked
    def check_broken(self) -> None:
        """Where something broke off: put everything back where it belongs. In a backward, the step is lost.

        Only where no call is under way. See Note [After an exception]. May be repeated.
        """
        if compat.backward_number() is not None or not (self._tasks or self._lock.is_broken):
            return
        if self._thread_beside() is not None:
            return
        if self._tasks or self._lock.is_backward_broken:
            self._lock.broke_off(is_in_backward=True)
            self.lose_step(group for group in self._groups.values() if group.is_consumed)
        self.put_in_order()

    def put_in_order(self) -> None:
        """Start afresh from the truth."""
        self._lock.broke_off()  # until it is done
        self._gradients.abandon(managed for group in self._groups.values() for managed in group.members)
        self._mover.drain()
        for group in self._groups.values():
            if group.stored.num_open:
                group.keep_late_writes()
        for task in self._tasks.values():
            for visit in task.open_visits:
                visit.is_open = False
            task.late.clear()
        self._visit_started.clear()
        self._residency.rebuild()
        for group in self._groups.values():
            self._show_gradients(group)
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        self._tasks.clear()
        self._lock.put_in_order()

    def lose_step(self, moved: Iterable[ManagedGroup], where: str = "the backward of this step") -> None:
        """The step broke off there when these had moved: `step` refuses until the user gives it up."""
        labels = sorted({group.label for group in moved})
        is_torn = self._is_torn
        self.lost = why_step_is_lost(labels, len(self._groups), where, is_torn=is_torn)
        is_whole = all(len(group.consumed) == len(group.stored.chunks) for group in self._groups.values())
        self.is_untold = bool(labels) and (is_torn or not is_whole)

    def has_broken_off(self) -> bool:
        """Whether the last backward raised, and the step was not given up since."""
        if not self._tasks:
            return self.lost is not None
        return compat.backward_number() is None and self._thread_beside() is None

    def why_mixed(self) -> str | None:
        """What a backward that broke off has moved; None where it moved nothing, or none did."""
        moved = self._moved() if self.has_broken_off() else []
        return why_step_is_lost(moved, len(self._groups), is_torn=self._is_torn) if moved else None

    @property
    def _is_torn(self) -> bool:
        """Whether an update on the device broke off in the middle."""
        return self.finisher is not None and self.finisher.updater.is_torn

    def refuse_beside(self, what: str) -> None:
        """Refuse what this thread begins while another runs a backward. See Note [Threads] in `passes.lock`."""
        running = self._thread_beside() if compat.backward_number() is None else None
        if running is not None:
            raise two_threads(what, running, "a backward")

    def _thread_beside(self) -> int | None:
        """Another thread that is in a backward of ours; None where ours are this thread's, or have broken off."""
        callers = {number for task in self._tasks.values() for number in task.callers}
        return min(callers & other_threads_in_backward(), default=None) if callers else None

    def _callers(self) -> set[int]:
        """Who may have called the backward that begins: on CUDA autograd's own threads tell of it, not the caller."""
        return other_threads_in_backward() if self._mover.device.type == "cuda" else {threading.get_ident()}

    def _refuse_second_thread(self) -> None:
        """A backward begins. Two at once on CUDA cannot be told from one inside of the other."""
        running = self._thread_beside() if self._mover.device.type == "cpu" else None
        is_beside_call = self._lock.is_taken_elsewhere() and not other_threads_in_backward()
        if running is None and not is_beside_call:
            return
        # Weights that are left to autograd have their gradients by now, added to those of the other thread's step.
        self.lost = second_backward_in_step(self._schedule)
        if running is not None:
            raise two_threads("a backward", running, "another")
        self._lock.refuse_beside("a backward")

    def _moved(self) -> list[str]:
        return sorted(group.label for group in self._groups.values() if group.is_consumed)

    def _finish(self, group: ManagedGroup, task: BackwardTask, *, is_last: bool) -> None:
        if self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            self.finisher.finish(group, task.number, is_last=is_last)

    def _is_dropped(self, parameter: torch.Tensor) -> bool:
        """In backward, of a parameter that the optimizer does not hold: no update would ever give its staging back."""
        if self._schedule is not Schedule.IN_BACKWARD or self.finisher is None:
            return False
        return not self.finisher.updater.optimizer.knows(parameter)

    def _show_host(self, group: ManagedGroup) -> None:
        """No backward uses the group any more: the user finds weights and gradients where they rest."""
        group.look_at_host()
        self._show_gradients(group)

    def _show_gradients(self, group: ManagedGroup) -> None:
        for managed in group.members:
            if is_away(managed) and self._schedule is Schedule.DEFERRED:
                self._gradients.expose(managed)
            elif managed.stashed is not None and not managed.is_whole and not group.is_resident:
                # From a use outside of the module's call, and the call itself brought none: it is left for `step()`.
                managed.parameter.grad, managed.stashed = managed.stashed, None
            managed.has_fired = False

    def _has_gradients(self) -> bool:
        return any(managed.parameter.grad is not None for group in self._groups.values() for managed in group.members)
