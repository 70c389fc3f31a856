"""ForwardPass: opens groups when their modules are called, and closes them when the call returns.

Also when a checkpoint calls a module again in the middle of a backward, in the thread of autograd then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from lowtide import compat
from lowtide.memory.access_order import AccessOrder
from lowtide.memory.mover import Mover, Ticket
from lowtide.runtime.alone import alone
from lowtide.runtime.backward_pass import BackwardPass
from lowtide.runtime.gradient_watch import GradientWatch
from lowtide.runtime.host_worker import HostWorker
from lowtide.runtime.loss_watch import LossWatch
from lowtide.runtime.observer import StepObserver
from lowtide.runtime.recording import Recorder
from lowtide.runtime.residency import Residency
from lowtide.runtime.window import Window


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
        lock: threading.RLock,
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
        self._running: list[tuple[Window, Ticket]] = []
        self._orders: dict[tuple[bool, bool], AccessOrder] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether a module is being called."""
        return bool(self._running)

    @alone
    def begins(self, window: Window) -> None:
        """Open the module's groups."""
        is_in_backward = compat.backward_number() is not None
        if not is_in_backward:
            self._backward.check_broken()
            self._worker.check()
            self._gradient_watch.check(waits=False)
            if window.path == "" and not self._running:
                self._begin_cycle(window)
            if not self._running:
                self._recorder.phases.enter("forward")
        self._recorder.phase = "backward" if is_in_backward else "forward"
        try:
            for unit in window.units:
                unit.check_unchanged()
            self._residency.open_all(window.units)
        except BaseException:
            self._rest()
            raise
        if not is_in_backward:
            for unit in window.units:
                if unit.group.num_open == 1:
                    unit.remember_versions()
        self._running.append((window, self._mover.now()))
        if self._observer is not None:
            try:
                self._observer.moment(window.name, self._recorder.phase)
            except BaseException:
                self._leave(window)  # the call is not made
                raise

    @alone
    def ends(self, window: Window) -> None:
        """Close them."""
        try:
            if self._observer is not None:
                self._observer.moment(window.name, self._recorder.phase)
        finally:
            self._leave(window)

    def model_returned(self, output: object) -> None:
        """Remember the loss, if the model computes it: a step on a loss that is not finite is refused."""
        if compat.backward_number() is not None:
            return
        if torch.is_grad_enabled():
            self._loss.remember(output)
            self._recorder.phases.watch_backward(output)
            return
        self._loss.forget_loss()
        if not self._running and not self._backward.is_under_way:
            self._residency.rest()

    def _leave(self, window: Window) -> None:
        running, started = self._running.pop()
        assert running is window, f"the call of {window.path} ended before that of {running.path} inside it"
        if window.units:
            self._recorder.on_compute(window.units[0].name, self._recorder.phase, started, self._mover.now())
        for unit in window.units:
            if compat.backward_number() is None and unit.group.num_open == 1:
                self._residency.keep_writes(unit)
            self._residency.close(unit)
        self._rest()

    def _rest(self) -> None:
        """The forward is over, unless this was a module inside of another."""
        if not self._running and compat.backward_number() is None:
            self._recorder.phases.leave("forward")

    def _begin_cycle(self, window: Window) -> None:
        """The whole model is called: check that it is the managed one, and count a step."""
        window.check_parameters()
        for other in self.windows:
            other.check_in_place()
        for unit in self._residency.units.values():
            if unit.is_resident:  # others are asked when their own windows open
                unit.check_unchanged()
        key = (window.module.training, torch.is_grad_enabled())
        store = self._residency.store
        store.order.end_cycle()
        store.order = self._orders.setdefault(key, store.order if not self._orders else AccessOrder())
        self._recorder.begin_step()
