"""Snapshot: the values that tensors have now, read by threads of its own into bounded memory before anybody changes them.

Note [What is copied, and when]
Nothing is copied when a snapshot begins. Readers go through the tensors in the order in which they are expected to change,
copy them to staging memory, and writers take them from there. Who is about to change a tensor asks first (`wait_for`,
`reads_of`): what it changes is read next, and it waits until that is over. Where the staging memory is full, the readers
wait for the writers, and so does the change. What nobody would announce a change of is read before all others, and the
snapshot's maker waits for it (`wait_for_unannounced`).

Note [Slabs]
Staging is made of slabs. A reader fills one with the next bytes in order, wherever tensors begin and end, so that none of the
allowance is lost, and a tensor larger than all of it goes through in pieces. A slab that is taken will be read without waiting
for another, and one that is read will be written: so the threads cannot wait for each other in a circle. Slabs are mapped
afresh, in huge pages where the system has them, and first touched by the readers: the loop never pays for a page. They are
private: Python's anonymous memory is shared by default, which has huge pages by another setting, and takes each under a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide import compat
from lowtide.errors import BudgetError
from lowtide.memory.tier import Tier
from lowtide.runtime.checkpoints.blocks import DIRECT_BYTES, PAGE_BYTES
from lowtide.runtime.checkpoints.lock import in_forked_children
from lowtide.units import MiB

SLAB_BYTES = 32 * MiB
"""Enough that a copy runs at full speed, and little beside any allowance."""
_ALIGNMENT = 16
"""Where a tensor may start in a slab: numbers of any size may."""
_LEAST_SLABS = 4
"""In which a small allowance is divided, so that some are read while others are written."""
LEAST_BYTES = 4096
"""Of an allowance."""
_MOST_READERS = 16
_MOST_WRITERS = 4
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
"""For `madvise`, which Python has no name for: a child that is forked has none of this memory, and keeps none of it alive."""
OWNER = "staging of a checkpoint"
"""Under which the memory stands in the books."""

Bytes = NDArray[np.uint8]
_ELEMENTS: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """One tensor of a snapshot."""

    file: str
    name: str
    tensor: torch.Tensor
    """Kept, so that its memory lives until it was read. No view is made of it: who holds weights is told by counting these."""
    parameter: torch.Tensor | None = None
    """Whose changes change it too; None where none does."""
    is_announced: bool = False
    """Whether each change of it is announced beforehand."""
    offset: int = 0
    """Where its first byte is in its file. A large one is in step with that in the slabs, for disks that are written directly."""

    def room_bytes(self, num_bytes: int) -> int:
        """The most that so many bytes of it take in slabs."""
        return aligned(num_bytes) + (PAGE_BYTES if self._is_large and num_bytes else 0)

    def place_after(self, place: int, num_taken: int) -> int:
        """Where in a slab the bytes from this one on begin, behind what is there."""
        return place + (self.offset + num_taken - place) % PAGE_BYTES if self._is_large else aligned(place)

    @property
    def _is_large(self) -> bool:
        return self.tensor.nbytes >= DIRECT_BYTES


class PieceWriter(Protocol):
    """Takes what was read, from several threads and in any order: a `CheckpointWriter`."""

    def write(self, file: str, name: str, value: torch.Tensor, *, start: int) -> None:
        """These are the tensor's elements from this one on, in row-major order."""


