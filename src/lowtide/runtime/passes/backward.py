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
from collections.abc import Iterable
from functools import partial

import torch

from lowtide import compat
from lowtide.memory.mover import Mover, Ticket
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import GradientMover
from lowtide.runtime.parameters.group import Bound, Unit
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
from lowtide.runtime.passes.lock import HELD, SessionLock, alone, other_threads_in_backward, two_threads
from lowtide.runtime.passes.window import Visit
from lowtide.runtime.statistics.observer import StepObserver
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
        self._units = residency.units
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
        for unit in self._units.values():
            if unit.is_resident and self._schedule is Schedule.DEFERRED and not any(map(is_away, unit.bounds)):
                continue
            self._hooks.watch(unit, self._on_gradient, self._before_gradient)

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self._is_stopped = True
        self._hooks.remove()

    # -- told by visits ------------------------------------------------------------------------------------------------

    @alone
    def reached(self, visit: Visit, gradient: torch.Tensor) -> None:
        """A gradient arrived at a module's output: open its groups."""
        window = visit.window
        if self._is_stopped:
            if all(unit.is_resident for unit in window.units):
                return
            raise session_was_closed(window)
        task = self._current_task(gradient)
        if torch.is_grad_enabled() and any(not unit.is_resident for unit in window.units):
            raise graph_through_streamed(window)
        if visit.backward == task.number and visit.is_open:
            return
        for unit, generation, shown in zip(window.units, visit.generations, visit.shown, strict=True):
            refuse_old_weights(unit, generation)
            if not unit.looks_at_device or unit.shown_memory != shown:
                refuse_other_memory(unit, shown)
        self._recorder.phase = "backward"
        if task.late:
            self._close_late(task)
        for other in list(task.open_visits):
            # Whatever was made later has run by now, or never will: see Note [When a group's backward starts and ends].
            if other.first_node >= visit.next_node:
                self._end_visit(task, other)
        visit.backward = task.number
        self._residency.open_all(window.units)
        for unit in window.units:
            task.enter(unit)
        visit.is_open = True
        task.open_visits.append(visit)
        if self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            self.finisher.prefetch(window.units)
        self._visit_started[id(visit)] = self._mover.now()
        if self._observer is not None:
            self._observer.moment(window.name, "backward")

    @alone
    def left(self, visit: Visit) -> None:
        """The oldest node of a module's call has run: its backward is over."""
        task = self._tasks.get(visit.backward) if visit.backward is not None else None
        if task is not None and visit.is_open:
            self._end_visit(task, visit)

    def _end_visit(self, task: BackwardTask, visit: Visit) -> None:
        if self._observer is not None:
            self._observer.moment(visit.window.name, "backward")
        visit.is_open = False
        task.open_visits.remove(visit)
        try:
            for unit in visit.window.units:
                unit.visits.discard(visit)
                self._finish(unit, task, is_last=False)
        finally:
            started = self._visit_started.pop(id(visit))
            if visit.window.units:
                ended = self._mover.now()
                self._recorder.on_compute(visit.window.units[0].name, "backward", started, ended)
                for unit in visit.window.units:
                    if unit.awaits_hooks:
                        task.late.append(unit)
                    else:
                        self._residency.close(unit, ended)

    def _close_late(self, task: BackwardTask) -> None:
        """Gradients of a module's last node are accumulated right after it, and before anything else: hooks have run."""
        while task.late:
            unit = task.late.pop()
            try:
                unit.awaits_hooks = False
                for bound in unit.bounds:
                    bound.is_hook_awaited = False
                self._keep_writes(unit)
            finally:
                self._residency.close(unit)

    # -- told by parameters --------------------------------------------------------------------------------------------

    @alone
    def _before_gradient(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Of resident weights that the host updates: outside of their module's call too, what the host has is set aside."""
        del gradient
        if unit.num_tasks == 0 and compat.backward_number() is not None:
            refuse_old_weights(unit, unit.generation)
            self._current_task(None).enter(unit)

    @alone
    def _on_gradient(self, unit: Unit, bound: Bound, parameter: torch.Tensor) -> None:
        if unit.num_tasks == 0:
            if not unit.is_resident:
                return  # used outside its module's call, on the host: autograd has put the gradient where it belongs
            task = self._current_task(None if unit.is_consumed else parameter.grad)
            refuse_old_weights(unit, unit.generation)
            task.enter(unit)
        task = self._current_task(None)
        if torch.is_grad_enabled() and self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            raise graph_through_used_up(unit)
        if bound.chunk.spec.name in unit.consumed:
            refuse_old_weights(unit, unit.generation)
        if bound.is_hooked or compat.version_of(parameter) != bound.version_in_backward:
            self._note_hooks(unit, bound, task)
        if is_away(bound):
            with compat.without_torch_function():
                gradient = parameter.grad
            if gradient is None:
                bound.stashed = None  # a hook of the user's has used the gradient up, with what was there before
                return
            if self._is_dropped(parameter):
                bound.stashed = parameter.grad = None
                unit.dropped.add(bound.spec.name)
                self.dropped[id(parameter)] = bound.spec.name
            else:
                self._gradients.take(bound)
        bound.has_fired = True
        self._finish(unit, task, is_last=False)

    def _note_hooks(self, unit: Unit, bound: Bound, task: BackwardTask) -> None:
        """Hooks of the user's on the gradient have run, and may have written to the weights on the device."""
        is_written = compat.version_of(bound.parameter) != bound.version_in_backward
        # Past autograd (`p.data.add_(...)`) it cannot be seen. Where nobody else updates the parameter, that is what they are for.
        is_theirs = self.finisher is None or not self.finisher.updater.optimizer.knows(bound.parameter)
        bound.is_written_in_backward = is_written or is_theirs
        bound.is_hook_awaited = False
        unit.awaits_hooks = any(other.is_hook_awaited for other in unit.bounds)
        self._keep_writes(unit)
        if unit in task.late and not unit.awaits_hooks:
            task.late.remove(unit)
            self._residency.close(unit)

    def _keep_writes(self, unit: Unit) -> None:
        """Bring what hooks have written to where the truth is, chunk by chunk, when all hooks of the chunk have run."""
        for chunk in unit.group.chunks:
            bounds = [bound for bound in unit.bounds if bound.chunk is chunk]
            if any(bound.is_written_in_backward for bound in bounds) and not any(
                bound.is_hook_awaited for bound in bounds
            ):
                for bound in bounds:
                    bound.is_written_in_backward = False
                self._residency.keep_write(unit, chunk)

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

    @alone
    def _end_task(self, number: int) -> None:
        task = self._tasks[number]
        for visit in list(task.open_visits):
            self._end_visit(task, visit)
        self._close_late(task)
        for unit in task.units.values():
            self._finish(unit, task, is_last=True)
        # Not before: what an update raises is the end of a backward that broke off.
        del self._tasks[number]
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        for unit in task.leave():
            self._show_host(unit)
            self._residency.guard(unit)
        self._residency.settle_held()
        self._gradient_watch.send()
        self._residency.store.prefetch()
        self._recorder.phases.backward_ends(number)
        HELD.rest()

    @alone
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
            self.lose_step(unit for unit in self._units.values() if unit.is_consumed)
        self.put_in_order()

    def put_in_order(self) -> None:
        """Start afresh from the truth."""
        self._lock.broke_off()  # until it is done
        self._gradients.abandon(bound for unit in self._units.values() for bound in unit.bounds)
        self._mover.drain()
        for unit in self._units.values():
            if unit.group.num_open:
                unit.keep_late_writes()
        for task in self._tasks.values():
            for visit in task.open_visits:
                visit.is_open = False
            task.late.clear()
        self._visit_started.clear()
        self._residency.rebuild()
        for unit in self._units.values():
            self._show_gradients(unit)
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        self._tasks.clear()
        self._lock.put_in_order()

    def lose_step(self, moved: Iterable[Unit], where: str = "the backward of this step") -> None:
        """The step broke off there when these had moved: `step` refuses until the user gives it up."""
        labels = sorted({unit.label for unit in moved})
        self.lost = why_step_is_lost(labels, len(self._units), where)
        is_whole = all(len(unit.consumed) == len(unit.group.chunks) for unit in self._units.values())
        self.is_untold = bool(labels) and not is_whole

    def has_broken_off(self) -> bool:
        """Whether the last backward raised, and the step was not given up since."""
        if not self._tasks:
            return self.lost is not None
        return compat.backward_number() is None and self._thread_beside() is None

    def why_mixed(self) -> str | None:
        """What a backward that broke off has moved; None where it moved nothing, or none did."""
        moved = self._moved() if self.has_broken_off() else []
        return why_step_is_lost(moved, len(self._units)) if moved else None

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
        return sorted(unit.label for unit in self._units.values() if unit.is_consumed)

    def _finish(self, unit: Unit, task: BackwardTask, *, is_last: bool) -> None:
        if self._schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            self.finisher.finish(unit, task.number, is_last=is_last)

    def _is_dropped(self, parameter: torch.Tensor) -> bool:
        """In backward, of a parameter that the optimizer does not hold: no update would ever give its staging back."""
        if self._schedule is not Schedule.IN_BACKWARD or self.finisher is None:
            return False
        return not self.finisher.updater.optimizer.knows(parameter)

    def _show_host(self, unit: Unit) -> None:
        """No backward uses the unit any more: the user finds weights and gradients where they rest."""
        unit.look_at_host()
        self._show_gradients(unit)

    def _show_gradients(self, unit: Unit) -> None:
        for bound in unit.bounds:
            if is_away(bound) and self._schedule is Schedule.DEFERRED:
                self._gradients.expose(bound)
            elif bound.stashed is not None and not bound.is_whole and not unit.is_resident:
                # From a use outside of the module's call, and the call itself brought none: it is left for `step()`.
                bound.parameter.grad, bound.stashed = bound.stashed, None
            bound.has_fired = False

    def _has_gradients(self) -> bool:
        return any(bound.parameter.grad is not None for unit in self._units.values() for bound in unit.bounds)
