"""Stash: saved tensors that wait on the host.

Note [Who holds a stashed tensor, and when it is freed]
Forward. The tensor's memory belongs to the computation. It is copied out during the computation, and the stash holds it
until the call after the next puts its first, or until all that it holds is more than twice the largest; then the
computation waits for the oldest copy and the stash lets that tensor go. So the device holds no more than two large tensors
for their copies, whatever the speed of either side, and small ones next to a large one (a layer's input and its angles) do
not make the computation wait for it at once.
Backward. The memory of what comes back is taken by the computation, in its order, and the copy comes after that point. The
computation waits for the copy before it reads; then autograd frees it as any other. What was brought ahead and is
dropped unread is freed only after the computation was told to wait for its copy, which would write into it.
Host. A buffer is lent to a tensor until the graph lets go of it, used or not. The next copy into it comes after the last copy
out of any buffer. A graph may die in the middle of anything, whoever holds which lock: what it held is noted down then,
and given back when the stash is used next.

Note [Which tensors go once]
Saved several times in one call of a group, with the same memory and version, a tensor goes once. Not across calls: writes
through `.data` and by some kernels do not count as versions, and a later call, or another graph, would get the bytes of an
earlier one. A write that does not count while the tensor is on its way is not seen at all, and the copy may have it.

Note [What is kept]
Locking costs half a second per GiB, and a step needs as many buffers as the one before: so what is given back is kept, and
serves requests of down to half its size. But batches have other lengths each step, and buffers of every size that ever
came would add up: where a request has to allocate, kept buffers go until no more is held than was ever in use at once.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence

import torch

from lowtide import compat
from lowtide.activations.saved import Geometry, Span, changed, geometry_of, span_of, version_of
from lowtide.errors import BudgetError
from lowtide.memory.chunk import POISON, aligned
from lowtide.memory.mover import Copied, Mover, Ticket

MAX_SLACK = 2
"""A buffer of up to so many times the bytes asked for will do."""
MAX_LEAVING = 2
"""Tensors of the largest size whose bytes may wait on the device for their copies to the host."""


class Stash:
    """The saved tensors of a model that wait on the host. Used from the loop's thread and from autograd's.

    Args:
        mover: Makes the copies.
        poison: Fill memory with NaN before each copy into it: a missing wait then shows in the gradients.
    """

    def __init__(self, mover: Mover, *, poison: bool = False) -> None:
        self._mover, self._poison = mover, poison
        self._lock = threading.RLock()
        self._buffers = HostBuffers(mover)
        self._parcels: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()
        self._leaving: deque[Body] = deque()
        self._gone: deque[Body] = deque()
        self._last_fetch: Ticket | None = None
        self._num_parcels = self._num_forwards = 0
        self._groups: list[object] = []
        """Groups that the forward has called so far."""
        self._is_closed = False
        self._closed_in: int | None = None
        self.num_put = 0
        self.put_bytes = 0
        self.put_bytes_of: Counter[object] = Counter()
        """The same by group."""
        self.brought_bytes = 0
        weakref.finalize(self, self._buffers.close).atexit = False

    @property
    def host_bytes(self) -> int:
        """Bytes lent now to tensors of living graphs."""
        with self._lock:
            self._sweep()
            return self._buffers.lent_bytes

    def accepts(self, tensor: torch.Tensor, min_bytes: int) -> bool:
        """Whether a tensor can and should go to the host."""
        device = self._mover.device
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            return False
        span = span_of(tensor)
        return span is not None and span.num_bytes >= min_bytes

    def open_parcel(self, depth: int, group: object = None) -> Parcel:
        """A parcel for the call of a group that begins."""
        with self._lock:
            # The group that came first comes again: another forward, unless one group is all there is.
            if len(self._groups) > 1 and self._groups[0] is group:
                self._num_forwards += 1
                self._groups.clear()
            if not any(group is other for other in self._groups):
                self._groups.append(group)
            parcel = Parcel(self._num_parcels, depth, self._num_forwards, group)
            self._parcels[parcel.number] = parcel
            self._num_parcels += 1
            return parcel

    def put(self, parcel: Parcel, tensor: torch.Tensor) -> Stashed:
        """Send a tensor to the host; see Note [Which tensors go once]."""
        span, storage = span_of(tensor), compat.plain_storage(tensor)
        assert span is not None, "a tensor that must stay"
        assert storage is not None, "a tensor without memory"
        with self._lock:
            self._sweep()
            key = (id(storage), span.part, version_of(tensor))
            slot = parcel.known.get(key)
            if slot is None or slot.storage() is not storage:
                slot = Slot(self._send(span, tensor, parcel.number), storage)
                weakref.finalize(slot, self._let_go, slot.body).atexit = False
                parcel.known[key] = slot
                self.put_bytes_of[parcel.group] += span.num_bytes
                parcel.slots.append(weakref.ref(slot))
            return Stashed(self, parcel, slot, geometry_of(tensor))

    def bring(self, stashed: Stashed) -> torch.Tensor:
        """Bring a tensor back to the device, and begin to bring the parcels that will be needed next."""
        slot, body, backward = stashed.slot, stashed.slot.body, compat.backward_number()
        with self._lock:
            body.check()
            if body.is_spoiled:
                raise changed(stashed.geometry.dtype, stashed.geometry.size)
            if body.watched is None and body.target is None:
                self._fetch(body)
            if body.fetched is not None:
                self._mover.compute_after(body.fetched.ended)
            memory = body.watched if body.watched is not None else body.target
            assert memory is not None
            tensor = body.span.restored(stashed.geometry, memory, is_source=body.watched is not None)
            slot.note_read(stashed, backward)
            if slot.is_read_up(backward):
                self._release(body)
            self._bring_ahead(stashed.parcel, backward)
            if self._is_closed and backward is not None and backward != self._closed_in:
                # Nobody else will come to give back what this backward leaves.
                self._closed_in = backward
                compat.call_after_backward(self.close)
        return tensor

    def close(self) -> None:
        """Free the host buffers; those of living graphs follow when they have run backward, or all are gone."""
        with self._lock:
            self._is_closed = True
            self._sweep()

    def _send(self, span: Span, tensor: torch.Tensor, parcel: int) -> Body:
        buffer = self._buffers.take(span.num_bytes)
        if self._poison:
            if self._last_fetch is not None:
                self._last_fetch.wait()
            buffer.fill_(POISON)
        after = [self._mover.now()] if self._last_fetch is None else [self._mover.now(), self._last_fetch]
        copied = self._mover.to_host(span.in_buffer(buffer), span.source(tensor), after, keep=False)
        body = Body(span, tensor, buffer, copied, parcel)
        self.num_put += 1
        self.put_bytes += span.num_bytes
        self._leaving.append(body)
        while _is_too_much(self._leaving):
            self._release(self._leaving[0])
        return body

    def _release(self, body: Body) -> None:
        """Let go of what is on the device for it."""
        if body.watched is not None:
            self._mover.compute_after(body.copied.ended)
            body.check()
            body.watched = None
        if body in self._leaving:
            self._leaving.remove(body)
        body.target = body.fetched = None

    def _fetch(self, body: Body) -> None:
        target = body.span.empty(self._mover.device)
        if self._poison and body.span.part is None:
            target.fill_(POISON)
        elif self._poison:
            target.fill_(-1)  # not contiguous: no bytes to look at, and a wrong value will do
        after = [self._mover.now(), body.copied.ended]
        body.fetched = self._mover.to_device(target, body.span.in_buffer(body.buffer), after)
        body.target = target
        self._last_fetch = body.fetched.ended
        self.brought_bytes += body.span.num_bytes

    def _bring_ahead(self, parcel: Parcel, backward: int | None) -> None:
        if backward is None or parcel.asked_in == backward or not parcel.depth:
            return
        parcel.asked_in = backward
        before = sorted(number for number in list(self._parcels.keys()) if number < parcel.number)[-parcel.depth :]
        parcels = [parcel, *(self._parcels.get(number) for number in reversed(before))]
        for wanted in parcels:
            if wanted is None or wanted.forward != parcel.forward:
                continue
            for reference in reversed(wanted.slots):
                slot = reference()
                if slot is None or slot.is_read_up(backward):
                    continue
                if slot.body.watched is None and slot.body.target is None:
                    self._fetch(slot.body)

    def _let_go(self, body: Body) -> None:
        # Called where a graph dies, which may be in the middle of anything, our own locked parts included, or during another
        # thread's: nothing is read twice here, and no lock of ours is taken.
        fetched, watched = body.fetched, body.watched
        if fetched is not None:
            # The copy still writes to memory that is about to be free.
            self._mover.compute_after(fetched.ended)
        if watched is not None:
            # And this one still reads it.
            self._mover.compute_after(body.copied.ended)
        body.watched = body.target = body.fetched = None
        self._gone.append(body)

    def _sweep(self) -> None:
        while self._gone:
            body = self._gone.popleft()
            if body in self._leaving:
                self._leaving.remove(body)
            self._buffers.give_back(body.buffer)
        if self._is_closed:
            self._buffers.clear()


class Stashed:
    """What autograd saves instead of a tensor that went to the host."""

    def __init__(self, stash: Stash, parcel: Parcel, slot: Slot, geometry: Geometry) -> None:
        self._stash, self.parcel, self.slot, self.geometry = stash, parcel, slot, geometry
        slot.readers.add(self)

    def peek(self) -> torch.Tensor:
        """Bring the tensor back to the device."""
        return self._stash.bring(self)

    take = peek


class Slot:
    """One stashed storage, or part of one; lives as long as a graph holds a `Stashed` of it."""

    def __init__(self, body: Body, storage: torch.UntypedStorage) -> None:
        self.body = body
        self.storage = weakref.ref(storage)
        self.readers: weakref.WeakSet[Stashed] = weakref.WeakSet()
        self._backward: int | None = None
        self._done: weakref.WeakSet[Stashed] = weakref.WeakSet()

    def is_read_up(self, backward: int | None) -> bool:
        """Whether all its readers have read it in this backward."""
        return self._backward == backward and len(self._done) >= len(self.readers)

    def note_read(self, reader: Stashed, backward: int | None) -> None:
        """A reader has read it in this backward."""
        if self._backward != backward:
            self._backward, self._done = backward, weakref.WeakSet()
        self._done.add(reader)


class Body:
    """The memory of a stashed storage. Not in `Slot` itself, so that it can be freed after the slot."""

    def __init__(self, span: Span, tensor: torch.Tensor, buffer: torch.Tensor, copied: Copied, parcel: int) -> None:
        self.span, self.buffer, self.copied, self.parcel = span, buffer, copied, parcel
        self.watched: torch.Tensor | None = tensor.detach()
        """The storage's tensor while it is still on the device; it must not be written to."""
        self.version = version_of(tensor)
        self.is_spoiled = False
        self.target: torch.Tensor | None = None
        self.fetched: Copied | None = None

    def check(self) -> None:
        """Note whether the tensor was written to while its copy may not have read it."""
        self.is_spoiled |= self.watched is not None and version_of(self.watched) != self.version


