"""GradientMover: takes finished gradients from the device to the host, and adds them to what is there.

Deferred, a gradient lands in a home of its own on the host, where the user finds it as `p.grad`. In backward it lands in
a staging buffer of its chunk, which the update gives back. A second gradient before the update is added on the host, in
the order in which autograd would add it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import ConfigError, SessionError
from lowtide.memory.chunk import Chunk, view_of
from lowtide.memory.groups import SPARSE_GRADIENT, unmanaged_parameters
from lowtide.memory.mover import Mover, Ticket
from lowtide.memory.pools import AllocationCache
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.group import ManagedParameter, beside, own_storage
from lowtide.runtime.parameters.pending import is_pending, make_pending, make_plain
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.norms import norm_of
from lowtide.runtime.updates.worker import HostWorker, Job


def refuse_sparse_gradient(gradient: torch.Tensor, name: str) -> None:
    """Refuse a gradient that is not dense.

    Raises:
        SessionError: It is not.
    """
    if gradient.layout is not torch.strided:
        layout = str(gradient.layout).removeprefix("torch.")
        raise SessionError(
            f"the gradient of {name} is {layout}, of shape {tuple(gradient.shape)}; gradients that go to the host, or that "
            "Lowtide's own kernels update with (precision=), are dense. Look the rows up with sparse=False, or leave "
            "precision out and make the group resident and updated on the device"
        )


def refuse_sparse_tables(model: nn.Module, optimizer: torch.optim.Optimizer, asked: Iterable[str]) -> None:
    """Refuse embeddings that will have sparse gradients, before anything runs.

    Args:
        model: With them, or not.
        optimizer: Those that it does not hold do not matter.
        asked: The settings that need dense gradients, as the user wrote them.

    Raises:
        ConfigError: There is one. The message names the parameter.
    """
    settings = list(asked)
    if not settings:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    for name, reason in unmanaged_parameters(model):
        if reason == SPARSE_GRADIENT and id(named[name]) in held and named[name].requires_grad:
            raise ConfigError(
                f"the gradient of {name} will be sparse, and {settings[0]} needs dense ones; make the embedding with "
                f"sparse=False, or leave {settings[0].partition('=')[0]} out",
                key=settings[0].partition("=")[0],
            )


class PendingGradient:
    """A gradient on the host, pending until it is complete and no update reads it."""

    def __init__(self, managed: ManagedParameter, mover: Mover) -> None:
        self._managed_parameter = managed
        self._mover = mover

    @property
    def label(self) -> str:
        """For messages."""
        return f"the gradient of {self._managed_parameter.spec.name}"

    def settle(self) -> None:
        """Wait for the copies and the update. It stays pending: a GradScaler's kernel must be noticed at any time."""
        self._managed_parameter.settle_gradient()
        # Whoever looks may write, and may keep a view of it and write later.
        self._managed_parameter.was_seen = True

    def check_gradient(self) -> None:
        """A gradient has none itself."""

    def wait_for_device(self) -> None:
        """Copies to the host that the loop's own stream makes, as a GradScaler's of its flag, are done then."""
        self._mover.now().wait()


