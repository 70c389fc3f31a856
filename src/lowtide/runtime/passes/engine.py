"""Engine: carries out the plan. Has a forward and a backward pass over the same groups, and answers between steps.

Everything here runs in the thread of the training loop, or in autograd's while the loop waits for it; only host updates
run beside it. See `passes.forward` and `passes.backward` for what opens and closes groups, `passes.window` for what
tells them, `parameters.group` for where parameters look.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager

from lowtide import compat
from lowtide.errors import StepLostError
from lowtide.memory.mover import Mover
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import GradientMover
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.passes.backward import BackwardPass
from lowtide.runtime.passes.forward import ForwardPass
from lowtide.runtime.passes.lock import Process, SessionLock, locked
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.norms import GradientWatch, LossWatch
from lowtide.runtime.updates.worker import HostWorker


class Engine:
    """The two passes of one session under one plan, with what they share.

    Args:
        residency: Opens and closes the groups; knows the groups.
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
        self.groups = residency.groups
        self.residency = residency
        self.loss = LossWatch(is_immediate=schedule is Schedule.IN_BACKWARD)
        self.gradient_watch = GradientWatch(mover)
        self.mover = mover
        self.recorder = recorder
        self.schedule = schedule
        self.worker = worker
        self._gradients = gradients
        self._lock = SessionLock()
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

    def put_in_order(self) -> None:
        """After an exception in `step()`, or at the end: start afresh from the truth."""
        if compat.backward_number() is None:
            self.forward.forget_calls()
            self.backward.put_in_order()

    def lose_step(self, moved: Iterable[ManagedGroup]) -> None:
        """A `step()` broke off when these had moved, and could not be completed."""
        self.backward.lose_step(moved, "step()")

    def refuse_lost_step(self) -> None:
        """Refuse an update after a step that broke off.

        Raises:
            StepLostError: It did. The message says which groups moved.
        """
        if self.lost is not None:
            self.backward.is_untold = False
            raise StepLostError(self.lost)

    def tell_lost_step(self, raised: BaseException | None = None) -> None:
        """The user gives up a step of which some groups have moved, without having asked `step()` about it: warn.

        Args:
            raised: The exception that ends the session, if one does: it gets a note instead.
        """
        if self.backward.is_untold and self.lost is not None:
            self.backward.is_untold = False
            if raised is not None:
                raised.add_note(self.lost)
            else:
                warnings.warn(self.lost, RuntimeWarning, stacklevel=2)

    def forget_step(self) -> None:
        """The user gave the step up or begins the next: whatever was wrong with the last one is over."""
        self.tell_lost_step()
        self.backward.lost = None
        self.loss.forget()

    def has_raised(self) -> bool:
        """Whether an exception came out of the last call of the model, backward or step, and none went well since."""
        return self.forward.has_raised or self.backward.has_broken_off()

    def part_of_step(self) -> str | None:
        """In which part of a step this thread is: forward, backward or update; None where its work is not the session's."""
        phases = self.recorder.phases
        # Not by the phase of backwards and updates: one that raised may be on record until the next call.
        if phases.is_in_backward():
            return "backward"
        if phases.phase == "forward":
            return "forward"
        return "update" if self._lock.is_in_call() else None

    def is_idle(self) -> bool:
        """Whether no graph is alive and no window open."""
        if self.forward.is_under_way or self.backward.is_under_way or compat.backward_number() is not None:
            return False
        return not any(group.visits or group.stored.num_open for group in self.groups.values())

    def is_quiet(self) -> bool:
        """Whether it is idle and no work on the host's memory is under way."""
        if not self.is_idle():
            return False
        for group in self.groups.values():
            if any(chunk.host_work is not None for chunk in group.stored.chunks):
                return False
            if group.looks_at_device and not group.is_resident:
                return False
            if any(not waiting.is_done() for managed in group.members for waiting in managed.pending):
                return False
        self.mover.drain()
        return True

    def settle_group(self, group: ManagedGroup) -> None:
        """Make the values of the group's parameters true: user code looks at one of them."""
        # Before the lock: who holds it may be waiting for this very thread.
        self.worker.refuse_in_its_thread(f"a parameter of group {group.label}")
        self._settle_group(group)

    @locked
    def _settle_group(self, group: ManagedGroup) -> None:
        if compat.backward_number() is None and not self.forward.is_under_way:
            self.backward.check_broken()
        if not group.stored.num_open:
            self.residency.settle(group)

    def calling(self, what: str) -> AbstractContextManager[None]:
        """What runs inside is a call of this thread, which no other thread may come between."""
        self.backward.refuse_beside(what)
        return self._lock.call(what)

    @property
    def process(self) -> Process:
        """That of the session."""
        return self._lock.process

    def take_totals(self) -> None:
        """Take the norms of gradients that are added up on the host."""
        self._gradients.takes_totals = True

    def make_gradient_pending(self, managed: ManagedParameter) -> None:
        """An update on the host reads the user's gradient: a look at it waits."""
        self._gradients.make_pending(managed)

    def stop(self) -> None:
        """The session ends: remove the hooks, and refuse what graphs that outlive it ask for."""
        self.backward.stop()
