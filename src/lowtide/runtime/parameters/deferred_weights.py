"""Deferred weights: a model is built without keeping its weights, and each is made later with the bits it would have had.

The constructor runs as it is. A parameter gives its memory back as soon as a module has it; what operators do to it from then on
is recorded, and random numbers are drawn and dropped, so that every later draw is the one of a serial run. A weight is made again
by repeating the operators behind it, from the generator's state before each draw: alone, whenever it is asked for.
"""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.errors import SessionError
from lowtide.memory.chunk import ParameterSpec
from lowtide.runtime.parameters.recorded_operators import Call, Operation, OperatorLog, RecordedStorage, View, is_plain
from lowtide.units import format_bytes

LEAST_DEFERRED_BYTES = 64 << 10
"""Smaller storages keep their values: to remember one draw takes 5 KiB."""
_WARNED_BYTES = 1 << 20
"""What parameters may keep without a warning."""

_TRIM_BYTES = 32 << 20
"""After so many bytes were given back, the heap's gaps go back to the system."""
_ENTERED = threading.Lock()
"""Held while torch's registration of parameters is exchanged, which is so for all threads."""
_OVERWRITERS = frozenset(
    f"aten.{name}_"
    for name in (
        "zero", "fill", "copy", "uniform", "normal", "random", "exponential", "log_normal", "cauchy", "geometric", "bernoulli",
    )
)  # fmt: skip
"""Operators that leave nothing of what was in their first argument, and do not look at it."""
_RAW = frozenset({
    "numpy", "__array__", "__dlpack__", "data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage",
    "_typed_storage", "storage_type", "apply_", "map_", "map2_", "share_memory_", "__reduce_ex__", "__deepcopy__",
})  # fmt: skip
"""Methods that reach a tensor's memory past the operators."""