class _Tensor:
    """Where one tensor's bytes are, and how far they were read."""

    def __init__(self, source: Source, part: _Part) -> None:
        self.source, self.part = source, part
        with compat.without_torch_function():
            tensor = source.tensor
            self.num_bytes = tensor.nbytes
            self.device = tensor.device
            self._is_contiguous = tensor.is_contiguous()
            self._on_host = None if tensor.is_cuda else _elements_of(tensor)
            self._row_bytes = tensor.nbytes // next((size for size in tensor.shape if size > 1), 1)
            self._element_bytes = tensor.element_size()
        self.num_taken = 0
        """Bytes that are read, or will be without waiting."""

    @property
    def left_bytes(self) -> int:
        """Room that the rest takes in slabs."""
        return self.source.room_bytes(self.num_bytes - self.num_taken)

    def next_bytes(self, room: int) -> int:
        """How many bytes the next piece has in a slab with this much room; 0 where the slab is too small."""
        rest = self.num_bytes - self.num_taken
        if self._is_contiguous or room >= rest:
            return min(room, rest) // self._element_bytes * self._element_bytes
        inside = self.num_taken % self._row_bytes
        if not inside and room >= self._row_bytes:
            return room // self._row_bytes * self._row_bytes
        return min(room, self._row_bytes - inside) // self._element_bytes * self._element_bytes

    def read(self, offset: int, target: Bytes, queue: _DeviceQueue | None) -> None:
        """Fill the target with the tensor's bytes from the offset on, in row-major order."""
        if self._on_host is None:
            assert queue is not None
            queue.read(self.source.tensor, offset, target)
            return
        elements = self._on_host
        if self._is_contiguous:
            np.copyto(target, elements.reshape(-1).view(np.uint8)[offset : offset + target.size])
            return
        into = target.view(elements.dtype)
        row, inside = divmod(offset, self._row_bytes)
        if not inside and target.size % self._row_bytes == 0:
            rows = elements.squeeze()[row : row + target.size // self._row_bytes]
            np.copyto(into.reshape(rows.shape), rows)
        else:
            start = offset // self._element_bytes
            np.copyto(into, elements.flat[start : start + into.size])


def _elements_of(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The host's bytes of a tensor, as numbers of the same size, without a tensor more on its storage."""
    size = tensor.element_size()
    length = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = (ctypes.c_char * (length * size)).from_address(tensor.data_ptr())
    strides = [stride * size for stride in tensor.stride()]
    flat: NDArray[np.generic] = np.frombuffer(memoryview(raw).cast("B"), dtype=_ELEMENTS[size])
    return np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), strides, writeable=False)


class _Part:
    """Tensors that change together."""

    def __init__(self) -> None:
        self.tensors: list[_Tensor] = []
        self.place = 0
        """The tensor that is taken next."""
        self.num_unread = 0
        """Bytes."""

    def next_tensor(self) -> _Tensor | None:
        """The first that is not taken whole."""
        while self.place < len(self.tensors):
            if self.tensors[self.place].num_taken < self.tensors[self.place].num_bytes:
                return self.tensors[self.place]
            self.place += 1
        return None


@dataclass(slots=True)
class _Piece:
    tensor: _Tensor
    offset: int
    place: int
    """Of its first byte in the slab."""
    num_bytes: int


@dataclass(slots=True)
class _Slab:
    memory: Bytes
    pieces: list[_Piece] = field(default_factory=list)

    def bytes_of(self, piece: _Piece) -> Bytes:
        return self.memory[piece.place : piece.place + piece.num_bytes]


def aligned(num_bytes: int) -> int:
    """The room that a piece takes in a slab."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _mapped(num_bytes: int) -> Bytes:
    """Memory of its own that goes back to the system with the array."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
        if advice is not None:
            with contextlib.suppress(OSError):  # not every kernel has them
                memory.madvise(advice)
    return np.frombuffer(memory, dtype=np.uint8)


