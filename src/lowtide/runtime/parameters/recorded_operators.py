"""What operators did to storages, in order, so that the values of one storage can be made again: alone, later, in any order.

A recorded operator names its arguments by storage and geometry, without their values. Before one that draws random numbers the
state of the generator is kept, 5 KiB: drawing again from there needs none of the draws before it.
"""

from __future__ import annotations

import heapq
import mmap
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide import compat

if TYPE_CHECKING:
    from lowtide.tracing.ghost.operators import Operator

Values = dict["RecordedStorage", torch.UntypedStorage]


class RecordedStorage:
    """A storage as the log knows it.

    Args:
        storage: Held weakly.
        is_foreign: Some of its bytes come from elsewhere than from recorded operators: from numpy, a list, a file.
    """

    __slots__ = ("_reference", "constant", "is_foreign", "is_released", "nbytes", "written_in")

    def __init__(self, storage: torch.UntypedStorage, *, is_foreign: bool) -> None:
        self._reference = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.is_foreign = is_foreign
        self.is_released = False
        """Whether it has no memory: its values are in the log only."""
        self.constant: Tensor | None = None
        """The bytes of a foreign one when an operator last read it."""
        self.written_in: list[int] = []
        """Numbers of the operations that write to it, in order."""

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """None once it is gone."""
        return self._reference()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """A tensor without its values."""

    storage: RecordedStorage | None
    """None where an operator looks at its shape alone."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, storage: RecordedStorage | None) -> View:
        """Describe a tensor."""
        return cls(
            storage=storage,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, in other memory."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.shape, self.stride)

    def empty(self, device: str = "cpu") -> Tensor:
        """A tensor of its shape and strides, with memory of its own."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def scratch(self) -> Tensor:
        """The same, in memory that is wanted for a moment."""
        steps = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        nbytes = (steps + 1) * self.dtype.itemsize if 0 not in self.shape else 0
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(scratch_storage(nbytes), 0, self.shape, self.stride)

    def looks_like(self, tensor: Tensor) -> bool:
        """Whether the tensor has the same geometry."""
        return (self.dtype, self.shape, self.stride, self.offset) == (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def covers_storage(self) -> bool:
        """Whether its elements are all bytes of the storage, each once."""
        if self.storage is None or self.offset:
            return False
        expected = 1
        for step, size in sorted((step, size) for size, step in zip(self.shape, self.stride, strict=True) if size != 1):
            if step != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == self.storage.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """An operator that is called, with its arguments, and what can be done with it."""

    func: Any  # a torch.ops overload, which has no public type
    operator: Operator
    leaves: Sequence[Any]
    structure: Any
    tensors: Sequence[Tensor]
    written: Sequence[Tensor]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Call:
        """As a dispatch mode sees it."""
        leaves, structure = compat.flatten((args, dict(kwargs)))
        from lowtide.tracing.ghost.operators import describe  # here: a session without drawn weights needs no ghosts

        operator = describe(func)
        written = [args[place] for place in operator.writes if place < len(args)]
        written += [kwargs[name] for name in operator.written_names if name in kwargs]
        return cls(
            func=func,
            operator=operator,
            leaves=leaves,
            structure=structure,
            tensors=[leaf for leaf in leaves if isinstance(leaf, Tensor)],
            written=compat.tensors_in(written),
        )

    @property
    def is_view(self) -> bool:
        """Whether it gives a view, or makes one of an argument, and reads nothing."""
        is_view_in_place = self.operator.is_view_in_place or self.operator.name == "aten.set_"
        return is_view_in_place or any(
            result.alias_info is not None and not result.alias_info.is_write for result in self.func._schema.returns
        )

    @property
    def is_recordable(self) -> bool:
        """Whether repeating it gives the same: torch's own operators on plain tensors, in memory that stays where it is."""
        return (
            self.func.namespace == "aten"
            and torch.Tag.inplace_view not in self.func.tags
            and all(map(is_plain, self.tensors))
            and not any(leaf.type != "cpu" for leaf in self.leaves if isinstance(leaf, torch.device))
        )

    @property
    def looks_at_shapes(self) -> bool:
        """Whether it takes nothing from a tensor but its shape, type and device."""
        short = self.operator.name.removeprefix("aten.")
        return (short.startswith("new_") or short.endswith("_like")) and len(self.tensors) == 1

    @property
    def is_random(self) -> bool:
        """Whether it draws."""
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def returns_values(self) -> bool:
        """Whether it returns anything but tensors."""
        return any("Tensor" not in str(result.type) for result in self.func._schema.returns)

    def generator_state(self) -> Tensor | None:
        """The state of the generator that it is about to draw from."""
        if not self.is_random:
            return None
        given = [leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)]
        return (given[0] if given else torch.default_generator).get_state()

    def run(self, replaced: Mapping[int, Tensor] | None = None, *, on_meta: bool = False) -> Any:
        """Run it, with other tensors in place of some."""
        leaves = self.leaves
        if replaced:
            leaves = [replaced.get(id(leaf), leaf) for leaf in leaves]
        if on_meta:
            leaves = [torch.device("meta") if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        args, kwargs = compat.unflatten(leaves, self.structure)
        return self.func(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One operator with its arguments, recorded."""

    func: Any  # a torch.ops overload, which has no public type
    leaves: tuple[object, ...]
    """The arguments, flattened; a `View` stands for each tensor, and None for each generator."""
    structure: Any  # torch's own, from `compat.flatten`
    reads: tuple[RecordedStorage, ...]
    writes: tuple[RecordedStorage, ...]
    """Also those that it makes."""
    overwrites: tuple[RecordedStorage, ...]
    """Those of them in which nothing is left of what was there before."""
    makes: tuple[View | None, ...]
    """Its outputs; None for one that is an argument."""
    generator_state: Tensor | None
    """The state of the generator that it draws from."""
    default_dtype: torch.dtype
    """What it makes where no dtype is given."""

    def run(self, values: Values) -> None:
        """Repeat it on storages of their own."""
        leaves = [_argument(leaf, values) if isinstance(leaf, View) else leaf for leaf in self.leaves]
        args, kwargs = compat.unflatten(leaves, self.structure)
        with _drawing_from(self.generator_state), _making(self.default_dtype):
            outputs = compat.tensors_in(self.func(*args, **kwargs))
        for view, output in zip(self.makes, outputs, strict=True):
            if view is None:
                continue
            assert view.storage is not None
            if not view.looks_like(output):
                # Torch's shape functions, which gave the view, need not agree with its kernels on strides.
                output = view.empty().copy_(output)
            values[view.storage] = output.untyped_storage()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constant:
    """Bytes that no operator made; a step of the log like an `Operation`."""

    target: RecordedStorage
    data: Tensor
    """Bytes, flat."""

    @property
    def reads(self) -> tuple[RecordedStorage, ...]:
        """Nothing."""
        return ()

    @property
    def writes(self) -> tuple[RecordedStorage, ...]:
        """The one storage."""
        return (self.target,)

    overwrites = writes

    def run(self, values: Values) -> None:
        """Write the bytes."""
        values[self.target] = self.data.clone().untyped_storage()


class OperatorLog:
    """Operations in order, and which of them each storage's values need."""

    def __init__(self) -> None:
        self._steps: dict[int, Operation | Constant] = {}
        self._next_number = 0
        self._storages: dict[int, RecordedStorage] = {}
        """By the key of the storage, which may be that of one that is gone."""
        self._prune_at = _LEAST_PRUNED

    def __len__(self) -> int:
        return len(self._steps)

    def storage_of(self, tensor: Tensor) -> RecordedStorage:
        """What the log knows of a tensor's storage; a new one is foreign."""
        return self.find(tensor) or self._add(tensor, is_foreign=True)

    def find(self, tensor: Tensor) -> RecordedStorage | None:
        """The same, or None for a new one."""
        found = self._storages.get(compat.storage_key(tensor))
        return found if found is not None and found.storage is tensor.untyped_storage() else None

    def add_made(self, tensor: Tensor) -> RecordedStorage:
        """Know of an operator's new output."""
        return self._add(tensor, is_foreign=False)

    def _add(self, tensor: Tensor, *, is_foreign: bool) -> RecordedStorage:
        record = RecordedStorage(tensor.untyped_storage(), is_foreign=is_foreign)
        self._storages[compat.storage_key(tensor)] = record
        return record

    def note_values(self, record: RecordedStorage) -> None:
        """A foreign storage is about to be read: keep its bytes, if they are not those of the last time."""
        storage = record.storage
        if not record.is_foreign or record.is_released or storage is None or not storage.nbytes():
            return
        data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))
        if record.constant is None or not torch.equal(record.constant, data):
            record.constant = data.clone()
            record.nbytes = storage.nbytes()
            self.append(Constant(target=record, data=record.constant))

    def append(self, step: Operation | Constant) -> None:
        """The next operation."""
        self._steps[self._next_number] = step
        for record in dict.fromkeys(step.writes):
            record.written_in.append(self._next_number)
        self._next_number += 1
        if len(self._steps) >= self._prune_at:
            self.prune(record for record in self._storages.values() if record.storage is not None)
            self._prune_at = max(_LEAST_PRUNED, 2 * len(self._steps))

    def prune(self, kept: Iterable[RecordedStorage]) -> None:
        """Forget what the values of these storages do not need, such as draws that were drawn over."""
        kept = list(kept)
        needed = self._needed_by(kept)
        self._steps = {number: self._steps[number] for number in sorted(needed)}
        self._storages = {key: record for key, record in self._storages.items() if record.storage is not None}
        touched = {*kept, *self._storages.values(), *(each for step in self._steps.values() for each in step.writes)}
        for record in touched:
            record.written_in = [number for number in record.written_in if number in needed]

    def values_of(self, record: RecordedStorage) -> torch.UntypedStorage:
        """The bytes of a storage as they are now, made again; beside them only what an operation needs at a time has memory."""
        numbers = sorted(self._needed_by([record]))
        last_use = {
            each: number for number in numbers for each in (*self._steps[number].reads, *self._steps[number].writes)
        }
        values: Values = {}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for number in numbers:
                step = self._steps[number]
                step.run(values)
                for each in {*step.reads, *step.writes}:
                    if last_use[each] == number and each is not record:
                        values.pop(each, None)
        return values[record] if record in values else scratch_storage(record.nbytes)

    def operators_of(self, record: RecordedStorage) -> str:
        """The names of the operators behind a storage's values, for messages."""
        steps = (self._steps[number] for number in sorted(self._needed_by([record])))
        return ", ".join(
            dict.fromkeys(compat.operator_name(step.func) for step in steps if isinstance(step, Operation))
        )

    def _needed_by(self, records: Sequence[RecordedStorage]) -> set[int]:
        """The operations, from the last one back, without which the storages would have other values."""
        needed: set[int] = set()
        waiting: list[int] = []  # negative numbers: the last one first

        def need(record: RecordedStorage, before: int) -> None:
            place = bisect_left(record.written_in, before) - 1
            if place >= 0:
                heapq.heappush(waiting, -record.written_in[place])

        for record in records:
            need(record, self._next_number)
        while waiting:
            number = -heapq.heappop(waiting)
            if number in needed:
                continue
            needed.add(number)
            step = self._steps[number]
            for record in {*step.reads, *(each for each in step.writes if each not in step.overwrites)}:
                need(record, number)
        return needed


_LEAST_PRUNED = 4096
"""Below so many operations it is not worth looking for those that nothing needs."""


def _argument(view: View, values: Values) -> Tensor:
    if view.storage is None:
        return view.scratch()
    if view.storage not in values:
        values[view.storage] = scratch_storage(view.storage.nbytes)
    return view.over(values[view.storage])


def scratch_storage(nbytes: int) -> torch.UntypedStorage:
    """Memory for a moment. A large piece is mapped by itself, and goes back to the system with its last tensor.

    In the heap it would leave gaps behind which generator states break up: measured, building a model of 846 MiB one weight at a
    time left a heap of 1.3 GiB.
    """
    if nbytes < _LEAST_MAPPED_BYTES:
        return torch.UntypedStorage(nbytes, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


_LEAST_MAPPED_BYTES = 1 << 17


@contextmanager
def _drawing_from(state: Tensor | None) -> Iterator[None]:
    """Draw random numbers as from this state; the generator is afterwards as it was before."""
    if state is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def _making(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a dense tensor on the CPU, of no other class."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
