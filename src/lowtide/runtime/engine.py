"""Engine: carries out the plan. Opens and closes groups around module calls and backwards, and starts updates.

Everything here runs in the thread of the training loop, or in autograd's while the loop waits for it; only host updates
run beside it. See `runtime.window` for when a group's backward starts and ends, `runtime.unit` for where parameters look.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from lowtide import compat
from lowtide.errors import (
    HigherOrderError,
    SecondBackwardError,
    SessionError,
    StaleBackwardError,
)
from lowtide.memory.access_order import AccessOrder
from lowtide.memory.mover import Mover, Ticket
from lowtide.planning.plan import Schedule
from lowtide.runtime.backward import BackwardTask, is_away
from lowtide.runtime.finishing import Finisher
from lowtide.runtime.gradients import GradientMover
from lowtide.runtime.host_worker import HostWorker
from lowtide.runtime.loss_watch import LossWatch
from lowtide.runtime.recording import Recorder
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Bound, Unit
from lowtide.runtime.window import Visit, Window

P = ParamSpec("P")
R = TypeVar("R")


def _weakly(method: Callable[..., None], *arguments: object) -> Callable[[torch.Tensor], None]:
    """The method as a hook on a parameter. It holds nothing: Python's collector does not see what such hooks hold, and a
    session that is forgotten with its model would live for ever.
    """
    weak_method = weakref.WeakMethod(method)
    weak_arguments = [weakref.ref(argument) for argument in arguments]

    def hook(tensor: torch.Tensor) -> None:
        call = weak_method()
        if call is not None:
            call(*(reference() for reference in weak_arguments), tensor)

    return hook


def _alone(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """One thread at a time is told what happened."""

    @wraps(method)
    def locked(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine._lock:
            return method(engine, *args, **kwargs)

    return locked


class Observer(Protocol):
    """Looks at the device's memory."""

    def moment(self, group: str, phase: str) -> None:
        """A group's window has opened or is about to close."""


