"""Mover: issues every copy between host and device, and owns the order in which they happen.

Three queues run beside each other: the computation, copies to the device and copies to the host. Each copy says what it
must come after (`after`), and gives back a ticket that others can come after. Nothing here waits on the host, unless
`Ticket.wait` is called.

Note [Who frees a chunk's device memory, and when]
A chunk's device buffer is one storage that lives as long as the session; its memory comes with `grow` and goes with
`shrink`. Views that autograd saved point to that storage, and are valid again after the next `grow` and copy. Memory is
taken and freed on the queue of copies to the device. What `shrink` frees may be handed to the next `grow` at once,
while the computation that read it has not run yet; so the next copy to the device comes after every ticket that
`shrink` was given. If a ticket were forgotten there, a copy could overwrite weights in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

MAX_KEPT_BYTES = 1 << 28
"""Most bytes of gradients that wait on the device for their copy to the host, unless another number is given."""


class Ticket(Protocol):
    """A point in one of the queues."""

    def is_done(self) -> bool:
        """Whether everything before the point has happened."""

    def wait(self) -> None:
        """Wait on the host until it has."""

    def time_s(self) -> float:
        """When it happened, in seconds from the mover's start. Waits for it."""


class Copied(NamedTuple):
    """A copy under way: where it started in its queue and where it ends."""

    started: Ticket
    ended: Ticket


class Exchange(Protocol):
    """Something under way between ranks."""

    def is_done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """What comes next waits for it: the host, or on CUDA what is queued on the current stream."""


class Mover(Protocol):
    """What both the CUDA mover and the emulated one do."""

    @property
    def device(self) -> torch.device:
        """Where the computation runs; the CPU for an emulated device."""

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """A flat byte tensor on the device, with memory: views are made of it before `shrink` takes that away."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A flat byte tensor on the host from which and to which copies run at full speed."""

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Give a `host_buffer` back; every copy from and to it must be done."""

    def grow(self, buffer: torch.Tensor) -> None:
        """Give a `device_buffer` its memory back, with no meaning in it."""

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """Take its memory away as soon as `after` has happened. See Note [Who frees a chunk's device memory, and when]."""

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Copy from host to device; the source must stay unchanged until it is done."""

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """Copy from device to host; the mover keeps the source alive until it is done.

        Without `keep` the caller keeps the source, and makes the computation wait for the copy before it frees it. The bytes on
        the device then do not depend on the speed of the host.
        """

    def now(self) -> Ticket:
        """The point behind all computation that was queued so far."""

    def compute_after(self, ticket: Ticket) -> None:
        """Computation that is queued from now on comes after the ticket."""

    def drain(self) -> None:
        """Wait on the host until every copy is done, and the computation that was queued so far."""


class GradientCarrier(Mover, Protocol):
    """Also sends several tensors to the host for the price of one, because events cost the host more than small copies; and
    exchanges tensors with other ranks.
    """

    def all_to_host(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Sequence[Ticket] = ()
    ) -> Copied:
        """Copy each as `to_host` does, one after the other; `ended` is where the last one ends."""

    def exchange(self, begin: Callable[[], Exchange], after: Sequence[Ticket]) -> Copied:
        """Begin an exchange with other ranks behind `after`, in a queue of its own, and say when it is over."""

    def expect(self, num_bytes: int) -> None:
        """So many bytes are about to be sent: make the computation wait for older copies, if too many bytes would wait."""

    def queue(self) -> object:
        """The queue of this thread's computation: the current stream."""

    def point_in(self, queue: object) -> Ticket:
        """The point behind all computation that was queued so far on a queue that `queue` gave."""