class GradientMover:
    """Sends gradients to the host and adds them up there; the parameters keep what is under way."""

    def __init__(
        self, mover: Mover, worker: HostWorker, cache: AllocationCache, schedule: Schedule, recorder: Recorder
    ) -> None:
        self._mover = mover
        self._worker = worker
        self._cache = cache
        self._schedule = schedule
        self._recorder = recorder
        self.takes_totals = False
        """Whether the norm of what was added up on the host is taken there, for a clipping that does not read it again."""

    def take(self, managed: ManagedParameter) -> None:
        """The parameter's gradient is complete on the device: send it to the host and let it go there."""
        gradient = managed.parameter.grad
        assert gradient is not None
        refuse_sparse_gradient(gradient, managed.spec.name)
        managed.parameter.grad = None
        is_first = not managed.has_fired
        if self._schedule is Schedule.IN_BACKWARD:
            home = self._staged(managed)
        else:
            if managed.stashed is not None and is_first:
                # Accumulation: what is there already belongs to the user, wherever it lies.
                # One that the user made is the user's to write to.
                managed.was_seen = managed.was_seen or managed.stashed is not managed.gradient
                managed.gradient, is_first = managed.stashed, managed.is_whole
                make_plain(managed.gradient)
                managed.is_gradient_held = compat.num_storage_owners(managed.gradient) > 1
            elif is_first:
                # What a loop that never looks at a gradient leaves behind: the copy and the update of the last step.
                managed.pending = [waiting for waiting in managed.pending if not waiting.is_done()]
                self._leave_old_gradient(managed)
                managed.was_seen = False
            assert managed.gradient is not None
            # Not the user's own object: that one is pending before the copy has happened.
            home = managed.inner_gradient(managed.gradient)
        managed.num_takes += 1
        if is_first:
            managed.norm = None if managed.was_seen else (managed.num_takes, norm_of(gradient))
            managed.pending.append(self._send(managed, home, gradient))
        else:
            self._send_and_add(managed, home, gradient)
        if self._schedule is Schedule.IN_BACKWARD and managed.stashed is not None and not managed.is_whole:
            # From a use outside of the module's call, on the host: its gradient came first.
            self._add_stashed(managed, home, managed.stashed)
            managed.stashed = None
        managed.has_fired = True

    def abandon(self, members: Iterable[ManagedParameter]) -> None:
        """After an exception: wait for the work on the host, and take back staging that no update will give back."""
        self._worker.drain()
        for managed in members:
            if self._schedule is Schedule.IN_BACKWARD:
                managed.gradient = None
                managed.pending.clear()
            managed.chunk.take_staging()
        self._cache.take_back_all()

    def expose(self, managed: ManagedParameter) -> None:
        """Backward is over: the user finds the gradient on the host at the parameter."""
        gradient = managed.gradient if managed.has_fired else managed.stashed
        managed.stashed = None
        if gradient is None:
            return
        parameter = managed.parameter
        if parameter.device == gradient.device:
            parameter.grad = gradient
        else:
            # A parameter on the device may have a gradient on the host, but not be given one.
            # Past what notices a look: nobody looks at the weights here.
            with compat.without_torch_function():
                data = parameter.data
                parameter.data = managed.host_view if managed.host_view is not None else gradient.detach()
                parameter.grad = gradient
                parameter.data = data
        if managed.is_gradient_held:
            managed.settle_gradient()  # what is held is not pending
            managed.is_gradient_held = False
        self.make_pending(managed)

    def make_pending(self, managed: ManagedParameter) -> None:
        """A look at the user's gradient on the host waits for what is pending for it."""
        if managed.gradient is not None and managed.parameter.grad is managed.gradient:
            managed.pending_gradient = managed.pending_gradient or PendingGradient(managed, self._mover)
            make_pending(managed.gradient, managed.pending_gradient)

    def _staged(self, managed: ManagedParameter) -> torch.Tensor:
        chunk = managed.chunk
        if chunk.staging is None:
            chunk.stage_in(self._cache.take(chunk.spec.nbytes))
        if managed.gradient is None or not managed.has_fired:
            assert chunk.staging is not None
            managed.gradient = _home_in(chunk, chunk.staging, managed)
        return managed.gradient

    def _leave_old_gradient(self, managed: ManagedParameter) -> None:
        """A new gradient is written where the last one lay, unless somebody still holds that one."""
        assert managed.gradient_home is not None
        old, managed.gradient = managed.gradient, None
        # Two references: the local name and that of `getrefcount`.
        if old is not None and (sys.getrefcount(old) > 2 or is_pending(old)):
            managed.settle_gradient()
            make_plain(old)
        del old
        if managed.lent is not None and managed.lent() is not None:
            # Somebody holds a gradient of before, or a view of it: it keeps its place and its value.
            managed.gradient = beside(managed.gradient_home)
        else:
            managed.gradient = own_storage(managed.gradient_home)
            managed.lent = weakref.ref(managed.gradient.untyped_storage())

    def _send(self, managed: ManagedParameter, target: torch.Tensor, gradient: torch.Tensor) -> Ticket:
        copied = self._mover.to_host(target, gradient, [self._mover.now()])
        self._recorder.on_gradient(managed.chunk, copied, gradient.nbytes)
        return copied.ended

    def _add_stashed(self, managed: ManagedParameter, total: torch.Tensor, stashed: torch.Tensor) -> None:
        make_plain(stashed)
        self._judge_too(managed, stashed)

        def add() -> None:
            with torch.no_grad():
                total.add_(stashed)

        managed.pending.append(self._worker.submit(add, after=_earlier(managed)))

    def _judge_too(self, managed: ManagedParameter, gradient: torch.Tensor) -> None:
        """Where nothing is clipped the norm says no more than whether all that was added is finite."""
        norm = norm_of(gradient)
        managed.norm = (
            managed.num_takes,
            norm if managed.norm is None else managed.norm[1] + norm.to(managed.norm[1].device),
        )

    def _send_and_add(self, managed: ManagedParameter, total: torch.Tensor, gradient: torch.Tensor) -> None:
        buffer = self._cache.take(max(gradient.nbytes, 1))
        staging = view_of(buffer, 0, managed.spec)
        before = _earlier(managed)
        arrived = self._send(managed, staging, gradient)
        number = managed.num_takes
        takes_norm = self.takes_totals and not managed.was_seen
        if not takes_norm:
            self._judge_too(managed, gradient)

        def add() -> None:
            with torch.no_grad():
                total.add_(staging)
            if takes_norm:
                managed.norm = (number, norm_of(total))

        give_back = partial(self._cache.give_back, buffer)
        managed.pending.append(self._worker.submit(add, after=[*before, arrived], lastly=give_back))


def _earlier(managed: ManagedParameter) -> tuple[Ticket | Job, ...]:
    """What an addition comes after: the copies and additions before it, and an update that reads what they made."""
    return tuple(waiting for waiting in managed.pending if not waiting.is_done())


def _home_in(chunk: Chunk, buffer: torch.Tensor, managed: ManagedParameter) -> torch.Tensor:
    span = next(span for span in chunk.spec.spans if span.parameter.name == managed.spec.name)
    return view_of(buffer, span.offset_bytes, managed.spec)
