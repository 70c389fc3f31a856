"""Pending tensors: a parameter or gradient whose value is not final yet; reading it waits until it is.

Between its uses a streamed parameter may have an update under way on the host, a newer value that is still being copied
back, or a prefetched copy that would not see a write. To wait for all of that after each step would undo the
overlap; so the tensor is pending instead: its class is exchanged for one whose `__torch_function__` first settles what
is pending. A loop that never reads never waits, and one that reads always sees the true value. Inside a group's window
its parameters are ordinary ones: no operator of the model pays for this. `LiveState` does the same for optimizer state.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import OptimizerStateError, SessionError
from lowtide.runtime.emulation.device import mark_of, set_mark


class PendingValue(Protocol):
    """What a pending tensor waits for."""

    @property
    def label(self) -> str:
        """The name of what the tensor belongs to, for messages."""

    def settle(self) -> None:
        """Wait until the tensor's value is final, and make the tensor plain unless its gradient is still to be guarded."""

    def check_gradient(self) -> None:
        """Raise if the gradient may not be read."""

    def wait_for_device(self) -> None:
        """Wait for the computation that the loop has queued on the device so far."""

    def piece_of(self, parameter: torch.Tensor) -> PieceGradient | None:
        """Who has the parameter's gradient, if it is spread over ranks."""


class PieceGradient(Protocol):
    """Has this rank's piece of a gradient."""

    def shown_gradient(self) -> torch.Tensor | None:
        """What `p.grad` is."""

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """Set `p.grad`."""


class Reads(Protocol):
    """What a change comes after: a save reads what it changes."""

    def is_done(self) -> bool:
        """Whether all was read."""

    def wait(self) -> None:
        """Wait until it was."""


