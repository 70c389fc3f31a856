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
from lowtide.memory.allocation_cache import AllocationCache
from lowtide.memory.chunk import Chunk, view_of
from lowtide.memory.mover import Mover, Ticket
from lowtide.memory.unmanaged import SPARSE_GRADIENT, unmanaged_parameters
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.group import Bound
from lowtide.runtime.parameters.pending import is_veiled, unveil, veil
from lowtide.runtime.parameters.tensors import beside, own_storage
from lowtide.runtime.statistics.recording import Recorder
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


class GradientLease:
    """Veils a gradient on the host until it is complete and no update reads it."""

    def __init__(self, bound: Bound, mover: Mover) -> None:
        self._bound = bound
        self._mover = mover

    @property
    def label(self) -> str:
        """For messages."""
        return f"the gradient of {self._bound.spec.name}"

    def settle(self) -> None:
        """Wait for the copies and the update. The veil stays: a GradScaler's kernel must be noticed at any time."""
        self._bound.settle_gradient()
        # Whoever looks may write, and may keep a view of it and write later.
        self._bound.was_seen = True

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

    def take(self, bound: Bound) -> None:
        """The parameter's gradient is complete on the device: send it to the host and let it go there."""
        gradient = bound.parameter.grad
        assert gradient is not None
        refuse_sparse_gradient(gradient, bound.spec.name)
        bound.parameter.grad = None
        is_first = not bound.has_fired
        if self._schedule is Schedule.IN_BACKWARD:
            home = self._staged(bound)
        else:
            if bound.stashed is not None and is_first:
                # Accumulation: what is there already belongs to the user, wherever it lies.
                # One that the user made is the user's to write to.
                bound.was_seen = bound.was_seen or bound.stashed is not bound.gradient
                bound.gradient, is_first = bound.stashed, bound.is_whole
                unveil(bound.gradient)
                bound.is_gradient_held = compat.num_storage_owners(bound.gradient) > 1
            elif is_first:
                # What a loop that never looks at a gradient leaves behind: the copy and the update of the last step.
                bound.pending = [waiting for waiting in bound.pending if not waiting.is_done()]
                self._leave_old_gradient(bound)
                bound.was_seen = False
            assert bound.gradient is not None
            # Not the user's own object: that one is veiled before the copy has happened.
            home = bound.inner_gradient(bound.gradient)
        bound.num_takes += 1
        if is_first:
            bound.norm = None if bound.was_seen else (bound.num_takes, norm_of(gradient))
            bound.pending.append(self._send(bound, home, gradient))
        else:
            self._send_and_add(bound, home, gradient)
        if self._schedule is Schedule.IN_BACKWARD and bound.stashed is not None and not bound.is_whole:
            # From a use outside of the module's call, on the host: its gradient came first.
            self._add_stashed(bound, home, bound.stashed)
            bound.stashed = None
        bound.has_fired = True

    def abandon(self, bounds: Iterable[Bound]) -> None:
        """After an exception: wait for the work on the host, and take back staging that no update will give back."""
        self._worker.drain()
        for bound in bounds:
            if self._schedule is Schedule.IN_BACKWARD:
                bound.gradient = None
                bound.pending.clear()
            bound.chunk.take_staging()
        self._cache.take_back_all()

    def expose(self, bound: Bound) -> None:
        """Backward is over: the user finds the gradient on the host at the parameter."""
        gradient = bound.gradient if bound.has_fired else bound.stashed
        bound.stashed = None
        if gradient is None:
            return
        parameter = bound.parameter
        if parameter.device == gradient.device:
            parameter.grad = gradient
        else:
            # A parameter on the device may have a gradient on the host, but not be given one.
            # Past the veil: nobody looks at the weights here.
            with compat.without_torch_function():
                data = parameter.data
                parameter.data = bound.host_view if bound.host_view is not None else gradient.detach()
                parameter.grad = gradient
                parameter.data = data
        if bound.is_gradient_held:
            bound.settle_gradient()  # what is held is not veiled
            bound.is_gradient_held = False
        self.veil(bound)

    def veil(self, bound: Bound) -> None:
        """A look at the user's gradient on the host waits for what is pending for it."""
        if bound.gradient is not None and bound.parameter.grad is bound.gradient:
            bound.gradient_lease = bound.gradient_lease or GradientLease(bound, self._mover)
            veil(bound.gradient, bound.gradient_lease)

    def _staged(self, bound: Bound) -> torch.Tensor:
        chunk = bound.chunk
        if chunk.staging is None:
            chunk.stage_in(self._cache.take(chunk.spec.nbytes))
        if bound.gradient is None or not bound.has_fired:
            assert chunk.staging is not None
            bound.gradient = _home_in(chunk, chunk.staging, bound)
        return bound.gradient

    def _leave_old_gradient(self, bound: Bound) -> None:
        """A new gradient is written where the last one lay, unless somebody still holds that one."""
        assert bound.gradient_home is not None
        old, bound.gradient = bound.gradient, None
        # Two references: the local name and that of `getrefcount`.
        if old is not None and (sys.getrefcount(old) > 2 or is_veiled(old)):
            bound.settle_gradient()
            unveil(old)
        del old
        if bound.lent is not None and bound.lent() is not None:
            # Somebody holds a gradient of before, or a view of it: it keeps its place and its value.
            bound.gradient = beside(bound.gradient_home)
        else:
            bound.gradient = own_storage(bound.gradient_home)
            bound.lent = weakref.ref(bound.gradient.untyped_storage())

    def _send(self, bound: Bound, target: torch.Tensor, gradient: torch.Tensor) -> Ticket:
        copied = self._mover.to_host(target, gradient, [self._mover.now()])
        self._recorder.on_gradient(bound.chunk, copied, gradient.nbytes)
        return copied.ended

    def _add_stashed(self, bound: Bound, total: torch.Tensor, stashed: torch.Tensor) -> None:
        unveil(stashed)
        self._judge_too(bound, stashed)

        def add() -> None:
            with torch.no_grad():
                total.add_(stashed)

        bound.pending.append(self._worker.submit(add, after=_earlier(bound)))

    def _judge_too(self, bound: Bound, gradient: torch.Tensor) -> None:
        """Where nothing is clipped the norm says no more than whether all that was added is finite."""
        norm = norm_of(gradient)
        bound.norm = (bound.num_takes, norm if bound.norm is None else bound.norm[1] + norm.to(bound.norm[1].device))

    def _send_and_add(self, bound: Bound, total: torch.Tensor, gradient: torch.Tensor) -> None:
        buffer = self._cache.take(max(gradient.nbytes, 1))
        staging = view_of(buffer, 0, bound.spec)
        before = _earlier(bound)
        arrived = self._send(bound, staging, gradient)
        number = bound.num_takes
        takes_norm = self.takes_totals and not bound.was_seen
        if not takes_norm:
            self._judge_too(bound, gradient)

        def add() -> None:
            with torch.no_grad():
                total.add_(staging)
            if takes_norm:
                bound.norm = (number, norm_of(total))

        give_back = partial(self._cache.give_back, buffer)
        bound.pending.append(self._worker.submit(add, after=[*before, arrived], lastly=give_back))


def _earlier(bound: Bound) -> tuple[Ticket | Job, ...]:
    """What an addition comes after: the copies and additions before it, and an update that reads what they made."""
    return tuple(waiting for waiting in bound.pending if not waiting.is_done())


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """In fp32, of doubles and complex numbers in their own precision; on their device, without a copy of the gradient."""
    with torch.no_grad():
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().values()
        # torch narrows none of these, and would refuse.
        is_own = gradient.is_complex() or gradient.dtype is torch.float64
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=None if is_own else torch.float32)
    return norm


def _home_in(chunk: Chunk, buffer: torch.Tensor, bound: Bound) -> torch.Tensor:
    span = next(span for span in chunk.spec.spans if span.parameter.name == bound.spec.name)
    return view_of(buffer, span.offset_bytes, bound.spec)
