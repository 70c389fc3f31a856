"""The parts of a session that touch memory, for tensors that have none: what they take shows in the trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lowtide.errors import BudgetError
from lowtide.memory.chunk import Chunk, StoredGroup
from lowtide.memory.mover import Copied, Ticket
from lowtide.memory.store import ChunkStore
from lowtide.optim.device import table as device_table
from lowtide.optim.device.table import WORKSPACE_BYTES, num_partials
from lowtide.optim.rules import Adafactor, require_rule
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import Numerics, Rounding, rounding_for
from lowtide.planning.plan import Schedule
from lowtide.runtime.parameters.gradients import GradientState, HostGradient
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.updates.kernel_optimizer import follow_writes
from lowtide.runtime.updates.norms import GradientWatch, Verdict, norm_of
from lowtide.runtime.updates.updater import judge_here, judge_sent
from lowtide.tracing.recorder import Life
from lowtide.tracing.settings import DeviceMemory


class Point:
    """A point in a step that has always been passed: a trace has no clock. It also stands for an update on the host."""

    def is_done(self) -> bool:
        """True: what is asked about has happened."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def time_s(self) -> float:
        """No time passes."""
        return 0.0


class FootprintMover:
    """See `memory.mover`; buffers are meta tensors, and stand for memory of the traced device while they are grown.

    Note [How long sources are kept]
    On a device the source of a copy to the host goes when the copy is done or too much waits. The host is ahead of it as a
    rule, so that hardly any copy is done when it looks: here none is, and the figure is the most that can be.

    Args:
        memory: Of the traced device.
        max_kept_bytes: As for a `CudaMover`.
    """

    def __init__(self, memory: DeviceMemory, *, max_kept_bytes: int) -> None:
        self._memory = memory
        self._max_kept_bytes = max_kept_bytes
        self._lives: dict[int, Life] = {}
        self._kept: deque[torch.Tensor] = deque()
        self._kept_bytes = 0

    @property
    def device(self) -> torch.device:
        """The ghost device."""
        return self._memory.device

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """A place without memory yet."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """The host's memory is not the device's."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Nothing is locked."""

    def grow(self, buffer: torch.Tensor) -> None:
        """Take the memory."""
        self._lives[id(buffer)] = self._memory.take(buffer.nbytes, "weights")

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """Give it back; the next to get it comes after `after` by itself."""
        del after
        self._memory.give_back(self._lives.pop(id(buffer)))

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Nothing is copied."""
        del target, source, after
        return Copied(Point(), Point())

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """Nothing is copied, but the source waits for it; see Note [How long sources are kept]."""
        del target, after
        if keep:
            self._kept.append(source)
            self._kept_bytes += source.nbytes
            while self._kept_bytes > self._max_kept_bytes:
                self._kept_bytes -= self._kept.popleft().nbytes
        return Copied(Point(), Point())

    def now(self) -> Point:
        """A point that has been reached."""
        return Point()

    def compute_after(self, ticket: Ticket) -> None:
        """There is nothing to wait for."""

    def drain(self) -> None:
        """All copies are done."""
        self._kept.clear()
        self._kept_bytes = 0


class FootprintResidency:
    """The groups of a traced session over their store, whose listener and books this is.

    Args:
        groups: Without memory.
        mover: Takes the memory of the traced device.
        tell: Told of errors before they are raised.
        window_bytes: How many device bytes streamed chunks may take together.
        prefetch_depth: How many groups ahead are fetched.
    """

    def __init__(
        self,
        groups: Iterable[ManagedGroup],
        mover: FootprintMover,
        tell: Callable[[BaseException], None],
        *,
        window_bytes: int,
        prefetch_depth: int,
    ) -> None:
        self.groups = {group.name: group for group in groups}
        self._tell = tell
        self.store = ChunkStore(
            [group.stored for group in self.groups.values()],
            mover,
            [self],
            window_bytes=window_bytes,
            prefetch_depth=prefetch_depth,
            listener=self,
        )

    def open(self, group: ManagedGroup) -> None:
        """Bring the group to the device.

        Raises:
            BudgetError: The window does not hold it beside those that are open; a session would refuse it too.
        """
        try:
            self.store.open(group.name)
        except BudgetError as error:
            self._tell(error)
            raise

    def open_all(self, groups: Sequence[ManagedGroup]) -> None:
        """Open all of the groups."""
        for group in groups:
            self.open(group)

    def close(self, group: ManagedGroup, at: Ticket | None = None) -> None:
        """One window less uses the group."""
        self.store.close(group.name, at)
        if not group.stored.num_open:
            self.forget_old_copy(group)

    def forget_old_copy(self, group: ManagedGroup) -> None:
        """Drop the group's copy on the device, if the host is changing the weights: it is old."""
        if group.stored.is_changing and not group.is_resident and not group.stored.num_open:
            self.store.drop(group.name)

    def keep_writes(self, group: ManagedGroup) -> None:
        """A forward that writes to its own weights takes no memory for it."""

    def keep_write(self, group: ManagedGroup, chunk: Chunk) -> None:
        """A hook that writes to weights takes no memory for it either."""

    def write_back(self, group: ManagedGroup, chunk: Chunk, at: Ticket | None = None) -> None:
        """The computation changed an open chunk."""
        del group
        self.store.write_back(chunk, at)

    def settle_held(self) -> None:
        """Does nothing: no user code looks at weights without memory."""

    def guard(self, group: ManagedGroup) -> None:
        """Does nothing: no user code looks at weights without memory."""

    def point_idle_to_host(self) -> None:
        """Does nothing: no user code looks at weights without memory."""

    def rebuild(self) -> None:
        """A trace that broke off is over."""

    # -- told by the store ---------------------------------------------------------------------------------------------

    def charge(self, num_bytes: int, owner: str) -> None:
        """A trace has room for everything."""

    def credit(self, num_bytes: int, owner: str) -> None:
        """A trace has room for everything."""

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """Always: no user code writes to weights without memory."""
        return True

    def clear(self, owners: Collection[str]) -> None:
        """A trace has room for everything."""

    def before_fetch(self, chunk: Chunk) -> None:
        """There are no bytes that could be the wrong ones."""

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        """Copies are not counted."""

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """The mover has taken the memory."""

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        """The mover has given it back."""

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        """Nothing is waited for."""