class ReadingSave(Protocol):
    """A save under way that has not read everything yet; see `checkpoints.snapshot`."""

    def has_unread(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether something that changes with one of these is still to be read."""

    def reads_of(self, parameters: Iterable[torch.Tensor]) -> Reads:
        """What a change of these must come after."""

    def wait_for(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait until all that changes with these was read."""

    def wait_for_all(self) -> None:
        """Wait until all was read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """What is known beforehand of the changes of one managed parameter and its optimizer state."""

    home: torch.Tensor
    """Where its value is."""
    place: int
    """In the order in which updates change parameters."""
    announces_weight: bool
    """Whether whoever writes to the weight asks a `SaveGuard` first, or settles the parameter."""
    announces_state: bool
    """Whether whoever writes to its state does, unless somebody holds a tensor of it."""
    hides_state: bool
    """Whether nobody can hold one."""


class SaveGuard:
    """Whoever is about to change weights or optimizer state looks here first."""

    def __init__(self) -> None:
        self.reading: ReadingSave | None = None
        """None as a rule: then there is nothing to ask."""

    def begin(self, reading: ReadingSave) -> None:
        """The save reads from now on."""
        self.reading = reading

    def end(self) -> None:
        """It has read everything, or will read no more."""
        self.reading = None


_VALUES: dict[int, weakref.ref[PendingValue]] = {}
"""By the `id` of the pending tensor. Not an attribute of the tensor: it would travel with pickles and copies. Weak, so that
a session that is forgotten with its model is freed. Asked about pending tensors alone, each of which wrote its own entry."""


def _value_of(tensor: torch.Tensor) -> PendingValue | None:
    reference = _VALUES.get(id(tensor))
    return None if reference is None else reference()


def _getters(*names: str) -> Iterator[object]:
    for name in names:
        yield getattr(torch.Tensor, name).__get__


def _setter(name: str) -> object:
    return getattr(torch.Tensor, name).__set__


_SET_GRADIENT = _setter("grad")
_GRADIENT_ACCESS: frozenset[object] = frozenset({*_getters("grad"), _SET_GRADIENT})
_HARMLESS: frozenset[object] = frozenset(
    {
        *_getters("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn"),
        *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes"),
        *_getters("_version", "output_nr", "retains_grad", "is_mkldnn", "is_mps", "is_xpu", "is_xla"),
        _setter("requires_grad"),
        torch.Tensor.requires_grad_,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.get_device,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        # These ask which gradients to compute. To settle would make the parameter look at the host, and give it a new
        # gradient accumulator on CUDA: one that the graph knows nothing of.
        torch.autograd.grad,
        torch.autograd.backward,
    }
)
"""Functions that read no value: sizes, types, hooks."""


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    kwargs = kwargs or {}
    if func in _GRADIENT_ACCESS:
        value = _value_of(args[0])
        if value is not None:
            value.check_gradient()
            piece = value.piece_of(args[0])
            if piece is not None:
                return piece.set_gradient(args[1]) if func == _SET_GRADIENT else piece.shown_gradient()
    lifted: list[str] = []
    if func not in _HARMLESS and func not in _GRADIENT_ACCESS:
        for tensor in _pending_in((args, tuple(kwargs.values()))):
            value = _value_of(tensor)
            lifted += [] if value is None else [value.label]
            settle(tensor)
    # torch asks one class of all that are in the list.
    pieces = list(_pieces_in((args, tuple(kwargs.values())))) if func is compat.UNSCALE else []
    if pieces:
        pieces[0].shared.wait_for_device()
    elif func is compat.UNSCALE:
        # GradScaler copies its scale and its overflow flag to the host without waiting, and its kernel reads them there.
        for tensor in _pending_in(args):
            value = _value_of(tensor)
            if value is not None:
                value.wait_for_device()
                break
    try:
        with compat.without_torch_function():
            result = func(*args, **kwargs)
            if pieces:
                pieces[0].shared.add_up(args[1])
            return result
    except RuntimeError as error:
        if lifted and "device" in str(error):
            error.add_note(
                f"{lifted[0]} is streamed, and was used outside of the call of its module, where its weights are on the "
                "host. Make the group resident, or let it open with the module that uses it: "
                "lay_out(find_groups(model, given={THAT_MODULE: [PARAMETERS]}))."
            )
        raise


_OF_ANY_PIECE: frozenset[object] = frozenset({torch.Tensor.zero_, torch.Tensor.detach_})
"""What is the same done to pieces or to the whole: clearing a gradient."""


class SharedFlag(Protocol):
    """Adds numbers up over the ranks that share a gradient."""

    def add_up(self, flag: torch.Tensor) -> None:
        """The sum over the ranks, in place; a collective call."""

    def wait_for_device(self) -> None:
        """Wait for the computation that the loop has queued on the device so far."""


class SpreadGradient(torch.Tensor):
    """This rank's piece of a gradient that is spread over ranks: what `p.grad` is.

    A scaler may divide it, and finds out whether any rank has something that is not finite. All else is refused: a norm of pieces
    would be another one on each rank, and nobody would notice.
    """

    shared: SharedFlag
    label: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is of use with a piece alone."""
        if func in _HARMLESS or func in _GRADIENT_ACCESS or func in _OF_ANY_PIECE:
            with compat.without_torch_function():
                return func(*args, **(kwargs or {}))
        pieces = list(_pieces_in((args, tuple((kwargs or {}).values()))))
        if func is not compat.UNSCALE or not pieces:
            raise SessionError(
                f"the gradient of {pieces[0].label if pieces else 'a parameter'} is spread over the ranks, and this one has a "
                f"piece of it, of which {getattr(func, '__name__', func)!s} would make something else on each rank; clip with "
                "manage(..., max_grad_norm=), or make the group resident"
            )
        return _run(func, args, kwargs)


def _pieces_in(values: Iterable[object]) -> Iterator[SpreadGradient]:
    for value in values:
        if isinstance(value, SpreadGradient):
            yield value
        elif isinstance(value, list | tuple):
            yield from _pieces_in(value)


class PendingTensor(torch.Tensor):
    """A gradient that is still on its way, or that a pending update still reads."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Settle, then do what was asked."""
        return _run(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain tensor that it is."""
        settle(self)
        with _plain(self):
            return torch.Tensor.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copied as the plain tensor that it is."""
        settle(self)
        with _plain(self):
            return torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-any-return, no-untyped-call]


class PendingParameter(nn.Parameter):
    """A parameter between two uses of its group, while something is pending."""

    is_plain_when_settled = True
    """For those who ask whether a parameter is a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Settle, then do what was asked."""
        return _run(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain parameter that it is."""
        settle(self)
        with compat.without_torch_function():
            return nn.Parameter.__reduce_ex__(self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copied as the plain parameter that it is."""
        settle(self)
        with compat.without_torch_function():
            copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)
        copied.__class__ = nn.Parameter
        return copied


@contextlib.contextmanager
def _plain(tensor: torch.Tensor) -> Iterator[None]:
    """The tensor with its plain class inside the block; a gradient on the host is pending again after it."""
    kind = type(tensor)
    if kind is PendingTensor:
        tensor.__class__ = torch.Tensor
    try:
        yield
    finally:
        tensor.__class__ = kind


def make_pending(tensor: torch.Tensor, value: PendingValue) -> None:
    """From now on reading the tensor settles the value first."""
    _VALUES[id(tensor)] = weakref.ref(value)
    # Lazy parameters of torch change their class in the same way.
    tensor.__class__ = PendingParameter if isinstance(tensor, nn.Parameter) else PendingTensor


def make_plain(tensor: torch.Tensor) -> None:
    """Make it an ordinary tensor again. The caller knows that its value is the true one."""
    kind = type(tensor)
    # The class before the entry: what is pending has one, wherever an exception comes.
    if kind is PendingParameter:
        tensor.__class__ = nn.Parameter
        _VALUES.pop(id(tensor), None)
    elif kind is PendingTensor:
        tensor.__class__ = torch.Tensor
        _VALUES.pop(id(tensor), None)


def make_all_pending(parameters: Iterable[nn.Parameter], value: PendingValue) -> None:
    """`make_pending`, for parameters that are not pending yet."""
    reference = weakref.ref(value)
    for parameter in parameters:
        if type(parameter) is not PendingParameter:
            _VALUES[id(parameter)] = reference
            parameter.__class__ = PendingParameter


def make_all_plain(parameters: Iterable[nn.Parameter]) -> None:
    """`make_plain`, for the parameters that are pending."""
    for parameter in parameters:
        kind: type[torch.Tensor] = type(parameter)
        if kind is PendingParameter:
            parameter.__class__ = nn.Parameter
            _VALUES.pop(id(parameter), None)


def is_pending_for(tensor: torch.Tensor, value: PendingValue) -> bool:
    """Whether reading the tensor would settle this value first."""
    return is_pending(tensor) and _value_of(tensor) is value


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor would settle something first."""
    return type(tensor) in (PendingParameter, PendingTensor)


def settle(tensor: torch.Tensor) -> None:
    """Settle what is pending for the tensor; the value makes it plain again, unless there is more to guard."""
    value = _value_of(tensor)
    if value is not None:
        value.settle()
    else:
        make_plain(tensor)


def _pending_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_pending(value):
                yield value
        elif isinstance(value, list | tuple):
            yield from _pending_in(value)
        elif isinstance(value, dict):
            yield from _pending_in(value.values())


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object over the same memory, outside of autograd, with a version of its own."""
    with compat.without_torch_function():
        return tensor.data


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory, with a storage that ends where the view does, and that keeps the memory alive.

    What torch saves and pickles is the storage: a view of a large buffer would carry its neighbours along. And as long
    as such a storage lives, somebody may look at the memory. The view must be dense.
    """
    with compat.without_torch_function():
        whole = view.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=view.device)
        flat.set_(whole, view.storage_offset() * view.itemsize, (view.nbytes,), (1,))
        storage = compat.storage_over(flat)
        set_mark(storage, mark_of(whole))
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def beside(tensor: torch.Tensor) -> torch.Tensor:
    """New memory of the same tier and shape, which holds nothing yet."""
    with compat.without_torch_function(), compat.without_modes():
        made = torch.empty_like(tensor, requires_grad=False)
        set_mark(made.untyped_storage(), mark_of(tensor.untyped_storage()))
    return made


Entries = dict[str, Any]


class LiveState(defaultdict[torch.Tensor, Entries]):
    """The states of an optimizer whose own step runs on the chunks: reading waits for the updates under way.

    The session itself, whose worker makes them, goes past this by `dict`'s own methods.
    """

    def __init__(self, settle: Callable[[], None], entries: Mapping[torch.Tensor, Entries]) -> None:
        super().__init__(dict, entries)
        self._settle = settle

    def __getitem__(self, key: torch.Tensor) -> Entries:
        self._settle()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._settle()
        return super().__iter__()

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """As a dictionary's."""
        self._settle()
        return super().get(key, default)

    def items(self) -> ItemsView[torch.Tensor, Entries]:  # type: ignore[override]  # of a dictionary it is its own class
        """As a dictionary's."""
        self._settle()
        return super().items()

    def values(self) -> ValuesView[Entries]:  # type: ignore[override]  # of a dictionary it is its own class
        """As a dictionary's."""
        self._settle()
        return super().values()

    def copy(self) -> defaultdict[torch.Tensor, Entries]:  # type: ignore[override]  # not of this class
        """A copy is torch's own kind of dictionary."""
        self._settle()
        return defaultdict(dict, dict.items(self))

    def __copy__(self) -> defaultdict[torch.Tensor, Entries]:  # type: ignore[override]  # not of this class
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        self._settle()
        return defaultdict, (dict, dict(dict.items(self)))


class AbsentState(defaultdict[torch.Tensor, Entries]):
    """Empty: the states are the session's, in its own formats."""

    def __init__(self) -> None:
        super().__init__(dict)

    def __missing__(self, key: torch.Tensor) -> Entries:
        raise OptimizerStateError(
            "optimizer.state is empty while a session with precision= is open: the states are the session's, in its own formats; "
            "read them with optimizer.state_dict(), and write them with optimizer.load_state_dict()"
        )

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """Refused, as reading is: what is not here is not absent."""
        del default
        return self[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is torch's own kind of dictionary."""
        return defaultdict, (dict, dict(dict.items(self)))