class Engine:
    """See the module's docstring."""

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        gradients: GradientMover,
        worker: HostWorker,
        recorder: Recorder,
        schedule: Schedule,
    ) -> None:
        self.units = residency.units
        self.residency = residency
        self.loss = LossWatch(is_immediate=schedule is Schedule.IN_BACKWARD)
        self.mover = mover
        self.recorder = recorder
        self.schedule = schedule
        self.worker = worker
        self.finisher: Finisher | None = None
        """Set by `manage` where there is an optimizer."""
        self.windows: Sequence[Window] = ()
        self.observer: Observer | None = None
        """Asked at each opening and closing of a window; None costs nothing."""
        self.lost: str | None = None
        """Why the last step must be repeated; None where nothing broke."""
        self._gradients = gradients
        self._tasks: dict[int, BackwardTask] = {}
        self._orders: dict[tuple[bool, bool], AccessOrder] = {}
        self._running: list[tuple[Window, Ticket]] = []
        self._visit_started: dict[int, Ticket] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._is_stopped = False
        self._lock = threading.RLock()
        """Autograd runs nodes on the host in the loop's thread, beside those on the device in its own: where a loss has
        a part on the host, both reach hooks at once."""

    def watch_gradients(self) -> None:
        """Be told when a parameter's gradient is complete, where that is not simply left to autograd."""
        for unit in self.units.values():
            if unit.is_resident and self.schedule is Schedule.DEFERRED and not any(map(is_away, unit.bounds)):
                continue
            for bound in unit.bounds:
                if bound.parameter.requires_grad:
                    hook = _weakly(self._on_gradient, unit, bound)
                    bound.hook = bound.parameter.register_post_accumulate_grad_hook(hook)
                    self._handles.append(bound.hook)
                    if unit.is_resident and is_away(bound):
                        self._handles.append(bound.parameter.register_hook(_weakly(self._before_gradient, unit)))

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self._is_stopped = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- forward -------------------------------------------------------------------------------------------------------

    @_alone
    def forward_begins(self, window: Window) -> None:
        """Open the module's groups."""
        is_in_backward = compat.backward_number() is not None
        if not is_in_backward:
            self.check_broken()
            self.worker.check()
            if window.path == "" and not self._running:
                self._begin_cycle(window)
        self.recorder.phase = "backward" if is_in_backward else "forward"
        for unit in window.units:
            unit.check_unchanged()
        self.residency.open_all(window.units)
        if not is_in_backward:
            for unit in window.units:
                if unit.group.num_open == 1:
                    unit.remember_versions()
        self._running.append((window, self.mover.now()))
        if self.observer is not None:
            try:
                self.observer.moment(_name_of(window), self.recorder.phase)
            except BaseException:
                self._leave_forward(window)  # the call is not made
                raise

    @_alone
    def forward_ends(self, window: Window) -> None:
        """Close them."""
        try:
            if self.observer is not None:
                self.observer.moment(_name_of(window), self.recorder.phase)
        finally:
            self._leave_forward(window)

    def _leave_forward(self, window: Window) -> None:
        running, started = self._running.pop()
        assert running is window, f"the call of {window.path} ended before that of {running.path} inside it"
        if window.units:
            self.recorder.on_compute(window.units[0].name, self.recorder.phase, started, self.mover.now())
        for unit in window.units:
            if compat.backward_number() is None and unit.group.num_open == 1:
                self.residency.keep_writes(unit)
            self.residency.close(unit)

    def model_returned(self, window: Window, output: object) -> None:
        """Remember the loss, if the model computes it: a step on a loss that is not finite is refused."""
        del window
        if compat.backward_number() is not None:
            return
        if torch.is_grad_enabled():
            self.loss.remember(output)
            return
        self.loss.forget_loss()
        if not self._running and not self._tasks:
            self.residency.rest()

    # -- backward ------------------------------------------------------------------------------------------------------

    @_alone
    def backward_reached(self, visit: Visit, gradient: torch.Tensor) -> None:
        """A gradient arrived at a module's output: open its groups."""
        window = visit.window
        if self._is_stopped:
            if all(unit.is_resident for unit in window.units):
                return
            raise SessionError(
                f"this backward goes through the streamed weights of {window.path or 'the model'} in a session that was "
                "closed since; they are gone. Run the forward again: the model is plain now, and nothing was updated"
            )
        task = self._current_task(gradient)
        if torch.is_grad_enabled() and any(not unit.is_resident for unit in window.units):
            raise HigherOrderError(
                f"create_graph=True asks for gradients of gradients through {window.path or 'the model'}, whose "
                "weights are streamed and gone by then; make its group resident. Nothing was updated"
            )
        if visit.backward == task.number and visit.is_open:
            return
        for unit, generation in zip(window.units, visit.generations, strict=True):
            self._refuse_old_weights(unit, generation)
        self.recorder.phase = "backward"
        for other in list(task.open_visits):
            # Whatever was made later has run by now, or never will: see Note [When a group's backward starts and ends].
            if other.first_node >= visit.next_node:
                self._end_visit(task, other)
        visit.backward = task.number
        self.residency.open_all(window.units)
        for unit in window.units:
            task.enter(unit)
        visit.is_open = True
        task.open_visits.append(visit)
        if self.schedule is Schedule.IN_BACKWARD and self.finisher is not None:
            self.finisher.prefetch(window.units)
        self._visit_started[id(visit)] = self.mover.now()
        if self.observer is not None:
            self.observer.moment(_name_of(window), "backward")

    @_alone
    def backward_left(self, visit: Visit) -> None:
        """The oldest node of a module's call has run: its backward is over."""
        task = self._tasks.get(visit.backward) if visit.backward is not None else None
        if task is not None and visit.is_open:
            self._end_visit(task, visit)

    @_alone
    def _before_gradient(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Of resident weights that the host updates: outside of their module's call too, what the host has is set aside."""
        del gradient
        if unit.num_tasks == 0 and compat.backward_number() is not None:
            self._refuse_old_weights(unit, unit.generation)
            self._current_task(None).enter(unit)

    @_alone
    def _on_gradient(self, unit: Unit, bound: Bound, parameter: torch.Tensor) -> None:
        if unit.num_tasks == 0:
            if not unit.is_resident:
                return  # used outside its module's call, on the host: autograd has put the gradient where it belongs
            task = self._current_task(None if unit.is_consumed else parameter.grad)
            self._refuse_old_weights(unit, unit.generation)
            task.enter(unit)
        task = self._current_task(None)
        if torch.is_grad_enabled() and self.schedule is Schedule.IN_BACKWARD:
            raise HigherOrderError(
                f"backward(create_graph=True) keeps gradients for more gradients, and the schedule 'in_backward' uses up "
                f"those of group {unit.label} at once; use the schedule 'deferred' with resident groups, or "
                "torch.autograd.grad(create_graph=True). Nothing was updated"
            )
        if bound.chunk.spec.name in unit.consumed:
            self._refuse_old_weights(unit, unit.generation)
        if is_away(bound):
            self._gradients.take(bound)
        bound.has_fired = True
        self._finish(unit, task, is_last=False)

    def _end_visit(self, task: BackwardTask, visit: Visit) -> None:
        if self.observer is not None:
            self.observer.moment(_name_of(visit.window), "backward")
        visit.is_open = False
        task.open_visits.remove(visit)
        try:
            for unit in visit.window.units:
                unit.visits.discard(visit)
                self._finish(unit, task, is_last=False)
        finally:
            started = self._visit_started.pop(id(visit))
            if visit.window.units:
                self.recorder.on_compute(visit.window.units[0].name, "backward", started, self.mover.now())
            for unit in visit.window.units:
                self.residency.close(unit)

    @_alone
    def _end_task(self, number: int) -> None:
        task = self._tasks[number]
        for visit in list(task.open_visits):
            self._end_visit(task, visit)
        for unit in task.units.values():
            self._finish(unit, task, is_last=True)
        # Not before: what an update raises is the end of a backward that broke off.
        del self._tasks[number]
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        for unit in task.leave():
            unit.look_at_host()
            for bound in unit.bounds:
                if is_away(bound) and self.schedule is Schedule.DEFERRED:
                    self._gradients.expose(bound)
                bound.has_fired = False
            self.residency.guard(unit)
        self.residency.store.prefetch()

    # -- between steps -------------------------------------------------------------------------------------------------

    @_alone
    def check_broken(self) -> None:
        """After a backward that raised: put everything back where it belongs, and remember that the step is lost."""
        if compat.backward_number() is not None or not self._tasks:
            return
        moved = sorted(unit.label for unit in self.units.values() if unit.is_consumed)
        for task in list(self._tasks.values()):
            for visit in list(task.open_visits):
                visit.is_open = False
                task.open_visits.remove(visit)
                self._visit_started.pop(id(visit), None)
                for unit in visit.window.units:
                    self.residency.close(unit)
            for unit in task.leave():
                unit.look_at_host()
                for bound in unit.bounds:
                    if is_away(bound) and self.schedule is Schedule.DEFERRED:
                        self._gradients.expose(bound)
                    bound.has_fired = False
                if not unit.is_resident and not unit.group.num_open:
                    # An update that broke off may have left its traces in the copy; the host has the truth.
                    self.residency.store.drop(unit.name)
                self.residency.guard(unit)
        self._tasks.clear()
        if self.finisher is not None:
            self.finisher.updater.optimizer.dismiss()
        self.residency.store.order.forget_cycle()
        if moved:
            self.lost = (
                "the backward of this step raised after it had updated "
                f"{len(moved)} of {len(self.units)} groups ({', '.join(moved[:8])}{', ...' if len(moved) > 8 else ''}); "
                "these have taken the step, the others have not. Load a checkpoint, or call zero_grad() to go on"
            )
        else:
            self.lost = (
                "the backward of this step raised, so its gradients are incomplete; weights and optimizer are as "
                "before the step. Call zero_grad() and repeat the step"
            )

    def forget_step(self) -> None:
        """The user gave the step up or begins the next: whatever was wrong with the last one is over."""
        self.lost = None
        self.loss.forget()

    def is_idle(self) -> bool:
        """Whether no graph is alive and no window open."""
        if self._running or self._tasks or compat.backward_number() is not None:
            return False
        return not any(unit.visits or unit.group.num_open for unit in self.units.values())

    def is_quiet(self) -> bool:
        """Whether it is idle and no work on the host's memory is under way."""
        if not self.is_idle():
            return False
        for unit in self.units.values():
            if any(chunk.host_work is not None for chunk in unit.group.chunks):
                return False
            if unit.looks_at_device and not unit.is_resident:
                return False
            if any(not waiting.is_done() for bound in unit.bounds for waiting in bound.pending):
                return False
        self.mover.drain()
        return True

    @_alone
    def settle_unit(self, unit: Unit) -> None:
        """Somebody looks at a parameter: make its value true."""
        if unit.group.num_open:
            return
        if compat.backward_number() is None:
            self.check_broken()
        self.residency.settle(unit)

    def take_norms(self) -> None:
        """Take each gradient's norm on its way to the host."""
        self._gradients.takes_norms = True

    def veil_gradient(self, bound: Bound) -> None:
        """An update on the host reads the user's gradient: a look at it waits."""
        self._gradients.veil(bound)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _finish(self, unit: Unit, task: BackwardTask, *, is_last: bool) -> None:
        if self.schedule is Schedule.IN_BACKWARD:
            assert self.finisher is not None
            self.finisher.finish(unit, task.number, is_last=is_last)

    def _begin_cycle(self, window: Window) -> None:
        window.check_parameters()
        for other in self.windows:
            other.check_in_place()
        for unit in self.units.values():
            if unit.is_resident:  # others are asked when their own windows open
                unit.check_unchanged()
        key = (window.module.training, torch.is_grad_enabled())
        self.residency.store.order.end_cycle()
        self.residency.store.order = self._orders.setdefault(
            key, self.residency.store.order if not self._orders else AccessOrder()
        )
        self.recorder.begin_step()

    def _current_task(self, gradient: torch.Tensor | None) -> BackwardTask:
        number = compat.backward_number()
        assert number is not None
        task = self._tasks.get(number)
        if task is None:
            task = self._tasks[number] = BackwardTask(number)
            if self.finisher is not None:
                self.finisher.updater.optimizer.refresh_groups()  # one may have been added since the last step
            compat.call_after_backward(partial(self._end_task, number))
            if self.loss.has_verdict and not self._has_gradients():
                # The user gave the step before up by clearing its gradients, not through the optimizer.
                self.loss.forget()
            # Last: where it refuses the loss, the step is known to be lost.
            self.loss.judge(gradient)
        return task

    def _has_gradients(self) -> bool:
        return any(bound.parameter.grad is not None for unit in self.units.values() for bound in unit.bounds)

    def _refuse_old_weights(self, unit: Unit, generation: int) -> None:
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


def _name_of(window: Window) -> str:
    return window.units[0].name if window.units else window.path
