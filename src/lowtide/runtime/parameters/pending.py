"""Veiled tensors: a parameter or gradient that is not what it seems yet, and becomes so when somebody looks.

Between its uses a streamed parameter may have an update under way on the host, a newer value that is still being copied
back, or a prefetched copy that a write would leave behind. To wait for all of that after each step would undo the
overlap; so the tensor is veiled instead: its class is exchanged for one whose `__torch_function__` first settles what
is pending. A loop that never looks never waits, and one that looks always sees the true value. Inside a group's window
its parameters are ordinary ones: no operator of the model pays for this.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lowtide import compat


class Lease(Protocol):
    """Who veiled the tensor, and can lift the veil."""

    @property
    def label(self) -> str:
        """What the tensor belongs to, for messages."""

    def settle(self) -> None:
        """Make the tensor's value the true one, and unveil it unless its gradient is still to be guarded."""

    def check_gradient(self) -> None:
        """Raise if the gradient may not be looked at."""

    def wait_for_device(self) -> None:
        """Wait for what the loop has told the device so far."""


_LEASES: dict[int, weakref.ref[Lease]] = {}
"""By the `id` of the veiled tensor. Not an attribute of the tensor: it would travel with pickles and copies. Weak, so that
a session that is forgotten with its model is freed. Asked about veiled tensors alone, each of which wrote its own entry."""


def _lease_of(tensor: torch.Tensor) -> Lease | None:
    reference = _LEASES.get(id(tensor))
    return None if reference is None else reference()


def _getters(*names: str) -> Iterator[object]:
    for name in names:
        yield getattr(torch.Tensor, name).__get__


def _setter(name: str) -> object:
    return getattr(torch.Tensor, name).__set__


_GRADIENT_ACCESS: frozenset[object] = frozenset({*_getters("grad"), _setter("grad")})
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
"""What reads no value: sizes, types, hooks."""


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    kwargs = kwargs or {}
    if func in _GRADIENT_ACCESS:
        lease = _lease_of(args[0])
        if lease is not None:
            lease.check_gradient()
    lifted: list[str] = []
    if func not in _HARMLESS and func not in _GRADIENT_ACCESS:
        for tensor in _veiled_in((args, tuple(kwargs.values()))):
            lease = _lease_of(tensor)
            lifted += [] if lease is None else [lease.label]
            lift(tensor)
    if func is compat.UNSCALE:
        # GradScaler copies its scale and its overflow flag to the host without waiting, and its kernel reads them there.
        for tensor in _veiled_in(args):
            lease = _lease_of(tensor)
            if lease is not None:
                lease.wait_for_device()
                break
    try:
        with compat.without_torch_function():
            return func(*args, **kwargs)
    except RuntimeError as error:
        if lifted and "device" in str(error):
            error.add_note(
                f"{lifted[0]} is streamed, and was used outside of the call of its module, where its weights are on the "
                "host. Make the group resident, or let it open with the module that uses it: "
                "lay_out(find_groups(model, given={THAT_MODULE: [PARAMETERS]}))."
            )
        raise


class VeiledTensor(torch.Tensor):
    """A gradient that is still on its way, or that a pending update still reads."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Settle, then do what was asked."""
        return _run(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain tensor that it is."""
        lift(self)
        with _plain(self):
            return torch.Tensor.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copied as the plain tensor that it is."""
        lift(self)
        with _plain(self):
            return torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-any-return, no-untyped-call]


class VeiledParameter(nn.Parameter):
    """A parameter between two uses of its group, while something is pending."""

    is_plain_when_settled = True
    """For those who ask whether a parameter is a plain one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Settle, then do what was asked."""
        return _run(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain parameter that it is."""
        lift(self)
        with compat.without_torch_function():
            return nn.Parameter.__reduce_ex__(self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copied as the plain parameter that it is."""
        lift(self)
        with compat.without_torch_function():
            copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)
        copied.__class__ = nn.Parameter
        return copied


@contextlib.contextmanager
def _plain(tensor: torch.Tensor) -> Iterator[None]:
    """The tensor without its veil for a moment; a gradient on the host keeps it."""
    veiled = type(tensor)
    if veiled is VeiledTensor:
        tensor.__class__ = torch.Tensor
    try:
        yield
    finally:
        tensor.__class__ = veiled


def veil(tensor: torch.Tensor, lease: Lease) -> None:
    """From now on whoever looks at the tensor settles the lease first."""
    _LEASES[id(tensor)] = weakref.ref(lease)
    # Lazy parameters of torch change their class in the same way.
    tensor.__class__ = VeiledParameter if isinstance(tensor, nn.Parameter) else VeiledTensor


def unveil(tensor: torch.Tensor) -> None:
    """An ordinary tensor again. The caller knows that its value is the true one."""
    veiled = type(tensor)
    # The class before the lease: what is veiled has one, wherever an exception comes.
    if veiled is VeiledParameter:
        tensor.__class__ = nn.Parameter
        _LEASES.pop(id(tensor), None)
    elif veiled is VeiledTensor:
        tensor.__class__ = torch.Tensor
        _LEASES.pop(id(tensor), None)


def veil_all(parameters: Iterable[nn.Parameter], lease: Lease) -> None:
    """`veil`, for parameters that are not veiled yet."""
    reference = weakref.ref(lease)
    for parameter in parameters:
        if type(parameter) is not VeiledParameter:
            _LEASES[id(parameter)] = reference
            parameter.__class__ = VeiledParameter


def unveil_all(parameters: Iterable[nn.Parameter]) -> None:
    """`unveil`, for those that are veiled."""
    for parameter in parameters:
        kind: type[torch.Tensor] = type(parameter)
        if kind is VeiledParameter:
            parameter.__class__ = nn.Parameter
            _LEASES.pop(id(parameter), None)


def is_veiled(tensor: torch.Tensor) -> bool:
    """Whether a look at the tensor would settle something first."""
    return type(tensor) in (VeiledParameter, VeiledTensor)


def lift(tensor: torch.Tensor) -> None:
    """Settle what is pending for the tensor; its lease unveils it, unless there is more to guard."""
    lease = _lease_of(tensor)
    if lease is not None:
        lease.settle()
    else:
        unveil(tensor)


def _veiled_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if is_veiled(value):
                yield value
        elif isinstance(value, list | tuple):
            yield from _veiled_in(value)
        elif isinstance(value, dict):
            yield from _veiled_in(value.values())