class KernelFootprint(ChunkOptimizer):
    """Keeps the state that the kernels keep, and makes what they need for a short time: tables, and room for partial sums.

    Args:
        optimizer: The user's, whose rule the kernels would run.
        numerics: Which numbers the update works on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, numerics: Numerics) -> None:
        super().__init__(optimizer)
        self._numerics = numerics
        self._states: dict[int, ParameterState] = {}

    def undo_of(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
        """As `KernelOptimizer`: its updates have a gate."""
        del parameters
        return lambda: None

    @torch.no_grad()
    def run(self, updates: Sequence[Update], settings: Settings) -> None:
        """What one call of the kernels takes: as `KernelOptimizer.run`."""
        rules = [require_rule(self.optimizer, {**group, "params": ()}) for group in settings.groups]
        pieces: list[Tensor] = []
        wholes: list[Tensor] = []
        copies: list[Tensor] = []
        for update in updates:
            weight, rule = update.target, rules[self._group_of[id(update.parameter)]]
            state = self._states.get(id(update.parameter))
            if state is None:
                state = self._states[id(update.parameter)] = new_state(weight, rule, self._numerics)
                tensors = dict(enumerate(state.all_tensors()))
                self.optimizer.state[update.parameter] = {str(number): tensor for number, tensor in tensors.items()}
            if rounding_for(weight, self._numerics) is Rounding.MASTER:
                follow_writes(weight, state)
            if weight.grad is not None and weight.grad.stride() != weight.stride():
                copies.append(torch.empty_like(weight, dtype=weight.grad.dtype))
            (wholes if isinstance(rule, Adafactor) else pieces).append(weight)
        if pieces:
            row_bytes = 8 * len(device_table.COLUMNS) + 4 * device_table.NUM_FLOATS
            torch.empty(len(pieces) * row_bytes, dtype=torch.uint8, device=pieces[0].device)
        held: tuple[Tensor, ...] = ()
        for batch in _batches(wholes):
            num_sums = len(batch) + sum(num_partials(weight.shape) for weight in batch)
            sums = torch.empty(num_sums, dtype=torch.float32, device=batch[0].device)
            # A batch lets go of its own when the next one has taken its memory.
            held = (sums, *_tables(batch, len(device_table.MATRIX_COLUMNS), len(device_table.MATRIX_FLOATS)))
        del held, copies


def _tables(weights: Sequence[Tensor], num_columns: int, num_floats: int) -> tuple[Tensor, Tensor]:
    device, rows = weights[0].device, len(weights)
    integers = torch.empty(rows, num_columns, dtype=torch.int64, device=device)
    return integers, torch.empty(rows, num_floats, dtype=torch.float32, device=device)


def _batches(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """As `device_table.batches_of` shares launches, as far as shapes and types tell: addresses may split them further."""
    by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for weight in weights:
        if weight.numel():
            by_kind.setdefault((weight.dtype, weight.dim() > 1), []).append(weight)
    for alike in by_kind.values():
        together: list[Tensor] = []
        num_bytes = 0
        for weight in alike:
            needed = 4 * (1 + num_partials(weight.shape))
            if together and num_bytes + needed > WORKSPACE_BYTES:
                yield together
                together, num_bytes = [], 0
            together.append(weight)
            num_bytes += needed
        yield together


class FootprintGradients:
    """What `GradientMover` is in a session: gradients leave for the host."""

    def __init__(self, mover: FootprintMover) -> None:
        self._mover = mover

    def take(self, taken: HostGradient, gradient: torch.Tensor) -> None:
        """Complete: it waits for its copy, and is nobody's beside that."""
        taken.note_norm(taken.count_take(), norm_of(gradient))
        self._mover.to_host(gradient, gradient)
        taken.become(GradientState.ARRIVING)

    def send(self) -> None:
        """Nothing to do: `take` has sent them."""

    def show(self, gradient: HostGradient, host_view: torch.Tensor | None, *, is_resident: bool) -> None:
        """What is on the host costs the device nothing."""
        del host_view, is_resident
        gradient.end_backward()

    def abandon(self, gradients: Iterable[HostGradient], chunks: Iterable[Chunk]) -> None:
        """A trace that broke off is over."""