class Parcel:
    """What one call of a group has put: it comes back together.

    Args:
        number: In the order of the calls.
        depth: How many parcels before it are brought when it is asked for.
        forward: Numbers the model's forward, as far as can be told: only parcels of the same one are brought with it.
        group: Whose call it is.
    """

    def __init__(self, number: int, depth: int, forward: int, group: object) -> None:
        self.number, self.depth, self.forward, self.group = number, depth, forward, group
        self.slots: list[weakref.ref[Slot]] = []
        self.known: weakref.WeakValueDictionary[tuple[object, ...], Slot] = weakref.WeakValueDictionary()
        self.asked_in: int | None = None


class HostBuffers:
    """Host memory that stashed tensors borrow, and that waits for the next step. Not for several threads: the stash has a lock.

    See Note [What is kept].

    Args:
        mover: Makes the buffers, and the copies that may be under way in those that were given back.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._kept: list[torch.Tensor] = []
        """Kept buffers by size; buffers of one size are used first in, first out."""
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """By identity of the view that was handed out: the view, the whole buffer and the bytes asked for."""
        self._needed_bytes = self._most_needed_bytes = 0
        self.lent_bytes = 0
        """Bytes in buffers that were taken and not given back."""

    @property
    def held_bytes(self) -> int:
        """Bytes in kept buffers."""
        return sum(map(_num_bytes, self._kept))

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of so many bytes, with arbitrary content. Give back this very tensor."""
        needed_bytes = aligned(max(1, num_bytes))
        self._most_needed_bytes = max(self._most_needed_bytes, self._needed_bytes + needed_bytes)
        index = bisect_left(self._kept, needed_bytes, key=_num_bytes)
        if index < len(self._kept) and _num_bytes(self._kept[index]) <= MAX_SLACK * needed_bytes:
            whole = self._kept.pop(index)
        else:
            whole = self._allocated(needed_bytes)
        view = whole.narrow(0, 0, num_bytes)
        self._lent[id(view)] = (view, whole, needed_bytes)
        self._needed_bytes += needed_bytes
        self.lent_bytes += whole.numel()
        return view

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer that `take` gave, for a later one; copies may still be under way in it."""
        _, whole, needed_bytes = self._lent.pop(id(buffer))
        self._needed_bytes -= needed_bytes
        self.lent_bytes -= whole.numel()
        self._kept.insert(bisect_right(self._kept, whole.numel(), key=_num_bytes), whole)

    def clear(self) -> None:
        """Free the kept buffers, once the copies are done."""
        self._free(len(self._kept))

    def close(self) -> None:
        """Free the lent buffers as well: nobody is left who would give them back."""
        for view, _, _ in list(self._lent.values()):
            self.give_back(view)
        self.clear()

    def _allocated(self, needed_bytes: int) -> torch.Tensor:
        surplus_bytes = self.held_bytes + self.lent_bytes + needed_bytes - self._most_needed_bytes
        num_freed = 0
        while surplus_bytes > 0 and num_freed < len(self._kept):
            num_freed += 1
            surplus_bytes -= _num_bytes(self._kept[-num_freed])
        self._free(num_freed)
        try:
            return self._mover.host_buffer(needed_bytes)
        except BudgetError:
            if not self._kept:
                raise
            self.clear()
            return self._mover.host_buffer(needed_bytes)

    def _free(self, num_buffers: int) -> None:
        """The largest: so the fewest go."""
        if not num_buffers:
            return
        # What was given back unread may still be written to, and what was read ahead read from.
        self._mover.drain()
        for _ in range(num_buffers):
            self._mover.free_host_buffer(self._kept.pop())


def _num_bytes(buffer: torch.Tensor) -> int:
    return buffer.numel()


def _is_too_much(leaving: Sequence[Body]) -> bool:
    """Whether the oldest must go; see Note [Who holds a stashed tensor, and when it is freed]."""
    sizes = [body.span.num_bytes for body in leaving]
    return leaving[0].parcel < leaving[-1].parcel - 1 or sum(sizes) > MAX_LEAVING * max(sizes)