class DeferredWeights:
    """The weights of what was built under `deferred_weights`: how each is made."""

    def __init__(self, log: OperatorLog) -> None:
        self._log = log
        # Weak: these may outlive the model, and its memory must not.
        self._views: dict[int, tuple[weakref.ref[nn.Parameter], View]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that were deferred; smaller ones, and those that cannot be, have their values already."""
        return sum(math.prod(view.shape) * view.dtype.itemsize for _, view in self._views.values())

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose weights these are not, before anything is touched.

        Raises:
            SessionError: A parameter on the meta device was built elsewhere, or was changed since.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                self._view_of(name, parameter)

    def fill(self, spec: ParameterSpec, parameter: nn.Parameter, target: Tensor) -> None:
        """Write one parameter's values, converted to the target's dtype; one that has values is copied.

        For the time of the call this takes the parameter's bytes once more, and what the operators behind it need.

        Raises:
            SessionError: The parameter was built elsewhere or was changed since, or an operator behind it cannot be repeated.
        """
        if not parameter.is_meta:
            target.copy_(parameter.data)
            return
        view = self._view_of(spec.name, parameter)
        assert view.storage is not None
        target.copy_(view.over(self._values_of(spec.name, view.storage)))

    def materialize(self, model: nn.Module) -> None:
        """Give every deferred parameter of the model its values, on the host; each stays the same object.

        Raises:
            SessionError: As for `fill`; parameters before that one have their values.
        """
        self.check(model)
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                self.materialize_one(name, parameter)

    def materialize_one(self, name: str, parameter: nn.Parameter) -> None:
        """The same for one deferred parameter."""
        view = self._view_of(name, parameter)
        assert view.storage is not None
        storage = torch.UntypedStorage(view.storage.nbytes, device="cpu").copy_(self._values_of(name, view.storage))
        values = view.over(storage).to(parameter.dtype)
        compat.exchange_contents(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))

    def _values_of(self, name: str, record: RecordedStorage) -> torch.UntypedStorage:
        try:
            return self._log.values_of(record)
        except Exception as error:
            raise SessionError(
                f"the values of {name} cannot be made: repeating one of {self._log.operators_of(record)} raised "
                f"{type(error).__name__}: {error}. Build this model without deferred_weights"
            ) from error

    def _view_of(self, name: str, parameter: nn.Parameter) -> View:
        reference, view = self._views.get(id(parameter), (None, None))
        if reference is None or view is None or reference() is not parameter:
            raise SessionError(
                f"{name} is on the meta device and was not built under this deferred_weights(); build the whole model inside it"
            )
        if compat.version_of(parameter) or tuple(parameter.shape) != view.shape:
            raise SessionError(
                f"{name} was changed after deferred_weights() had ended, and has no values that could change; initialise "
                "weights inside the block, or call materialize(model) first"
            )
        return view


@contextmanager
def deferred_weights() -> Iterator[DeferredWeights]:
    """Inside, models are built without keeping their weights, which get the bits of the plain constructor when they are asked for.

    Constructors and initialisers run as they are, with one parameter's memory at a time: buffers have their values, Python sees
    tensors on the CPU, and the random generator ends where it would have. Afterwards the parameters are on the meta device.
    `manage(..., weights=...)` makes them group by group; on several ranks, each makes the whole sequence of draws and
    keeps what it needs. Only the thread that entered may build models meanwhile.

    Building draws all that the plain constructor draws, and making all weights draws at most as much again.

    Example:
        >>> with deferred_weights() as weights:
        ...     model = nn.Linear(512, 512)
        >>> model.weight.device.type, weights.nbytes
        ('meta', 1048576)
        >>> weights.materialize(model)
        >>> model.weight.device.type
        'cpu'
    """
    if not _ENTERED.acquire(blocking=False):
        raise SessionError(
            "deferred_weights() is entered already, here or in another thread; build one model at a time"
        )
    try:
        building = _Building(OperatorLog())
        weights = DeferredWeights(building.log)
        try:
            with building.watching(), _RawAccess(building), _Recorder(building):
                yield weights
        finally:
            weights._views.update(building.finish())
    finally:
        _ENTERED.release()


@dataclass(slots=True)
class _Member:
    """A parameter that a module got."""

    reference: weakref.ref[nn.Parameter]
    module: str
    """The module's class."""
    name: str
    """Its name in that module."""
    reason: str | None = None
    """Why it keeps its memory."""


class _Building:
    """The storages of one block, and which have given their memory back."""

    def __init__(self, log: OperatorLog) -> None:
        self.log = log
        self._members: dict[int, _Member] = {}
        self._released: dict[RecordedStorage, None] = {}
        self._bytes_to_trim = 0
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of each parameter that a module gets, by registration or as a copy."""
        register, set_state = nn.Module.register_parameter, nn.Module.__setstate__

        def register_and_release(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(module, name, parameter)
            self._release(module, name, parameter)

        def set_and_release(module: nn.Module, state: Any) -> None:
            set_state(module, state)  # type: ignore[no-untyped-call]  # torch's has no types
            for name, parameter in module._parameters.items():
                self._release(module, name, parameter)

        # Exchanged on purpose, and put back below: no hook tells of copied modules.
        nn.Module.register_parameter = register_and_release  # type: ignore[method-assign, assignment]
        nn.Module.__setstate__ = set_and_release  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
            nn.Module.__setstate__ = set_state  # type: ignore[method-assign]

    def is_released(self, tensor: Tensor) -> bool:
        """Whether the tensor has no memory at present."""
        if not self._released or not is_plain(tensor):
            return False
        record = self.log.find(tensor)
        return record is not None and record.is_released

    def _release(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if (
            parameter is None
            or isinstance(parameter, nn.UninitializedParameter)
            or threading.get_ident() != self._thread
        ):
            return
        with compat.without_function_modes():
            if parameter.numel() * parameter.element_size() >= LEAST_DEFERRED_BYTES and not parameter.is_meta:
                self._members[id(parameter)] = _Member(weakref.ref(parameter), type(module).__name__, name)
                if self._reason(parameter) is None:
                    self.release(parameter)

    def _reason(self, parameter: nn.Parameter) -> str | None:
        """Why a parameter cannot give its memory back."""
        if type(parameter) is not nn.Parameter:
            return f"is a {type(parameter).__name__}, not a plain Parameter"
        if not is_plain(parameter):
            return f"is no dense tensor on the CPU, but {parameter.layout} on {parameter.device}"
        if self.log.storage_of(parameter).is_foreign:
            return "has values that no operator of torch made, such as an array's or a file's"
        if (
            compat.has_gradient_hooks(parameter)
            or compat.post_accumulate_hooks(parameter)
            or parameter.grad is not None
        ):
            return "has a gradient, or hooks for one"
        if compat.reference_count(parameter) > 1:
            return "is part of a graph for a backward"
        return None

    def release(self, tensor: Tensor) -> None:
        """Give the memory of a tensor's storage back."""
        record = self.log.storage_of(tensor)
        if not record.is_released:
            record.is_released = True
            self._released[record] = None
            tensor.untyped_storage().resize_(0)
            self._bytes_to_trim += record.nbytes
            if self._bytes_to_trim >= _TRIM_BYTES:
                self._bytes_to_trim = 0
                _trim_heap()

    def bring_back(self, record: RecordedStorage) -> None:
        """Give a storage its memory again, for good, with its values; whatever shares it sees them."""
        storage = record.storage
        if storage is None or not record.is_released:
            return
        values = self.log.values_of(record)
        storage.resize_(record.nbytes)
        storage.copy_(values)
        record.is_released = False
        self._released.pop(record, None)

    def expose(self, tensor: Tensor) -> None:
        """Note that the tensor's memory is written to or read past the recorded operators, now or later."""
        if is_plain(tensor):
            record = self.log.storage_of(tensor)
            self.bring_back(record)
            record.is_foreign = True

    @contextmanager
    def backed(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Give released storages memory without values, for operators that check bounds and read nothing."""
        storages = {self.log.storage_of(tensor): tensor.untyped_storage() for tensor in tensors}
        for record, storage in storages.items():
            storage.resize_(record.nbytes)
        try:
            yield
        finally:
            for storage in storages.values():
                storage.resize_(0)

    def finish(self) -> dict[int, tuple[weakref.ref[nn.Parameter], View]]:
        """Put released parameters on the meta device; whatever else shares their memory gets its values."""
        with compat.without_function_modes():
            members = self._alive()
            for parameter, member in members:
                member.reason = self._reason(parameter)
                if member.reason is None:
                    self.release(parameter)
                elif self.is_released(parameter):
                    self.bring_back(self.log.storage_of(parameter))
            own = {self.log.storage_of(parameter) for parameter, _ in members if is_plain(parameter)}
            if any(_is_shared(record, own) for record in self._released):
                gc.collect()  # modules that are gone may hold memory until then
            for record in [record for record in self._released if _is_shared(record, own)]:
                self.bring_back(record)
            views: dict[int, tuple[weakref.ref[nn.Parameter], View]] = {}
            for parameter, member in members:
                if self.is_released(parameter):
                    view = View.of(parameter, self.log.storage_of(parameter))
                    views[id(parameter)] = member.reference, view
                    empty = nn.Parameter(view.empty("meta"), requires_grad=parameter.requires_grad)
                    compat.exchange_contents(parameter, empty)
                elif member.reason is None:
                    member.reason = "shares its memory with another tensor that is held"
            self.log.prune([view.storage for _, view in views.values() if view.storage is not None])
        _warn_of_kept(members)
        return views

    def _alive(self) -> list[tuple[nn.Parameter, _Member]]:
        found = [(member.reference(), member) for member in self._members.values()]
        return [(parameter, member) for parameter, member in found if parameter is not None]


def _is_shared(record: RecordedStorage, own: Set[RecordedStorage]) -> bool:
    """Whether a storage is anybody's but one parameter's of a module; those storages are given."""
    storage = record.storage
    return storage is not None and (record not in own or compat.num_owners(storage) > 1)


def _trim_heap() -> None:
    """Give free pages in the middle of the heap back to the system.

    Weights that are made in the heap and freed there leave gaps, which small objects break up until no later weight fits: measured,
    a model of 128 MiB left a heap of 160 MiB behind.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def _warn_of_kept(members: Sequence[tuple[nn.Parameter, _Member]]) -> None:
    kept = [(parameter, member) for parameter, member in members if member.reason is not None]
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter, _ in kept)
    if nbytes >= _WARNED_BYTES:
        first = kept[0][1]
        warnings.warn(
            f"{len(kept)} parameters, {format_bytes(nbytes)}, were not deferred and have their memory already; the first is "
            f"{first.name} of a {first.module}, which {first.reason}",
            stacklevel=5,
        )


class _RawAccess(TorchFunctionMode):
    """Sees methods that reach a tensor's memory past the operators."""

    def __init__(self, building: _Building) -> None:
        super().__init__()
        self._building = building

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _RAW:
            with compat.without_modes(), compat.without_function_modes():
                for tensor in compat.tensors_in((args, kwargs)):
                    self._building.expose(tensor)
        return func(*args, **(kwargs or {}))


class _Recorder(compat.PlainMode):
    """Runs operators and records them; those on tensors without memory are recorded alone, as far as they can be."""

    def __init__(self, building: _Building) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._building = building
        self._log = building.log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with compat.without_function_modes():
            return self._dispatch(Call.of(func, args, kwargs or {}))

    def _dispatch(self, call: Call) -> Any:
        released = [tensor for tensor in call.tensors if self._building.is_released(tensor)]
        if call.is_view:
            with self._building.backed(released):
                return call.run()
        if not call.is_recordable:
            return self._unrecorded(call)
        if not released or call.looks_at_shapes:
            return self._run(call, {})
        has_values_to_write = any(not self._building.is_released(tensor) for tensor in call.written)
        if not has_values_to_write:
            result = self._draw_and_drop(call) if call.is_random else self._defer(call)
            if result is not NotImplemented:
                return result
        return self._with_values(call, released)

    def _unrecorded(self, call: Call) -> Any:
        for tensor in call.tensors:
            self._building.expose(tensor)
        result = call.run()
        for tensor in compat.tensors_in(result):
            self._building.expose(tensor)
        return result

    def _run(self, call: Call, replaced: Mapping[int, Tensor]) -> Any:
        """Run it, with other tensors in place of some, and record it."""
        self._note_values(call)
        state = call.generator_state()
        result = call.run(replaced)
        originals = {id(other): tensor for tensor in call.tensors if (other := replaced.get(id(tensor))) is not None}
        outputs = [originals.get(id(output), output) for output in compat.tensors_in(result)]
        if state is not None and not replaced and _is_small(touched := [*call.written, *outputs]):
            # Their bytes, kept when something reads them, are fewer than a generator's state.
            for tensor in touched:
                self._log.storage_of(tensor).is_foreign = True
            return result
        has_grown = any(
            tensor.untyped_storage().nbytes() != self._log.storage_of(tensor).nbytes for tensor in call.written
        )
        if all(map(is_plain, outputs)) and (replaced or not has_grown):
            self._record(call, outputs, state)
        else:
            for tensor in call.written:
                self._building.expose(tensor)
        return _with_originals(result, originals) if originals else result

    def _with_values(self, call: Call, released: Sequence[Tensor]) -> Any:
        """Make the values that it reads, for as long as it runs."""
        made: dict[RecordedStorage, torch.UntypedStorage] = {}
        replaced: dict[int, Tensor] = {}
        for tensor in released:
            record = self._log.storage_of(tensor)
            if record not in made:
                made[record] = self._log.values_of(record)
            replaced[id(tensor)] = View.of(tensor, record).over(made[record])
        return self._run(call, replaced)

    def _draw_and_drop(self, call: Call) -> Any:
        """Draw into memory that is dropped at once, so that the generator goes on as if the values were kept."""
        (target, *others) = call.tensors
        if call.operator.name not in _OVERWRITERS or any(map(self._building.is_released, others)):
            return NotImplemented
        scratch = View.of(target, None).scratch()
        return self._run(call, {id(target): scratch})

    def _defer(self, call: Call) -> Any:
        """Record it without running it; NotImplemented where its result is needed, or its shape cannot be told."""
        if call.returns_values:
            return NotImplemented
        metas = {id(tensor): View.of(tensor, None).empty("meta") for tensor in call.tensors}
        originals = {id(metas[id(tensor)]): tensor for tensor in call.tensors}
        try:
            shapes = call.run(metas, on_meta=True)
        except Exception:
            return NotImplemented  # with values it raises what is to be raised, or goes well
        new = [shape for shape in compat.tensors_in(shapes) if id(shape) not in originals]
        if new and sum(shape.numel() * shape.element_size() for shape in new) < LEAST_DEFERRED_BYTES:
            return NotImplemented
        self._note_values(call)
        made = {id(shape): View.of(shape, None).empty() for shape in new}
        outputs = [originals.get(id(shape), made.get(id(shape))) for shape in compat.tensors_in(shapes)]
        self._record(call, [output for output in outputs if output is not None], None)
        for tensor in made.values():
            self._building.release(tensor)
        return _with_originals(shapes, {**originals, **made})

    def _note_values(self, call: Call) -> None:
        for tensor in () if call.looks_at_shapes else call.tensors:
            self._log.note_values(self._log.storage_of(tensor))

    def _record(self, call: Call, outputs: Sequence[Tensor], state: Tensor | None) -> None:
        """Add it to the log; the outputs are the arguments themselves where it gives these back."""
        log = self._log
        own = {id(tensor) for tensor in call.tensors}
        storages = {} if call.looks_at_shapes else {log.storage_of(tensor): None for tensor in call.tensors}
        makes: list[View | None] = []
        for output in outputs:
            is_own = id(output) in own or log.find(output) in storages
            makes.append(None if is_own else View.of(output, log.add_made(output)))
        made = [view.storage for view in makes if view is not None and view.storage is not None]
        written = [View.of(tensor, log.storage_of(tensor)) for tensor in call.written]
        if not made and not written:
            return
        overwritten = list(made)
        others = call.tensors[1:]
        if call.operator.name in _OVERWRITERS and written[0].covers_storage():
            target = written[0].storage
            if target is not None and all(log.storage_of(tensor) is not target for tensor in others):
                overwritten.append(target)
        log.append(
            Operation(
                func=call.func,
                leaves=tuple(self._leaf(call, leaf) for leaf in call.leaves),
                structure=call.structure,
                reads=tuple(each for each in storages if each not in overwritten),
                writes=(*(view.storage for view in written if view.storage is not None), *made),
                overwrites=tuple(overwritten),
                makes=tuple(makes),
                generator_state=state,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def _leaf(self, call: Call, leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return View.of(leaf, None if call.looks_at_shapes else self._log.storage_of(leaf))
        return None if isinstance(leaf, torch.Generator) else leaf


def _is_small(tensors: Sequence[Tensor]) -> bool:
    return all(is_plain(tensor) and tensor.untyped_storage().nbytes() < LEAST_DEFERRED_BYTES for tensor in tensors)


def _with_originals(result: Any, originals: Mapping[int, Tensor]) -> Any:
    """The result, with the arguments in place of what stood for them."""
    leaves, structure = compat.flatten(result)
    return compat.unflatten([originals.get(id(leaf), leaf) for leaf in leaves], structure)
