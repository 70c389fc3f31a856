"""BackwardPass: opens groups when a backward reaches their modules, takes their gradients, and starts updates.

See `passes.forward` for when a group's backward starts and ends.

Note [After an exception]
Any line may raise: an operator that runs out of memory, a hook of the user's, an interrupt. What changes the condition of a
session holds its lock (`passes.lock`), and an exception out of that is noted. The next one that takes it, with neither a
call nor a backward under way, puts everything in order from the true copies, whatever point the broken one had reached
(`check_broken`): it waits for the host's work, takes every streamed copy off the device, and points parameters to the
host. It is always known which copy is the true one: a chunk becomes DIRTY before the device changes it, and is the host's again
only after the copy; a group counts an update before it is made. So a group is never taken for older than it is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from lowtide import compat
from lowtide.errors import (
    GradientGoneError,
    HigherOrderError,
    SecondBackwardError,
    SessionError,
    StaleBackwardError,
)
from lowtide.memory.mover import Mover, Ticket
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import GradientSink, refuse_sparse_gradient
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter, chunks_in, members_of
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.passes.device_switch import DeviceSwitch
from lowtide.runtime.passes.exchange import Averaged, GradientAverage
from lowtide.runtime.passes.forward import Visit, Window
from lowtide.runtime.passes.lock import (
    HELD_INTERRUPTS,
    LostStep,
    SessionLock,
    locked,
    other_threads_in_backward,
    two_threads,
    why_step_is_lost,
)
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder, watch_nodes
from lowtide.runtime.updates.norms import GradientWatch, LossJudge
from lowtide.runtime.updates.updater import Finisher


class BackwardTask:
    """Lives from the first gradient that reaches a managed module to the end of the backward."""

    def __init__(self, number: int, callers: set[int], *, is_averaged: bool = False) -> None:
        self.number = number
        self.is_averaged = is_averaged
        """Whether its gradients are averaged over ranks."""
        self.callers = callers
        """Threads of which one has called `backward`."""
        self.groups: dict[str, ManagedGroup] = {}
        self.open_visits: list[Visit] = []
        self.late: list[ManagedGroup] = []
        """Groups whose visits have ended, and which stay open because something comes with their last gradients: hooks of the
        user's, or an update on the device."""

    def enter(self, group: ManagedGroup) -> None:
        """The backward uses the group."""
        if group.name not in self.groups:
            self.groups[group.name] = group
            group.enter_backward(is_averaged=self.is_averaged)

    def leave(self) -> list[ManagedGroup]:
        """The backward is over. Returns the groups that no other backward uses."""
        left = [group for group in self.groups.values() if group.leave_backward()]
        self.groups.clear()
        return left


