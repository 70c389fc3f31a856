"""Engine: carries out the plan. Has a forward and a backward pass over the same units, and answers between steps.

Everything here runs in the thread of the training loop, or in autograd's while the loop waits for it; only host updates
run beside it. See `runtime.forward_pass` and `runtime.backward_pass` for what opens and closes groups, `runtime.window`
for what tells them, `runtime.unit` for where parameters look.
"""

from __future__ import annotations

import threading

from lowtide import compat
from lowtide.memory.mover import Mover
from lowtide.planning.plan import Schedule
from lowtide.runtime.alone import alone
from lowtide.runtime.backward_pass import BackwardPass
from lowtide.runtime.forward_pass import ForwardPass
from lowtide.runtime.gradient_watch import GradientWatch
from lowtide.runtime.gradients import GradientMover
from lowtide.runtime.host_worker import HostWorker
from lowtide.runtime.loss_watch import LossWatch
from lowtide.runtime.observer import StepObserver
from lowtide.runtime.recording import Recorder
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Bound, Unit


class Engine:
    """See the module's docstring.

    Args:
        residency: Opens and closes the groups; knows the units.
        gradients: Takes finished gradients to the host.
        worker: Runs host updates.
        observer: Asked at each opening and closing of a window.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        gradients: GradientMover,
        worker: HostWorker,
        recorder: Recorder,
        schedule: Schedule,
        observer: StepObserver | None,
    ) -> None:
        self.units = residency.units
        self.residency = residency
        self.loss = LossWatch(is_immediate=schedule is Schedule.IN_BACKWARD)
        self.gradient_watch = GradientWatch(mover)
        self.mover = mover
        self.recorder = recorder
        self.schedule = schedule
        self.worker = worker
        self._gradients = gradients
        self._lock = threading.RLock()
        self.backward = BackwardPass(
            residency,
            mover,
            gradients,
            recorder,
            schedule,
            loss=self.loss,
            gradient_watch=self.gradient_watch,
            observer=observer,
            lock=self._lock,
        )
        self.forward = ForwardPass(
            residency,
            mover,
            worker,
            recorder,
            backward=self.backward,
            loss=self.loss,
            gradient_watch=self.gradient_watch,
            observer=observer,
            lock=self._lock,
        )

    @property
    def lost(self) -> str | None:
        """Why the last step must be repeated; None where nothing broke."""
        return self.backward.lost

    def check_broken(self) -> None:
        """After a backward that raised: put everything back where it belongs, and remember that the step is lost."""
        self.backward.check_broken()

    def forget_step(self) -> None:
        """The user gave the step up or begins the next: whatever was wrong with the last one is over."""
        self.backward.lost = None
        self.loss.forget()

    def is_idle(self) -> bool:
        """Whether no graph is alive and no window open."""
        if self.forward.is_under_way or self.backward.is_under_way or compat.backward_number() is not None:
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

    @alone
    def settle_unit(self, unit: Unit) -> None:
        """Somebody looks at a parameter: make its value true."""
        if unit.group.num_open:
            return
        if compat.backward_number() is None:
            self.backward.check_broken()
        self.residency.settle(unit)

    def take_totals(self) -> None:
        """Take the norms of gradients that are added up on the host."""
        self._gradients.takes_totals = True

    def veil_gradient(self, bound: Bound) -> None:
        """An update on the host reads the user's gradient: a look at it waits."""
        self._gradients.veil(bound)

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self.backward.stop()
