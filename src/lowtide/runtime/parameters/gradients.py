"""HostGradient: a gradient that is made on the device and waits on the host; GradientMover brings it there.

Under the deferred schedule a gradient lands in a home of its own on the host, where the user finds it as `p.grad`.
Where backwards update, it lands in a staging buffer of its chunk, which the update gives back. A second gradient before
the update is added on the host, in the order in which autograd would add it.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import ConfigError, GradientStateError, SessionError
from lowtide.memory.chunk import Chunk, ParameterSpec, view_of
from lowtide.memory.groups import SPARSE_GRADIENT, unmanaged_parameters
from lowtide.memory.mover import GradientCarrier, Mover, Ticket
from lowtide.memory.pools import AllocationCache
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.pending import (
    beside,
    is_pending,
    is_pending_for,
    make_pending,
    make_plain,
    own_storage,
    same_memory,
)
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.norms import norm_of, norms_to_judge
from lowtide.runtime.updates.worker import HostWorker, Job
from lowtide.units import MiB


class GradientState(enum.StrEnum):
    """Which backward, if any, a gradient on the host belongs to."""

    RESTING = "resting"
    """No backward makes one. A gradient of before is at the parameter, for the user, or an update reads it."""
    SET_ASIDE = "set aside"
    """A backward uses the parameter: the gradient that was at it waits here, so that autograd starts afresh."""
    ARRIVING = "arriving"
    """This backward has brought one: copies to the host and sums there may be under way."""


LEGAL: Mapping[GradientState, frozenset[GradientState]] = {
    GradientState.RESTING: frozenset({GradientState.SET_ASIDE}),
    # Back to RESTING: the backward brought none, or somebody used it up before it could be taken.
    GradientState.SET_ASIDE: frozenset({GradientState.ARRIVING, GradientState.RESTING}),
    # To ARRIVING: a second gradient of the same backward. To RESTING: shown to the user, or used up by an update.
    GradientState.ARRIVING: frozenset({GradientState.ARRIVING, GradientState.RESTING}),
}


class HostGradient:
    """The gradient of one parameter that the host updates. Its own methods alone change its fields.

    Args:
        parameter: The user's, or this rank's piece of it.
        host: Where the host updates the parameter.
        home: Where a deferred gradient lands; None in backward.
    """

    def __init__(
        self, parameter: torch.Tensor, spec: ParameterSpec, chunk: Chunk, host: torch.device, home: torch.Tensor | None
    ) -> None:
        self.spec = spec
        self.chunk = chunk
        self.state = GradientState.RESTING
        self.tensor: torch.Tensor | None = None
        """The gradient that the last backward made, or is making."""
        self.pending: list[Ticket | Job] = []
        """Copies and sums that must end before it is complete, and updates that read it."""
        self.was_seen = False
        """Whether somebody has read the gradient since its first copy, and may write to it through a view."""
        self.home = home
        self._parameter = parameter
        self._at_home = None if home is None else same_memory(home)
        """A tensor of our own over the home, for copies and updates: the user's object is pending until they are done."""
        self._host = host
        self._aside: torch.Tensor | None = None
        """The gradient that was at the parameter before this backward."""
        self._is_whole = False
        """Whether autograd adds to the gradient that was set aside, on the device: the user's hooks or other ranks want the sum."""
        self._lent: weakref.ref[torch.UntypedStorage] | None = None
        """The storage of the last gradient in the home that the user was given; while it lives, somebody may hold it."""
        self._is_held = False
        """Whether somebody else holds the memory to which this backward adds."""
        self._num_takes = 0
        """Counts the gradients that came: a norm is that of the sum after one of them."""
        self._norm: tuple[int, torch.Tensor] | None = None
        """The number of gradients that had come, and the norm of their sum."""
        self._pending_value: PendingGradient | None = None

    def become(self, state: GradientState) -> None:
        """Change the state, if the table allows it."""
        if state not in LEGAL[self.state]:
            raise GradientStateError(
                f"the gradient of {self.spec.name} cannot go from {self.state.value!r} to {state.value!r}: it may become "
                f"{', '.join(sorted(LEGAL[self.state]))}. This is a fault of Lowtide's; please report it with the plan"
            )
        self.state = state

    # -- a backward ----------------------------------------------------------------------------------------------------

    def set_aside(self, *, is_summed_on_device: bool) -> None:
        """A backward uses the parameter: keep its gradient here. Where the sum is wanted on the device, autograd adds to a copy of
        it: hooks of the user's find the sum at the parameter, as in plain torch, and ranks average it.
        """
        found = self._parameter.grad
        if found is not None and found.device != self._host:
            found = found.detach().to(self._host)  # the user set it beside resident weights on the device
        self._aside, self._parameter.grad = found, None
        self._is_whole = is_summed_on_device and found is not None
        if self._is_whole and found is not None:
            self._parameter.grad = found.to(self._parameter.device, copy=True)
        self.become(GradientState.SET_ASIDE)

    def drop(self) -> None:
        """Keep neither the gradient of this backward nor the one before it: a hook used them up, or nobody wants them."""
        self._aside = None

    def is_first(self) -> bool:
        """Whether this backward has not brought a gradient yet."""
        return self.state is not GradientState.ARRIVING

    def stage_in(self, staging: torch.Tensor) -> torch.Tensor:
        """The target for a gradient that an update in backward uses up: a part of the chunk's staging buffer."""
        if self.tensor is None or self.is_first():
            spans = self.chunk.spans
            offset = next(span.offset_bytes for span in spans if span.parameter.name == self.spec.name)
            self.tensor = view_of(staging, offset, self.spec)
        return self.tensor

    def land(self) -> tuple[torch.Tensor, bool]:
        """The target for a deferred gradient, and whether the gradient is added to the values there."""
        adds = not self.is_first()
        if not adds and self._aside is not None:
            # Accumulation: the gradient that is there already is the user's, in whatever memory. One that the user made may
            # be written to by the user.
            self.was_seen = self.was_seen or self._aside is not self.tensor
            self.tensor, adds = self._aside, not self._is_whole
            make_plain(self.tensor)
            self._is_held = compat.num_storage_owners(self.tensor) > 1
        elif not adds:
            # A loop that never reads a gradient leaves the copy and the update of the last step here.
            self.pending = [waiting for waiting in self.pending if not waiting.is_done()]
            self._replace_tensor()
            self.was_seen = False
        assert self.tensor is not None
        # Not the user's own object: that one is pending until the copy is done.
        return self._inner(self.tensor), adds

    def count_take(self) -> int:
        """One more gradient comes. Returns its number."""
        self._num_takes += 1
        return self._num_takes

    def note_norm(self, number: int, norm: torch.Tensor | None) -> None:
        """Note the norm of the sum with the gradient of that number; None if it is not known."""
        self._norm = None if norm is None else (number, norm)

    def add_norm(self, norm: torch.Tensor) -> None:
        """Add the norm of a gradient to the known one. Without clipping norms are only judged, and a sum of norms is finite if all
        of them are.
        """
        known = norm if self._norm is None else self._norm[1] + norm.to(self._norm[1].device)
        self._norm = (self._num_takes, known)

    def await_(self, waiting: Ticket | Job) -> None:
        """The gradient is complete only when this is done too."""
        self.pending.append(waiting)

    def take_aside(self) -> torch.Tensor | None:
        """The gradient that was at the parameter before, for the caller to add; None if there was none, or if it is in the sum."""
        found = None if self._is_whole else self._aside
        if found is not None:
            self._aside = None
        return found

    def show(self, host_view: torch.Tensor | None, mover: Mover) -> None:
        """A backward is over, deferred: the user finds the gradient on the host at the parameter."""
        gradient = self._aside if self.is_first() else self.tensor
        self._aside = None
        if gradient is not None:
            parameter = self._parameter
            if parameter.device == gradient.device:
                parameter.grad = gradient
            else:
                # A parameter on the device may have a gradient on the host, but not be given one.
                # Past what notices reads: nobody reads the weights here.
                with compat.without_torch_function():
                    data = parameter.data
                    parameter.data = host_view if host_view is not None else gradient.detach()
                    parameter.grad = gradient
                    parameter.data = data
            if self._is_held:
                self.settle()  # what is held is not pending
                self._is_held = False
            self.make_pending(mover)
        self.end_backward()

    def show_aside(self) -> None:
        """A backward is over that used up its gradients. A gradient of before that was not used is left for `step()`."""
        if self._aside is not None and not self._is_whole:
            self._parameter.grad, self._aside = self._aside, None
        self.end_backward()

    def end_backward(self) -> None:
        """The backward that made the gradient is over, or broke off."""
        if self.state is not GradientState.RESTING:
            self.become(GradientState.RESTING)

    # -- an update -----------------------------------------------------------------------------------------------------

    def for_update(self, *, is_staged: bool) -> torch.Tensor | None:
        """The gradient that an update on the host reads: a tensor of our own over its memory, because the user's may be pending,
        and would wait for this very update.
        """
        if is_staged:
            return None if self.tensor is None else same_memory(self.tensor)
        with compat.without_torch_function():  # nobody reads a value here, nor one that was used up
            gradient = self._parameter.grad
        if gradient is None or gradient is self.tensor:
            return None if gradient is None else self._inner(gradient)
        # The user has set it, may change it as soon as `step` returns, and may have put it beside resident weights.
        if gradient.device != self._host:
            return gradient.detach().to(self._host)
        return beside(gradient).copy_(gradient)

    def use_in_place(self) -> None:
        """Autograd made the gradient on the host, where it belongs; it is pending while the update reads it."""
        self.tensor = self._parameter.grad

    def is_held_beside(self) -> bool:
        """Whether another tensor shows the memory of `p.grad` that an update reads, so that a write to it would not be noticed."""
        if self.tensor is None:
            return False
        with compat.without_torch_function():
            return self._parameter.grad is self.tensor and compat.num_storage_owners(self.tensor) > 1

    def use_up(self) -> None:
        """An update has the gradient, in a staging buffer that the update gives back."""
        self.pending.clear()
        self.tensor = None
        self.end_backward()

    def forget_norm(self) -> None:
        """The norm was judged, or the gradient changed."""
        self._norm = None

    @property
    def sent_norm(self) -> torch.Tensor | None:
        """The norm that was computed when the gradient left the device."""
        return None if self._norm is None else self._norm[1]

    @property
    def known_norm(self) -> torch.Tensor | None:
        """The norm of the gradient as it is now; None where it is not known, or not yet."""
        is_known = self._norm is not None and self._norm[0] == self._num_takes and not self.was_seen
        return self._norm[1] if self._norm is not None and is_known else None

    def clear_unseen(self, clear: Callable[[], None]) -> None:
        """Run a function that clears the gradient. It does not count as a read, and the norm is forgotten."""
        was_seen = self.was_seen
        clear()
        self.was_seen = was_seen
        self.forget_norm()

    # -- the user ------------------------------------------------------------------------------------------------------

    def make_pending(self, mover: Mover) -> None:
        """Reading the user's gradient waits for the copies and updates of it that are under way."""
        tensor, value = self.tensor, self._pending_value
        if tensor is None or (value is not None and is_pending_for(tensor, value)):
            return
        with compat.without_torch_function():
            is_shown = self._parameter.grad is tensor
        if is_shown:
            self._pending_value = value or PendingGradient(self, mover)
            make_pending(tensor, self._pending_value)

    def make_plain(self) -> None:
        """The session ends: reading the gradient needs nothing any more."""
        if self.tensor is not None:
            make_plain(self.tensor)

    def mark_seen(self) -> None:
        """Somebody reads the gradient, and may write to it, now or later through a view."""
        self.was_seen = True

    def settle(self) -> None:
        """Wait until the gradient is complete and no update reads it."""
        while self.pending:
            first = self.pending[0]
            try:
                first.wait()
            except Exception:
                self.pending.remove(first)
                raise
            # Removed only now: an interrupted wait must not forget it.
            if self.pending and self.pending[0] is first:
                self.pending.pop(0)

    def is_settled(self) -> bool:
        """Whether nothing is under way for it."""
        return all(waiting.is_done() for waiting in self.pending)

    def is_home_held(self) -> bool:
        """Whether another tensor shows the home's memory: an older gradient, or a view."""
        lent = None if self._lent is None else self._lent()
        if lent is None:
            return False
        if self.tensor is None:
            return True
        with compat.without_torch_function():
            return self.tensor.untyped_storage() is not lent or compat.num_storage_owners(self.tensor) > 1

    def move_home(self, home: torch.Tensor) -> None:
        """The arena has moved the home here, with its values."""
        old, self.home, self._at_home = self.home, home, same_memory(home)
        if self.tensor is not None and old is not None and self.tensor.data_ptr() == old.data_ptr():
            self.tensor.data = own_storage(home)
            self._lent = weakref.ref(self.tensor.untyped_storage())

    def _replace_tensor(self) -> None:
        """Choose the tensor for a new gradient: in the home, unless somebody still holds the last gradient there."""
        assert self.home is not None
        old, self.tensor = self.tensor, None
        # Two references: the local name and that of `getrefcount`.
        is_held = old is not None and sys.getrefcount(old) > 2
        if old is not None and (is_held or is_pending(old)):
            self.settle()
            make_plain(old)
        if old is not None and not (is_held or self.was_seen) and self.is_home_of(old):
            self.tensor = old  # nobody has ever read it
            return
        del old
        if self._lent is not None and self._lent() is not None:
            # Somebody holds an older gradient, or a view of it: that one keeps the home, with its value.
            self.tensor = beside(self.home)
        else:
            self.tensor = own_storage(self.home)
            self._lent = weakref.ref(self.tensor.untyped_storage())

    def is_home_of(self, gradient: torch.Tensor) -> bool:
        """Whether the gradient lies in the home."""
        with compat.without_torch_function():
            return self.home is not None and gradient.data_ptr() == self.home.data_ptr()

    def _inner(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tensor of our own over a gradient of the user's, which may be pending and is the user's alone to hold."""
        if self._at_home is not None and self.is_home_of(gradient):
            return self._at_home
        return same_memory(gradient)


class PendingGradient:
    """What reading a gradient on the host waits for: its completion, and updates that read it."""

    def __init__(self, gradient: HostGradient, mover: Mover) -> None:
        self._gradient = gradient
        self._mover = mover

    @property
    def label(self) -> str:
        """The gradient's name in messages."""
        return f"the gradient of {self._gradient.spec.name}"

    def settle(self) -> None:
        """Wait for the copies and the update. It stays pending: a GradScaler's kernel must be noticed at any time."""
        self._gradient.settle()
        self._gradient.mark_seen()

    def check_gradient(self) -> None:
        """Nothing to refuse: a gradient has no gradient."""

    def piece_of(self, parameter: torch.Tensor) -> None:
        """Nobody: a gradient has no gradient."""

    def wait_for_device(self) -> None:
        """Wait for the loop's own stream, which may be making a copy to the host, as a GradScaler does of its flag."""
        self._mover.now().wait()


class GradientSink(Protocol):
    """Takes gradients off the device: a session's to the host, a prediction's to nowhere."""

    def take(self, taken: HostGradient, gradient: torch.Tensor) -> None:
        """The gradient is complete on the device, and nobody else has it any more."""

    def send(self) -> None:
        """Send the gradients that were taken and still wait."""

    def abandon(self, gradients: Iterable[HostGradient], chunks: Iterable[Chunk]) -> None:
        """After an exception: nothing of this backward is kept."""

    def show(self, gradient: HostGradient, host_view: torch.Tensor | None, *, is_resident: bool) -> None:
        """A backward is over: show the user the gradient on the host."""


SENT_TOGETHER_BYTES = 4 * MiB
"""A smaller copy does not reach the speed of its link, and costs the host more time than the device."""


class _Taken(NamedTuple):
    taken: HostGradient
    number: int
    target: torch.Tensor
    gradient: torch.Tensor


class GradientMover:
    """Sends gradients to the host and adds them up there.

    Note [Gradients that are sent together]
    Small gradients of a chunk wait for each other, and are sent as a batch, with one event before their copies and one behind
    them: when the chunk's update asks for them, another chunk's gradient comes, the backward ends, or enough bytes wait. All
    gradients of a batch come from one queue of the computation (one stream), so one event before the copies covers them. A
    gradient from another stream first sends the waiting batch, behind an event of that batch's stream. The mover keeps the
    memory of each gradient until the event behind its copy, and counts the gradients that wait here too.

    Args:
        takes_totals: Whether the norm of a sum that is made on the host is computed there, for a clipping that does not
            read the sum again.
    """

    def __init__(
        self,
        mover: GradientCarrier,
        worker: HostWorker,
        cache: AllocationCache,
        schedule: Schedule,
        recorder: Recorder,
        *,
        takes_totals: bool,
    ) -> None:
        self._mover = mover
        self._worker = worker
        self._cache = cache
        self._schedule = schedule
        self._recorder = recorder
        self._takes_totals = takes_totals
        self._waiting: list[_Taken] = []
        """See Note [Gradients that are sent together]."""
        self._waiting_bytes = 0
        self._queue: object = None
        """The queue of the computation on which the waiting gradients were taken."""

    def take(self, taken: HostGradient, gradient: torch.Tensor) -> None:
        """The gradient is complete on the device, and nobody else has it any more: send it to the host, and free it."""
        if self._schedule is Schedule.IN_BACKWARD:
            target, adds = taken.stage_in(self._staging(taken.chunk)), not taken.is_first()
        else:
            target, adds = taken.land()
        number = taken.count_take()
        if adds:
            self.send()
            self._send_and_add(taken, number, target, gradient)
        else:
            self._wait_with(_Taken(taken, number, target, gradient))
        if self._schedule is Schedule.IN_BACKWARD and (aside := taken.take_aside()) is not None:
            # The gradient of a use outside of the module's call, on the host, which came first.
            self.send()
            self._add(taken, target, aside)
        taken.become(GradientState.ARRIVING)

    def _wait_with(self, item: _Taken) -> None:
        queue = self._mover.queue()
        if self._waiting and (queue is not self._queue or self._waiting[0].taken.chunk is not item.taken.chunk):
            self.send()
        self._waiting.append(item)
        self._waiting_bytes += item.gradient.nbytes
        self._queue = queue
        self._mover.expect(self._waiting_bytes)
        if self._waiting_bytes >= SENT_TOGETHER_BYTES:
            self.send()

    def send(self) -> None:
        """Send the gradients that wait; see Note [Gradients that are sent together]."""
        self._send_all(takes_norms=True)

    def _send_all(self, *, takes_norms: bool) -> None:
        items, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not items:
            return
        if self._mover.queue() is not self._queue:
            self._mover.compute_after(self._mover.point_in(self._queue))
        gradients = [item.gradient for item in items]
        norms: Sequence[torch.Tensor | None] = [None] * len(items)
        if takes_norms:
            # Clipping needs the norm of each gradient.
            norms = [norm_of(gradient) for gradient in gradients] if self._takes_totals else norms_to_judge(gradients)
        copied = self._mover.all_to_host([item.target for item in items], gradients, [self._mover.now()])
        self._recorder.on_gradient(
            items[0].taken.chunk, copied, sum(gradient.nbytes for gradient in gradients), num_copies=len(items)
        )
        for item, norm in zip(items, norms, strict=True):
            item.taken.note_norm(item.number, None if item.taken.was_seen else norm)
            item.taken.await_(copied.ended)

    def abandon(self, gradients: Iterable[HostGradient], chunks: Iterable[Chunk]) -> None:
        """After an exception: wait for the work on the host, and take back staging that no update will give back."""
        if self._schedule is Schedule.DEFERRED:
            # The user finds the gradients that came before the exception. A norm would need memory, and there may be none.
            self._send_all(takes_norms=False)
        self._waiting, self._waiting_bytes = [], 0
        self._worker.drain()
        for gradient in gradients if self._schedule is Schedule.IN_BACKWARD else ():
            gradient.use_up()
        for chunk in chunks:
            chunk.take_staging()
        self._cache.take_back_all()

    def show(self, gradient: HostGradient, host_view: torch.Tensor | None, *, is_resident: bool) -> None:
        """A backward is over: show the user the gradient on the host."""
        if self._schedule is Schedule.DEFERRED:
            gradient.show(host_view, self._mover)
        elif is_resident:
            gradient.end_backward()
        else:
            gradient.show_aside()

    def make_pending(self, gradient: HostGradient) -> None:
        """An update on the host reads the user's gradient: reading it waits."""
        gradient.make_pending(self._mover)

    def _staging(self, chunk: Chunk) -> torch.Tensor:
        if chunk.staging is None:
            chunk.stage_in(self._cache.take(chunk.moved_bytes))
        assert chunk.staging is not None
        return chunk.staging

    def _send(self, taken: HostGradient, target: torch.Tensor, gradient: torch.Tensor) -> Ticket:
        copied = self._mover.to_host(target, gradient, [self._mover.now()])
        self._recorder.on_gradient(taken.chunk, copied, gradient.nbytes)
        return copied.ended

    def _add(self, taken: HostGradient, total: torch.Tensor, other: torch.Tensor) -> None:
        make_plain(other)
        taken.add_norm(norm_of(other))

        def add() -> None:
            with torch.no_grad():
                total.add_(other)

        taken.await_(self._worker.submit(add, after=_earlier(taken)))

    def _send_and_add(self, taken: HostGradient, number: int, total: torch.Tensor, gradient: torch.Tensor) -> None:
        buffer = self._cache.take(max(gradient.nbytes, 1))
        staging = view_of(buffer, 0, taken.spec)
        before = _earlier(taken)
        arrived = self._send(taken, staging, gradient)
        takes_norm = self._takes_totals and not taken.was_seen
        if not takes_norm:
            taken.add_norm(norm_of(gradient))

        def add() -> None:
            with torch.no_grad():
                total.add_(staging)
            if takes_norm:
                taken.note_norm(number, norm_of(total))

        give_back = partial(self._cache.give_back, buffer)
        taken.await_(self._worker.submit(add, after=[*before, arrived], lastly=give_back))


def _earlier(gradient: HostGradient) -> tuple[Ticket | Job, ...]:
    """What an addition waits for: earlier copies and additions, and an update that reads their result."""
    return tuple(waiting for waiting in gradient.pending if not waiting.is_done())


def refuse_sparse_gradient(gradient: torch.Tensor, name: str) -> None:
    """Refuse a gradient that is not dense.

    Raises:
        SessionError: The gradient is not dense.
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
        model: May have such embeddings.
        optimizer: Parameters that it does not hold do not matter.
        asked: The settings that need dense gradients, as the user wrote them.

    Raises:
        ConfigError: There is such an embedding. The message names its parameter.
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