class _DeviceQueue:
    """A reader's own stream of copies from a CUDA device, through locked memory where the budget has some.

    Not the session's mover, which is for the thread of a call: these copies are issued while that computes. Each is waited for
    here, on the host, so that whoever changes the tensor next comes after it on any stream.

    Args:
        device: Where the tensors are.
        begun: The point of the computation at which the snapshot was taken.
        pinned: Charged for the locked memory. Where one has not so much, copies take a slower way.
    """

    def __init__(self, device: torch.device, begun: torch.cuda.Event, pinned: Sequence[Tier]) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_event(begun)
        self._tiers: list[Tier] = []
        self._locked: torch.Tensor | None = None
        try:
            for tier in pinned:
                tier.charge(SLAB_BYTES, OWNER)
                self._tiers.append(tier)
        except BudgetError:
            self.close()
            return
        # Not torch's own locked memory, which stays locked when it is given back.
        locked = torch.empty(SLAB_BYTES, dtype=torch.uint8)
        if compat.lock_host_memory(locked):
            self.close()
        else:
            self._locked = locked

    def read(self, tensor: torch.Tensor, offset: int, target: Bytes) -> None:
        """Copy, and wait for it."""
        with compat.without_torch_function(), torch.no_grad(), torch.cuda.stream(self._stream):
            flat = _part_on_device(tensor, offset, target.size)
            staged = torch.from_numpy(target) if self._locked is None else self._locked[: target.size]
            staged.copy_(flat, non_blocking=True)
            self._stream.synchronize()
        if self._locked is not None:
            np.copyto(target, staged.numpy())

    def close(self) -> None:
        """Give the locked memory back."""
        if self._locked is not None:
            compat.unlock_host_memory(self._locked.data_ptr())
            self._locked = None
        while self._tiers:
            self._tiers.pop().credit(SLAB_BYTES, OWNER)


