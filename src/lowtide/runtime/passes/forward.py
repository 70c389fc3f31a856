"""ForwardPass: opens groups when their modules are called, and closes them when the call returns.

Also when a checkpoint calls a module again in the middle of a backward, in the thread of autograd then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from lowtide import compat
from lowtide.memory.eviction import AccessOrder
from lowtide.memory.mover import Mover
from lowtide.runtime.parallel import refuse_running_wrapper
from lowtide.runtime.parameters.group import ManagedGroup
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.passes.backward import BackwardPass
from lowtide.runtime.passes.lock import HELD, SessionLock, locked
from lowtide.runtime.passes.window import Call, Window
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.finite import GradientWatch, LossWatch
from lowtide.runtime.updates.worker import HostWorker


class ForwardPass:
    """Told by windows when their modules are called.

    Args:
        residency: Opens and closes the groups.
        backward: Asked whether the last one broke off.
        loss: Told what the model returned.
        gradient_watch: Asked at the start of each call whether it knows of gradients that were not finite.
        observer: Asked at each opening and closing of a window; None costs nothing.
        lock: Shared with the backward pass.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        worker: HostWorker,
        recorder: Recorder,
        *,
        backward: BackwardPass,
        loss: LossWatch,
        gradient_watch: GradientWatch,
        observer: StepObserver | None,
        lock: SessionLock,
    ) -> None:
        self.windows: Sequence[Window] = ()
        """Those that tell it; set when they are made."""
        self._residency = residency
        self._mover = mover
        self._worker = worker
        self._recorder = recorder
        self._backward = backward
        self._loss = loss
        self._gradient_watch = gradient_watch
        self._observer = observer
        self._lock = lock
        self._running: list[Call] = []
        self._orders: dict[tuple[bool, bool], AccessOrder] = {}
        self._used: set[str] | None = None
        """Groups that this forward has used so far; None unless the whole model was called to be trained."""
        self.was_called = False
        """Whether the model, or a module of it, has been called at all."""
        self.has_raised = False
        """Whether the last call of the model, or the last step, has raised."""

    @property
    def is_under_way(self) -> bool:
        """Whether a module is being called."""
        return bool(self._running)

    @locked
    def begins(self, call: Call) -> None:
        """Open the module's groups."""
        window = call.window
        is_in_backward = compat.backward_number() is not None
        if not is_in_backward and not self._running:
            self._backward.check_broken()
            self._worker.check()
            self._gradient_watch.check(waits=False)
            if window.path == "" and not window.is_given:
                self._begin_cycle(window)
            self._recorder.phases.enter("forward")
        # Before the groups are: `ends` finds it there whatever happens.
        self._running.append(call)
        self._recorder.phase = "backward" if is_in_backward else "forward"
        for group in window.groups:
            group.check_unchanged(may_be_given=window.is_given)
        self._residency.open_all(window.groups)
        if not is_in_backward:
            for group in window.groups:
                self._note_first_use(group)
                if group.stored.num_open == 1:
                    group.remember_versions()
        call.started = self._mover.now()
        if self._observer is not None:
            self._observer.take_sample(window.name, self._recorder.phase)

    def ends(self, call: Call) -> None:
        """Close them, where they were opened."""
        if not call.is_over:
            self._end(call)

    @locked
    def _end(self, call: Call) -> None:
        if self._lock.is_broken or call.started is None:
            self._give_up(call)
        else:
            try:
                if self._observer is not None:
                    self._observer.take_sample(call.window.name, self._recorder.phase)
            finally:
                self._leave(call)
        call.is_over = True

    def forget_calls(self) -> None:
        """The session ends, or starts afresh: whatever is under way will find nothing to close."""
        self._running.clear()

    def call_begins(self) -> None:
        """Refuse a call beside one of another thread. One in a backward is of a checkpoint, and belongs to it."""
        # Most calls are of modules inside of one that has asked.
        if not self._lock.is_in_call() and compat.backward_number() is None:
            self._backward.refuse_beside("a forward")
            self._lock.begin_call("a forward")

    def call_over(self, went_well: bool) -> None:
        """Remember whether the last call raised. One inside of another, or in a backward, says nothing by going well."""
        self.was_called = True
        if compat.backward_number() is not None:
            return
        if not self._running:
            self._lock.end_call()
        if not (went_well and self._running):
            self.has_raised = not went_well

    def model_returned(self, output: object) -> None:
        """Remember the loss, if the model computes it: a step on a loss that is not finite is refused."""
        if compat.backward_number() is not None:
            return
        if torch.is_grad_enabled():
            self._loss.remember(output)
            self._backward.watch_output(output)
            return
        self._loss.forget_loss()
        if not self._running and not self._backward.is_under_way:
            self._residency.rest()

    def _leave(self, call: Call) -> None:
        window = call.window
        running = self._running[-1]
        assert running is call, f"the call of {window.path} ended before that of {running.window.path} inside it"
        assert call.started is not None
        if window.groups:
            ended = self._mover.now()
            self._recorder.on_compute(window.groups[0].name, self._recorder.phase, call.started, ended)
            is_in_backward = compat.backward_number() is not None
            for group in window.groups:
                if not is_in_backward and group.stored.num_open == 1:
                    self._residency.keep_writes(group)
                self._residency.close(group, ended)
        self._running.pop()
        self._rest()

    def _give_up(self, call: Call) -> None:
        """Something broke off in this call, or in one inside of it: when the outermost is left, all is put in order."""
        while call in self._running:
            self._running.pop()
        if compat.backward_number() is None and call.started is not None:
            for group in call.window.groups:
                # What the module wrote to its own weights before it raised is kept, as in plain torch.
                with contextlib.suppress(Exception):
                    self._residency.keep_writes(group)
        if not self._running and compat.backward_number() is None:
            self._backward.check_broken()
        self._rest()

    def _rest(self) -> None:
        """The forward is over, unless this was a module inside of another."""
        if not self._running and compat.backward_number() is None:
            self._recorder.phases.leave("forward")
            HELD.rest()

    def _note_first_use(self, group: ManagedGroup) -> None:
        """The host updates groups in the order in which a forward first uses them, which modules need not be listed in."""
        if self._used is not None and group.name not in self._used:
            group.place = len(self._used)
            self._used.add(group.name)

    def _begin_cycle(self, window: Window) -> None:
        """The whole model is called: check that it is the managed one, and count a step."""
        window.check_parameters()
        refuse_running_wrapper(window.module.parameters())
        for other in self.windows:
            other.check_in_place()
        for group in self._residency.groups.values():
            if group.is_resident:  # others are asked when their own windows open
                group.check_unchanged()
        self._used = set() if torch.is_grad_enabled() else None
        key = (window.module.training, torch.is_grad_enabled())
        store = self._residency.store
        store.order.end_cycle()
        store.order = self._orders.setdefault(key, store.order if not self._orders else AccessOrder())
        self._recorder.begin_step()