class BackwardPass:
    """Follows a backward by visits and by hooks on parameters: opens and closes groups, and takes their gradients.

    Args:
        residency: Opens and closes the groups.
        gradients: Takes finished gradients to the host.
        finisher: Updates chunks whose gradients are complete; used in backward only. None if no optimizer steps through the
            session.
        loss: Asked at the start of each backward.
        gradient_watch: Asked there about the backward before.
        lost_step: Told of a backward that broke off.
        average: Averages the gradients over several ranks; None where there is one.
        observer: Asked at each opening and closing of a window; None costs nothing.
        lock: Shared with the forward pass.
        switch: Between the devices of a replicated model; None where there is one.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        gradients: GradientSink,
        recorder: Recorder,
        schedule: Schedule,
        *,
        finisher: Finisher | None,
        loss: LossJudge,
        gradient_watch: GradientWatch,
        lost_step: LostStep,
        average: GradientAverage | None,
        observer: StepObserver | None,
        lock: SessionLock,
        switch: DeviceSwitch | None = None,
    ) -> None:
        self._switch = switch
        self._whole: int | None = None
        """The backward of which the present one is a part, on one of several devices."""
        self._has_more_parts = False
        """Whether another part follows, so that no gradient is complete."""
        self._lost_step = lost_step
        self._average = average
        self._finisher = finisher
        self._dropped: dict[int, str] = {}
        """Names of parameters whose gradients the last backward dropped, by their `id`; `step()` does not forget them."""
        self._groups = residency.groups
        self._residency = residency
        self._mover = mover
        self._gradients = gradients
        self._recorder = recorder
        self._schedule = schedule
        self._updates_in_backward = schedule is Schedule.IN_BACKWARD and finisher is not None
        self._loss = loss
        self._gradient_watch = gradient_watch
        self._observer = observer
        self._lock = lock
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._tasks: dict[int, BackwardTask] = {}
        self._visit_started: dict[int, Ticket] = {}
        self._is_stopped = False

    @property
    def is_under_way(self) -> bool:
        """Whether a backward has begun and not ended, well or not."""
        return bool(self._tasks)

    @property
    def is_stopped(self) -> bool:
        """Whether the session has ended."""
        return self._is_stopped

    def watch_gradients(self) -> None:
        """Hook the parameters whose gradients are not simply left to autograd: `_on_gradient` is called when one is complete."""
        for group in self._groups.values():
            if (
                group.is_resident
                and self._schedule is Schedule.DEFERRED
                and self._average is None
                and not any(managed.host_gradient is not None for managed in group.members)
            ):
                continue
            for managed in group.members:
                if managed.parameter.requires_grad:
                    self._hooks.append(managed.watch(_hook_on_gradient(self, group, managed)))
                    if group.is_resident and managed.host_gradient is not None:
                        before = _hook_before_gradient(self, group)
                        self._hooks.append(managed.parameter.register_hook(before))
        for member in () if self._average is None else self._average.members:
            if member.owner is None:
                hook = _hook_on_loose_gradient(self)
                self._hooks.append(member.parameter.register_post_accumulate_grad_hook(hook))

    def watch_output(self, output: object) -> None:
        """Notice a backward as soon as it reaches an output of the model: weights that are left to autograd may have gradients
        before it comes to a window.
        """
        watch_nodes(output, self._on_output_gradient)

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self._is_stopped = True
        while self._hooks:
            # Forgotten only after it is removed: an exception in between must not lose it.
            self._hooks[-1].remove()
            self._hooks.pop()

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
        for group, generation, shown in visit.groups_as_used:
            if group.consumed or group.generation != generation:
                refuse_old_weights(group, generation)
            if not group.points_to_device or group.shown_memory != shown:
                refuse_backward_through_other_memory(group, shown)
        self._recorder.phase = "backward"
        if task.late:
            self._close_late(task)
        for other in tuple(task.open_visits):
            # Whatever was made later has run by now, or never will: see Note [When a group's backward starts and ends].
            if other.first_node >= visit.next_node:
                self._end_visit(task, other)
        visit.backward = task.number
        self._residency.open_all(window.groups)
        for group in window.groups:
            task.enter(group)
        visit.is_open = True
        task.open_visits.append(visit)
        if self._finisher is not None and self._updates_in_backward and not self._has_more_parts:
            self._finisher.prefetch(window.groups)
        self._visit_started[id(visit)] = self._mover.now()
        if self._observer is not None:
            self._observer.take_sample(window.name, "backward")

    @locked
    def passed(self, visit: Visit) -> None:
        """The oldest node of a module's call has run: the backward has passed the call."""
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
                group.leave(visit)
                if group.has_complete_chunk():
                    self._finish(group, task, is_last=False)
        finally:
            started = self._visit_started.pop(id(visit))
            if visit.window.groups:
                ended = self._mover.now()
                self._recorder.on_compute(visit.window.groups[0].name, "backward", started, ended)
                for group in visit.window.groups:
                    if self._stays_open(group):
                        task.late.append(group)
                    else:
                        self._residency.close(group, ended)

    def _stays_open(self, group: ManagedGroup) -> bool:
        """Whether something comes with the group's last gradients that needs its weights on the device."""
        if self._has_more_parts:
            return group.awaits_hooks
        return group.awaits_hooks or (self._updates_in_backward and group.awaits_update_on_device())

    def close_late(self) -> None:
        """A checkpoint calls modules again in this backward: groups that stayed open for a last gradient have had it."""
        for task in self._tasks.values():
            if task.number == self._number():
                self._close_late(task)

    def _close_late(self, task: BackwardTask) -> None:
        """Close the groups that stayed open. Autograd accumulates gradients of a module's oldest node right after that node, before
        anything else, so their hooks have run by now.
        """
        while task.late:
            group = task.late.pop()
            try:
                if group.awaits_hooks:
                    group.stop_awaiting_hooks()
                    self._keep_writes(group)
            finally:
                self._residency.close(group)

    # -- told by parameters --------------------------------------------------------------------------------------------

    @locked
    def _before_gradient(self, group: ManagedGroup, gradient: torch.Tensor) -> None:
        """Enter the group before its first gradient, so that what the host has of it is set aside: resident weights may be used
        outside of their module's call.
        """
        del gradient
        if group.num_tasks == 0 and compat.backward_number() is not None:
            refuse_old_weights(group, group.generation)
            self._current_task(None).enter(group)

    @locked
    def _on_gradient(self, group: ManagedGroup, managed: ManagedParameter, parameter: torch.Tensor) -> None:
        """Autograd has finished a gradient: send it to the host, or drop it, and update the chunk if that was the chunk's last
        gradient.
        """
        if group.num_tasks == 0:
            if not group.is_resident:
                # Used outside its module's call, on the host: autograd has put the gradient where it belongs.
                if self._average is not None:
                    self._current_task(None)
                return
            task = self._current_task(None if group.is_consumed else parameter.grad)
            refuse_old_weights(group, group.generation)
            task.enter(group)
        else:
            task = self._current_task(None)
        if self._updates_in_backward and torch.is_grad_enabled():
            raise graph_through_used_up(group)
        if managed.chunk.spec.name in group.consumed:
            refuse_old_weights(group, group.generation)
        if managed.may_be_written():
            self._note_hooks(group, managed, task)
        if self._average is not None and self._average.is_on:
            self._place_averages(self._average.take(parameter), task)
            return
        if not managed.is_spread:  # else it waits at the parameter for a backward that exchanges it
            self._take_gradient(group, managed, task)

    @locked
    def _on_loose_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd has finished a gradient that no chunk has."""
        task = self._current_task(None)
        if self._average is not None and self._average.is_on:
            self._place_averages(self._average.take(parameter), task)

    def _place_averages(self, arrived: Iterable[tuple[Averaged, torch.Tensor]], task: BackwardTask) -> None:
        """Gradients are averaged over the ranks: from here on they are as if this rank had made them."""
        for member, gradient in arrived:
            if member.owner is None:
                member.parameter.grad = gradient
                continue
            group, managed = member.owner
            task.enter(group)
            if managed.is_spread:
                self._take_piece(group, managed, gradient, task)
                continue
            # A group that this rank has not used looks at the host.
            is_away = managed.parameter.device != gradient.device
            if is_away:
                self._residency.open(group)
            try:
                managed.take_average(gradient)
                self._take_gradient(group, managed, task)
            finally:
                if is_away:
                    self._residency.close(group)

    def _exchange_the_rest(self, task: BackwardTask) -> None:
        """The backward is over: the other ranks may have gradients where this one has none."""
        if self._average is None or not self._average.is_in_backward or len(self._tasks) > 1:
            return
        for member in self._average.missing():
            if member.owner is not None:
                task.enter(member.owner[0])
        self._place_averages(self._average.finish(), task)

    def _take_gradient(self, group: ManagedGroup, managed: ManagedParameter, task: BackwardTask) -> None:
        """The gradient at the parameter is the one to be taken."""
        parameter = managed.parameter
        if managed.host_gradient is not None:
            with compat.without_torch_function():
                gradient = parameter.grad
            if gradient is None:
                managed.host_gradient.drop()  # a hook of the user's has used it up, with what was there before
                return
            if self._is_dropped(parameter):
                parameter.grad = None
                managed.host_gradient.drop()
                group.drop_gradient(managed.spec.name)
                self._dropped[id(parameter)] = managed.spec.name
            else:
                refuse_sparse_gradient(gradient, managed.spec.name)
                parameter.grad = None
                self._gradients.take(managed.host_gradient, gradient)
        if group.count_gradient(managed):
            self._finish(group, task, is_last=False)

    def _take_piece(
        self, group: ManagedGroup, managed: ManagedParameter, gradient: torch.Tensor, task: BackwardTask
    ) -> None:
        """This rank's piece of an average has arrived, which is empty if it has none."""
        if self._is_dropped(managed.parameter):
            group.drop_gradient(managed.spec.name)
            self._dropped[id(managed.parameter)] = managed.spec.name
            if managed.host_gradient is not None:
                managed.host_gradient.drop()
        elif managed.host_gradient is not None:
            self._gradients.take(managed.host_gradient, gradient)
        else:
            managed.add_piece(gradient)
        if group.count_gradient(managed):
            self._finish(group, task, is_last=False)

    def _note_hooks(self, group: ManagedGroup, managed: ManagedParameter, task: BackwardTask) -> None:
        """Hooks of the user's on the gradient have run, and may have written to the weights on the device."""
        # A write past autograd (`p.data.add_(...)`) cannot be seen. If nobody else updates the parameter, its hooks do.
        is_theirs = self._finisher is None or not self._finisher.updater.optimizer.knows(managed.parameter)
        group.note_hooks(managed, has_written=managed.is_written() or is_theirs)
        self._keep_writes(group)
        if group in task.late and not self._stays_open(group):
            task.late.remove(group)
            self._residency.close(group)

    def _keep_writes(self, group: ManagedGroup) -> None:
        """Copy what hooks wrote to where the true values are, for each chunk all of whose hooks have run."""
        for chunk in group.written_by_hooks():
            self._residency.keep_write(group, chunk)

    # -- one backward --------------------------------------------------------------------------------------------------

    def _number(self) -> int | None:
        """The backward that runs; the parts of one count as the whole."""
        return compat.backward_number() if self._whole is None else self._whole

    def _current_task(self, gradient: torch.Tensor | None) -> BackwardTask:
        number = compat.backward_number() if self._whole is None else self._whole
        assert number is not None
        task = self._tasks.get(number)
        if task is None:
            self._refuse_second_thread()
            if not self._tasks:
                self._dropped.clear()
                if self._average is not None:
                    self._average.begin()
            is_averaged = self._average is not None and self._average.is_on
            task = self._tasks[number] = BackwardTask(number, self._callers(), is_averaged=is_averaged)
            self._recorder.phases.backward_begins(number)
            if self._finisher is not None:
                self._finisher.updater.begin_step()
                self._finisher.updater.optimizer.refresh_groups()  # one may have been added since the last step
            compat.call_after_backward(partial(self._end_task, number))
            if self._loss.has_verdict and not self._has_gradients():
                # The user gave the step before up by clearing its gradients, not through the optimizer.
                self._loss.forget()
            # These may raise, so they come last: the task is known by then, and the step counts as lost. The gradients are
            # checked before the loss, because they would explain a loss that is NaN.
            self._gradient_watch.check(waits=True)
            self._loss.judge(gradient)
        return task

    @locked
    def _end_task(self, number: int) -> None:
        task = self._tasks[number]
        for visit in list(task.open_visits):
            self._end_visit(task, visit)
        self._close_late(task)
        self._exchange_the_rest(task)
        self._gradients.send()
        around = None if self._average is None else self._task_around(task)
        for group in task.groups.values():
            self._finish(group, task, is_last=around is None)
        # Only now: if an update above raises, the backward must still count as broken off.
        del self._tasks[number]
        if around is not None:
            for group in task.groups.values():
                around.enter(group)
        if self._finisher is not None:
            self._finisher.updater.optimizer.dismiss()
        for group in task.leave():
            self._show_host(group)
            self._residency.guard(group)
        self._residency.settle_held()
        self._gradient_watch.send()
        self._residency.store.prefetch()
        self._recorder.phases.backward_ends(number)
        HELD_INTERRUPTS.restore_handler()

    # -- parts of a backward, on several devices -----------------------------------------------------------------------

    @locked
    def begin_part(self, *, has_more: bool) -> None:
        """A part of the running backward begins, as a backward of its own. Gradients are complete with the last part."""
        if self._whole is None:
            self._whole = compat.backward_number()
        task = self._tasks.get(self._whole) if self._whole is not None else None
        if self._has_more_parts and task is not None:
            for group in task.groups.values():
                group.await_gradients()
        self._has_more_parts = has_more

    @locked
    def end_part(self) -> None:
        """It has run: close its groups, which the next part opens on another device."""
        task = self._tasks.get(self._whole) if self._whole is not None else None
        if task is None:
            return  # weights that are left to autograd
        for visit in list(task.open_visits):
            self._end_visit(task, visit)
        self._close_late(task)
        self._gradients.send()

    def end_parts(self) -> None:
        """All parts have run, or one has raised."""
        self._whole, self._has_more_parts = None, False

    def _task_around(self, task: BackwardTask) -> BackwardTask | None:
        """The backward in which this one ran, as a checkpoint's with use_reentrant=True does: gradients of this one may wait for
        it, before they are sent to the other ranks. None for one process.
        """
        if self._average is None or not self._average.is_in_backward:
            return None
        return next((other for other in self._tasks.values() if other is not task), None)

    @locked
    def check_broken(self) -> None:
        """Put everything back where it belongs, if something broke off. If that was a backward, the step is lost.

        Does nothing while a call is under way. See Note [After an exception]. May be repeated.
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
        """Start afresh from the true copies."""
        self._lock.broke_off()  # in case this is itself interrupted
        if self._average is not None:
            self._average.break_off("an exception in a backward")
        self._gradients.abandon(
            [managed.host_gradient for managed in members_of(self._groups) if managed.host_gradient is not None],
            chunks_in(self._groups.values()),
        )
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
        if self._finisher is not None:
            self._finisher.updater.optimizer.dismiss()
        self._tasks.clear()
        if self._switch is not None:
            self._switch.return_home()
        self._lock.put_in_order()

    def lose_step(self, moved: Iterable[ManagedGroup], where: str = "the backward of this step") -> None:
        """The step broke off there after these groups moved: `step()` refuses until the user gives it up."""
        labels = sorted({group.label for group in moved})
        is_whole = all(len(group.consumed) == len(group.stored.chunks) for group in self._groups.values())
        self._lost_step.lose(labels, len(self._groups), where, is_torn=self._is_torn, is_whole=is_whole)

    def has_broken_off(self) -> bool:
        """Whether the last backward raised, and the user has not given the step up since."""
        if not self._tasks:
            return self._lost_step.reason is not None
        return compat.backward_number() is None and self._thread_beside() is None

    def why_mixed(self) -> str | None:
        """Says which groups a backward that broke off has moved; None if it moved none, or no backward broke off."""
        moved = sorted(group.label for group in self._groups.values() if group.is_consumed)
        if not moved or not self.has_broken_off():
            return None
        return why_step_is_lost(moved, len(self._groups), is_torn=self._is_torn)

    def refuse_dropped(self, other: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer that is not the session's, where the last backward dropped its gradients."""
        parameters = (
            [parameter for group in other.param_groups for parameter in group["params"]] if self._dropped else []
        )
        with compat.without_torch_function():
            # A parameter that has a gradient got it in another way.
            lost = [self._dropped[id(each)] for each in parameters if id(each) in self._dropped and each.grad is None]
        if lost:
            raise GradientGoneError(
                f"this {type(other).__name__} holds {len(lost)} parameters (the first is {lost[0]}) of a managed model whose "
                "own optimizer does not hold them: the schedule 'in_backward' has dropped their gradients, and the step would "
                "leave them as they are. Use the schedule 'deferred', or give them to the session's optimizer as a group of "
                "its own. Nothing of them was updated"
            )

    @property
    def _is_torn(self) -> bool:
        """Whether an update on the device broke off in the middle."""
        return self._finisher is not None and self._finisher.updater.is_torn

    def refuse_beside(self, what: str) -> None:
        """Refuse what this thread begins while another runs a backward. See Note [Threads] in `passes.lock`."""
        running = self._thread_beside() if compat.backward_number() is None else None
        if running is not None:
            raise two_threads(what, running, "a backward")

    def _thread_beside(self) -> int | None:
        """Another thread that is in a backward of this session; None if its backwards are this thread's, or have broken off."""
        callers = {number for task in self._tasks.values() for number in task.callers}
        return min(callers & other_threads_in_backward(), default=None) if callers else None

    def _callers(self) -> set[int]:
        """Threads that may have called the backward that begins: on CUDA hooks run in autograd's own threads, not in the caller."""
        return other_threads_in_backward() if self._mover.device.type == "cuda" else {threading.get_ident()}

    def _refuse_second_thread(self) -> None:
        """Refuse a backward beside another thread's. On CUDA, two at once cannot be told from one inside of the other."""
        running = self._thread_beside() if self._mover.device.type == "cpu" else None
        is_beside_call = self._lock.is_taken_elsewhere() and not other_threads_in_backward()
        if running is None and not is_beside_call:
            return
        # Autograd may have added gradients of this backward to those of the other thread's step by now.
        self._lost_step.lose_to_thread(has_moved=self._schedule is Schedule.IN_BACKWARD)
        if running is not None:
            raise two_threads("a backward", running, "another")
        self._lock.refuse_beside("a backward")

    def _finish(self, group: ManagedGroup, task: BackwardTask, *, is_last: bool) -> None:
        if self._finisher is not None and self._updates_in_backward and not self._has_more_parts:
            self._finisher.finish(group, task.number, is_last=is_last)

    def _is_dropped(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient is dropped: in backward, if the optimizer does not hold the parameter. No update would ever free its
        staging.
        """
        if self._finisher is None or not self._updates_in_backward:
            return False
        return not self._finisher.updater.optimizer.knows(parameter)

    def _show_host(self, group: ManagedGroup) -> None:
        """No backward uses the group any more: show the user its weights and gradients on the host."""
        group.point_to_host()
        self._show_gradients(group)

    def _show_gradients(self, group: ManagedGroup) -> None:
        for managed in group.members:
            if managed.host_gradient is not None:
                self._gradients.show(managed.host_gradient, managed.host_view, is_resident=group.is_resident)
            managed.forget_gradient()

    def _has_gradients(self) -> bool:
        return any(managed.parameter.grad is not None for group in self._groups.values() for managed in group.members)


def _hook_on_gradient(
    backward: BackwardPass, group: ManagedGroup, managed: ManagedParameter
) -> Callable[[torch.Tensor], None]:
    """`_on_gradient` as a hook on a parameter. It refers to nothing strongly: Python's collector does not see the references of
    such hooks, and a session that is forgotten with its model would live for ever.
    """
    weak_backward, weak_group, weak_managed = weakref.ref(backward), weakref.ref(group), weakref.ref(managed)

    def hook(parameter: torch.Tensor) -> None:
        told, used, changed = weak_backward(), weak_group(), weak_managed()
        if told is not None and used is not None and changed is not None:
            told._on_gradient(used, changed, parameter)

    return hook


def _hook_on_loose_gradient(backward: BackwardPass) -> Callable[[torch.Tensor], None]:
    """`_on_loose_gradient` as a hook on a parameter, with a weak reference too."""
    weak_backward = weakref.ref(backward)

    def hook(parameter: torch.Tensor) -> None:
        told = weak_backward()
        if told is not None:
            told._on_loose_gradient(parameter)

    return hook


def _hook_before_gradient(backward: BackwardPass, group: ManagedGroup) -> Callable[[torch.Tensor], None]:
    """`_before_gradient` as a hook on a parameter, with weak references too."""
    weak_backward, weak_group = weakref.ref(backward), weakref.ref(group)

    def hook(gradient: torch.Tensor) -> None:
        told, used = weak_backward(), weak_group()
        if told is not None and used is not None:
            told._before_gradient(used, gradient)

    return hook


def refuse_old_weights(group: ManagedGroup, generation: int) -> None:
    """Refuse a backward through the weights of a generation, if they were updated since."""
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


def refuse_backward_through_other_memory(group: ManagedGroup, shown: tuple[int, ...]) -> None:
    """Refuse a backward through streamed weights whose parameters had other memory in the forward."""
    group.adopt_foreign_data()
    if not group.is_resident and group.shown_memory != shown:
        raise StaleBackwardError(
            f"this backward goes through the weights of group {group.label} as they were before p.data was set to other memory, "
            "and they are not on the device any more; set p.data before the forward or after the backward, or make the group "
            "resident. Nothing was updated"
        )


def session_was_closed(window: Window) -> SessionError:
    """The error for a graph that has outlived the session of its streamed weights."""
    return SessionError(
        f"this backward goes through the streamed weights of {window.path or 'the model'} in a session that was "
        "closed since; they are gone. Run the forward again: the model is plain now, and nothing was updated"
    )


def graph_through_streamed(window: Window) -> HigherOrderError:
    """The error for gradients of gradients: they would need weights that have left the device."""
    return HigherOrderError(
        f"create_graph=True asks for gradients of gradients through {window.path or 'the model'}, whose "
        "weights are streamed and gone by then; make its group resident. Nothing was updated"
    )


def graph_through_used_up(group: ManagedGroup) -> HigherOrderError:
    """The error for gradients of gradients: they would need gradients that the update has used up."""
    return HigherOrderError(
        f"backward(create_graph=True) keeps gradients for more gradients, and the schedule 'in_backward' uses up "
        f"those of group {group.label} at once; use the schedule 'deferred' with resident groups, or "
        "torch.autograd.grad(create_graph=True). Nothing was updated"
    )