def _part_on_device(tensor: torch.Tensor, offset: int, num_bytes: int) -> torch.Tensor:
    """Bytes of a tensor in row-major order; a copy of the rows that have them, where they do not lie in that order."""
    flat = tensor.detach()
    if not flat.is_contiguous():
        rows = flat.squeeze()
        row_bytes = tensor.nbytes // rows.shape[0]
        first = offset // row_bytes
        flat, offset = rows[first : -(-(offset + num_bytes) // row_bytes)], offset - first * row_bytes
    return flat.reshape(-1).view(torch.uint8)[offset : offset + num_bytes]


class Reads:
    """What a change comes after: the reads of the tensors that it changes."""

    def __init__(self, snapshot: Snapshot, parts: Sequence[_Part]) -> None:
        self._snapshot = snapshot
        self._parts = parts

    def is_done(self) -> bool:
        """Whether all were read."""
        return not self._snapshot.is_to_read(self._parts)

    def wait(self) -> None:
        """Wait until they are. Raises nothing where the snapshot failed: it is of no use then, and the change may come."""
        self._snapshot.wait_until_read(self._parts)


class Snapshot:
    """See the file's docstring. Threads are the caller's: `read` and `write` run in as many as it likes.

    Args:
        sources: In the order in which they are expected to change.
        allowance_bytes: The most that staging may take; at least `LEAST_BYTES`.
        on_read: Called once, from any thread, when nothing is left to read, or the snapshot has failed.
        pinned: Charged for locked memory of copies from a CUDA device.
    """

    def __init__(
        self,
        sources: Iterable[Source],
        *,
        allowance_bytes: int,
        on_read: Callable[[], None] = lambda: None,
        pinned: Sequence[Tier] = (),
    ) -> None:
        assert allowance_bytes >= LEAST_BYTES, "checked by the caller"
        self._allowance_bytes = allowance_bytes
        slab_bytes = min(SLAB_BYTES, allowance_bytes // _LEAST_SLABS)
        # Whole pages, so that what goes on in the next slab is in step with its file from the first byte on.
        unit = PAGE_BYTES if slab_bytes >= PAGE_BYTES else _ALIGNMENT
        self._slab_bytes = slab_bytes // unit * unit
        self._on_read = on_read
        self._pinned = pinned
        self._condition = threading.Condition()
        self._parts: dict[int, _Part] = {}
        """By the `id` of the parameter."""
        self._unannounced = _Part()
        """Tensors of which no change is announced."""
        for source in sources:
            self._add(source)
        self._all = [self._unannounced, *self._parts.values()]
        self._order = deque(self._all)
        self._urgent: deque[_Part] = deque()
        self.num_bytes = sum(part.num_unread for part in self._all)
        self._num_unread = self.num_bytes
        self._left_bytes = sum(tensor.left_bytes for part in self._all for tensor in part.tensors)
        """Room for all that is not taken yet."""
        self._free: list[Bytes] = []
        self._mapped_bytes = 0
        self._num_reading = 0
        """Slabs that are taken and not read yet."""
        self._filled: deque[_Slab] = deque()
        self.is_over = False
        """Whether all was read, or nothing more will be."""
        self.error: BaseException | None = None
        """Why it is of no use."""
        self.peak_bytes = 0
        """The most that staging took."""
        self.stalled_s = 0.0
        """Seconds for which changes waited, in all threads together."""
        self._begun = self._point_on_device()
        _LIVING.add(self)

    def _add(self, source: Source) -> None:
        with compat.without_torch_function():
            if not source.tensor.numel():
                return
        part = self._unannounced
        if source.is_announced and source.parameter is not None:
            part = self._parts.setdefault(id(source.parameter), _Part())
        tensor = _Tensor(source, part)
        part.tensors.append(tensor)
        part.num_unread += tensor.num_bytes

    def _point_on_device(self) -> dict[torch.device, torch.cuda.Event]:
        devices = {tensor.device for part in self._all for tensor in part.tensors if tensor.device.type == "cuda"}
        found = {}
        for device in devices:
            found[device] = torch.cuda.Event()
            found[device].record(torch.cuda.current_stream(device))
        return found

    # -- asked by who is about to change something -----------------------------------------------------------------------

    def has_unread(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether something that changes with one of these is still to be read."""
        return self.is_to_read(self._parts_of(parameters))

    def reads_of(self, parameters: Iterable[torch.Tensor]) -> Reads:
        """What a change of these must come after; it is read next from now on."""
        parts = self._parts_of(parameters)
        with self._condition:
            self._urgent.extend(part for part in parts if part.num_unread)
            self._condition.notify_all()
        return Reads(self, parts)

    def wait_for(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait until all that changes with these was read."""
        self.wait_until_read(self._parts_of(parameters))

    def wait_for_unannounced(self) -> None:
        """Wait until all was read that may change without a word."""
        self.wait_until_read([self._unannounced])

    def wait_for_all(self) -> None:
        """Wait until all was read."""
        self.wait_until_read(self._all)

    def wait_until_read(self, parts: Sequence[_Part]) -> None:
        """Wait for these, which are read next."""
        if not self.is_to_read(parts):
            return
        started_s = time.perf_counter()
        with self._condition, compat.waiting():
            self._urgent.extendleft(reversed([part for part in parts if part.num_unread]))
            self._condition.notify_all()
            while self.is_to_read(parts):
                self._condition.wait()
            self.stalled_s += time.perf_counter() - started_s

    def is_to_read(self, parts: Iterable[_Part]) -> bool:
        """Whether some of these will be read, and were not."""
        return not self.is_over and any(part.num_unread for part in parts)

    def _parts_of(self, parameters: Iterable[torch.Tensor]) -> list[_Part]:
        keys = map(id, parameters)
        return [self._parts[key] for key in keys if key in self._parts]

    # -- run by threads --------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read until there is nothing left to read."""
        queues: dict[torch.device, _DeviceQueue] = {}
        try:
            for slab in self._slabs_to_read():
                for piece in slab.pieces:
                    device = piece.tensor.device
                    if device in self._begun and device not in queues:
                        queues[device] = _DeviceQueue(device, self._begun[device], self._pinned)
                    piece.tensor.read(piece.offset, slab.bytes_of(piece), queues.get(device))
                self._note_read(slab)
            with self._condition:
                if not self._num_unread:
                    self._end()
        except BaseException as error:
            self.fail(error)
        finally:
            for queue in queues.values():
                queue.close()

    def write(self, writer: PieceWriter) -> None:
        """Write until all is written."""
        try:
            for slab in self._slabs_to_write():
                for piece in slab.pieces:
                    if self.error is not None:
                        return
                    source = piece.tensor.source
                    value = torch.from_numpy(slab.bytes_of(piece)).view(source.tensor.dtype)
                    writer.write(source.file, source.name, value, start=piece.offset // value.itemsize)
                self._give_back(slab)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Nothing of it is of use: let everybody go on. The first error counts."""
        with self._condition:
            self.error = self.error or error
            self._end()

    def release(self) -> None:
        """All threads have ended: let go of the staging and of the tensors."""
        with self._condition:
            self._end()
            self._filled.clear()
            self._free.clear()
            self._mapped_bytes = 0
            for held in (self._all, self._order, self._urgent, self._parts):
                held.clear()
            self._unannounced = _Part()

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_read()
        self._condition.notify_all()

    def _slabs_to_read(self) -> Iterator[_Slab]:
        while True:
            with self._condition:
                memory = None
                while self.error is None and self._left_bytes:
                    memory = self._take_memory()
                    if memory is not None:
                        break
                    self._condition.wait()
                if memory is None:
                    return
                slab = self._plan(memory)
            yield slab

    def _take_memory(self) -> Bytes | None:
        if self._free:
            return self._free.pop()
        wanted_bytes = min(self._slab_bytes, self._left_bytes)
        num_bytes = min(wanted_bytes, (self._allowance_bytes - self._mapped_bytes) // _ALIGNMENT * _ALIGNMENT)
        if num_bytes < wanted_bytes // 2 and self._mapped_bytes:
            return None  # a crumb of the allowance
        self._mapped_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._mapped_bytes)
        return _mapped(num_bytes)

    def _plan(self, memory: Bytes) -> _Slab:
        slab = _Slab(memory)
        self._num_reading += 1
        place = 0
        while place < memory.size and (tensor := self._next_tensor()) is not None:
            place = tensor.source.place_after(place, tensor.num_taken)
            num_bytes = tensor.next_bytes(max(0, memory.size - place))
            if not num_bytes:
                break
            slab.pieces.append(_Piece(tensor, tensor.num_taken, place, num_bytes))
            self._left_bytes -= tensor.left_bytes
            tensor.num_taken += num_bytes
            self._left_bytes += tensor.left_bytes
            place += num_bytes
        return slab

    def _next_tensor(self) -> _Tensor | None:
        for queue in (self._urgent, self._order):
            while queue:
                tensor = queue[0].next_tensor()
                if tensor is not None:
                    return tensor
                queue.popleft()
        return None

    def _note_read(self, slab: _Slab) -> None:
        with self._condition:
            for piece in slab.pieces:
                piece.tensor.part.num_unread -= piece.num_bytes
                self._num_unread -= piece.num_bytes
            self._num_reading -= 1
            self._filled.append(slab)
            self._condition.notify_all()

    def _slabs_to_write(self) -> Iterator[_Slab]:
        while True:
            with self._condition:
                while self.error is None and not self._filled:
                    if not self._left_bytes and not self._num_reading:
                        return
                    self._condition.wait()
                if self.error is not None:
                    return
                slab = self._filled.popleft()
            yield slab

    def _give_back(self, slab: _Slab) -> None:
        with self._condition:
            self._free.append(slab.memory)
            self._condition.notify_all()

    def leave_to_parent(self) -> None:
        """This is a forked child, which has none of the threads, and whose copy of the lock may be held for ever."""
        self._condition = threading.Condition()
        self.is_over = True


def num_threads() -> tuple[int, int]:
    """How many readers and writers are worth having. They share the processors with the loop and with updates on the host.

    Readers are soon done, and what changes waits for them: nearly all processors. Writers wait for the disk: a quarter,
    and two at least, so that one writes while the other computes a CRC-32.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_READERS, count - max(1, count // 8))), max(2, min(_MOST_WRITERS, count // 4))


_LIVING: weakref.WeakSet[Snapshot] = weakref.WeakSet()
in_forked_children(_LIVING, Snapshot.leave_to_parent)