class FootprintWatch(GradientWatch):
    """Norms take memory and have no values: nobody is told of anything."""

    def _send(self, verdicts: Sequence[Verdict]) -> None:
        arrived = _LatePoint(torch.stack([norm for verdict in verdicts for norm in verdict.norms]))
        for verdict in verdicts:
            verdict.be_sent(torch.empty(0), arrived)


class _LatePoint(Point):
    """A copy that holds its source until it is waited for, at the beginning of the next backward."""

    def __init__(self, source: Tensor) -> None:
        self._source = source

    def is_done(self) -> bool:
        """Never done before somebody waits for it."""
        return False


class FootprintUpdater:
    """What `Updater` is in a session."""

    def __init__(self, optimizer: ChunkOptimizer, store: ChunkStore, watch: FootprintWatch, schedule: Schedule) -> None:
        self.optimizer = optimizer
        self._store = store
        self._watch = watch
        self._schedule = schedule

    is_torn = False
    """A trace that broke off is over, and nobody asks what has moved."""

    def has_updated(self, chunk: str) -> bool:
        """See `is_torn`."""
        return False

    def begin_step(self) -> None:
        """See `is_torn`."""

    def judge_in_backward(self, members: Sequence[ManagedParameter]) -> torch.Tensor | None:
        """Norms on the device, until the end of the backward."""
        return judge_here(members, self.optimizer, self._watch)

    def update_here(
        self, members: Sequence[ManagedParameter], loose: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """One step on parameters whose gradients are on the device."""
        parameters = [managed.parameter for managed in members] + list(loose)
        updates = [Update(parameter, parameter) for parameter in parameters if parameter.grad is not None]
        if updates:
            self.optimizer.run(updates, settings)

    def update_on_host(
        self, group: ManagedGroup, chunk: Chunk, members: Sequence[ManagedParameter], settings: Settings
    ) -> None:
        """One step on the host: afterwards what the device has of the weights is old."""
        del settings
        self._store.refresh_host(chunk)
        if self._schedule is Schedule.IN_BACKWARD:
            judge_sent(members, self._watch)
        for managed in members:
            if managed.host_gradient is not None:
                managed.host_gradient.forget_norm()
        self._store.host_changes(chunk, Point(), group.place)
