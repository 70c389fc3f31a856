"""CheckingMover: finds copies that a GPU may run too early, whatever the luck of the moment.

Note [How an order is checked]
Copies to the device, copies to the host and the computation of each thread are queues beside each other. Each has a clock: how
far it has come, and how far each other queue must have come by then. A copy moves its queue's clock on to the tickets that it
comes after; `compute_after` moves the thread's. What is not said by any ticket may happen in any order. So a copy that uses
memory must have all earlier uses of that memory in its clock, and memory that is freed must have them in the clock of the
thread that frees it. The copies themselves run at once: values say nothing here, the clocks do.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch

from lowtide import compat
from lowtide.memory.mover import Copied, Ticket

Clock = dict[object, int]


class CheckedTicket:
    """A point in a queue: what has happened by then."""

    def __init__(self, clock: Clock) -> None:
        self.clock = dict(clock)

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def time_s(self) -> float:
        return 0.0


class CheckingMover:
    """See the module's docstring. `faults` must be empty in the end."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.num_copies = 0
        self.freed: list[int] = []
        self._clocks: dict[object, Clock] = defaultdict(dict)
        self._reads: dict[int, list[CheckedTicket]] = defaultdict(list)
        self._writes: dict[int, list[CheckedTicket]] = defaultdict(list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        self.freed.append(buffer.numel())
        self._require(self._uses(_key(buffer)), self._clocks["host"], "a host buffer is freed")

    def grow(self, buffer: torch.Tensor) -> None:
        raise NotImplementedError

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        raise NotImplementedError

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        return self._copy("to device", target, source, after)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        assert not keep, "a stash holds its tensors itself"
        return self._copy("to host", target, source, after)

    def now(self) -> CheckedTicket:
        queue = _computation()
        self._clocks[queue][queue] = self._clocks[queue].get(queue, 0) + 1
        return CheckedTicket(self._clocks[queue])

    def compute_after(self, ticket: Ticket) -> None:
        _move_on(self._clocks[_computation()], ticket)

    def drain(self) -> None:
        for clock in list(self._clocks.values()):
            _move_on(self._clocks["host"], CheckedTicket(clock))

    def _copy(self, queue: str, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket]) -> Copied:
        self.num_copies += 1
        clock = self._clocks[queue]
        for ticket in after:
            _move_on(clock, ticket)
        own = _computation()
        if clock.get(own, 0) < self._clocks[own].get(own, 0):
            self.faults.append(f"a copy {queue} comes before what was computed")
        self._require(self._writes[_key(source)], clock, f"a copy {queue} reads")
        self._require(self._uses(_key(target)), clock, f"a copy {queue} writes")
        started = CheckedTicket(clock)
        clock[queue] = clock.get(queue, 0) + 1
        ended = CheckedTicket(clock)
        with torch.no_grad():
            target.copy_(source)
        self._note(self._reads, source, ended)
        self._note(self._writes, target, ended)
        return Copied(started, ended)

    def _note(self, uses: dict[int, list[CheckedTicket]], tensor: torch.Tensor, ended: CheckedTicket) -> None:
        key = _key(tensor)
        if not self._uses(key):
            storage = compat.plain_storage(tensor)
            assert storage is not None
            weakref.finalize(storage, self._freed, key).atexit = False
        uses[key].append(ended)

    def _freed(self, key: int) -> None:
        clock = {**self._clocks["host"]}
        _move_on(clock, CheckedTicket(self._clocks[_computation()]))
        self._require(self._uses(key), clock, "memory is freed")
        self._reads.pop(key, None)
        self._writes.pop(key, None)

    def _uses(self, key: int) -> list[CheckedTicket]:
        return [*self._reads.get(key, []), *self._writes.get(key, [])]

    def _require(self, earlier: list[CheckedTicket], clock: Clock, what: str) -> None:
        if any(clock.get(queue, 0) < count for ticket in earlier for queue, count in ticket.clock.items()):
            self.faults.append(f"{what} before an earlier copy has ended")


def _computation() -> tuple[str, int]:
    return "computation", threading.get_ident()


def _key(tensor: torch.Tensor) -> int:
    return compat.storage_key(tensor)


def _move_on(clock: Clock, ticket: Ticket) -> None:
    assert isinstance(ticket, CheckedTicket)
    for queue, count in ticket.clock.items():
        clock[queue] = max(clock.get(queue, 0), count)
