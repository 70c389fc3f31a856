"""The ghost device with its mover, and `torch.cuda` as it would answer on a machine with one device of the target kind.

The ghost device is torch's spare backend slot, registered as an accelerator that has no memory and runs nothing. A spare
backend, not `meta` or `cpu`, because C++ code asks tensors for their kind of device: dropout takes its fused form, the
optimizers their foreach form, autograd its device thread only for what looks like an accelerator. Registration is global and
final for the process, so only the tracing subprocess does it.

Models name the CUDA device in so many words (`device="cuda"`, `x.cuda()`), ask whether there is one and which, wait for it, or
empty its cache. In the tracing subprocess there is no CUDA, by intention, and torch refuses such calls before any dispatch mode
sees them: they are translated one level above. The questions get the target's answers, the rest does nothing. What changes the
memory of a step (side streams, graphs) is not pretended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.hardware import Hardware
from lowtide.memory.mover import Copied, Ticket

NAME = "ghost"


def _nothing(*_: Any, **__: Any) -> None:
    pass


_ONE_DEVICE: dict[str, Callable[..., Any]] = {
    "is_initialized": lambda: True,
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    # Recompute asks for it; there is no randomness to replay.
    "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
    **dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_rng_state"), _nothing
    ),
}
"""What both `torch.ghost` and `torch.cuda` answer: one device, no random state worth keeping."""


def register_device() -> torch.device:
    """Make the ghost device known to torch, once, and return it."""
    if getattr(torch, NAME, None) is None:
        module = SimpleNamespace(
            **_ONE_DEVICE,
            _is_in_bad_fork=lambda: False,
            get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
            device=lambda device: torch.device(NAME, 0),
        )
        compat.register_python_backend(NAME, module)
    return torch.device(NAME, 0)


@contextlib.contextmanager
def cuda_functions(hardware: Hardware) -> Iterator[None]:
    """While active, `torch.cuda` speaks for the device."""
    replaced = [
        *((torch.cuda, name, answer) for name, answer in _answers(hardware).items()),
        *((torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "mark")),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, answer in replaced:
        setattr(place, name, answer)
    try:
        yield
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def _answers(hardware: Hardware) -> dict[str, Callable[..., Any]]:
    major, minor = hardware.compute_capability
    properties = SimpleNamespace(
        name=hardware.label,
        major=major,
        minor=minor,
        total_memory=hardware.memory_bytes,
        multi_processor_count=hardware.num_sms,
    )
    # A model that logs its memory must not fail; what it logs does not matter here.
    logged = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        **_ONE_DEVICE,
        "reset_peak_memory_stats": _nothing,
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: hardware.label,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (hardware.memory_bytes, hardware.memory_bytes),
        **{name: lambda device=None: 0 for name in logged},
    }


class LiteralDevices(TorchFunctionMode):
    """While active, `cuda` in an argument of torch's functions means `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return self._to_device(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0]  # there is no device to pin it for
        if func is Tensor.to:
            args = tuple(self._translated(arg) for arg in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._translated(kwargs["device"])}
        return func(*args, **kwargs)

    def _translated(self, value: Any) -> Any:
        is_cuda = (isinstance(value, torch.device) and value.type == "cuda") or (
            isinstance(value, str) and value.partition(":")[0] == "cuda"
        )
        return self._device if is_cuda else value

    def _to_device(self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
        return tensor.to(self._device, non_blocking=non_blocking, **options)


class _Point:
    """Ghosts have no clock: what is asked for has happened."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def time_s(self) -> float:
        return 0.0


class GhostMover:
    """Carries ghosts between the ghost device and the host (see `memory.mover`).

    Copies happen at once. It holds nothing: a stash holds what it sends by itself.

    Args:
        device: The ghost device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """The ghost device."""
        return self._device

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Memory of the ghost device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """A ghost on the host; a small one is real."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_host_buffer(self, buffer: Tensor) -> None:
        """Nothing to do: no memory was locked."""

    def grow(self, buffer: Tensor) -> None:
        """Never called: a ghost's storage keeps its memory."""
        raise AssertionError("a ghost's storage cannot be taken away and given back")

    def shrink(self, buffer: Tensor, after: Sequence[Ticket]) -> None:
        """Never called: a ghost's storage keeps its memory."""
        raise AssertionError("a ghost's storage cannot be taken away and given back")

    def to_device(self, target: Tensor, source: Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """Copy at once."""
        return _copy(target, source)

    def to_host(self, target: Tensor, source: Tensor, after: Sequence[Ticket] = (), *, keep: bool = True) -> Copied:
        """Copy at once."""
        assert not keep, "ghosts are sent by stashes alone, which hold them"
        return _copy(target, source)

    def now(self) -> _Point:
        """A point that has been reached."""
        return _Point()

    def compute_after(self, ticket: Ticket) -> None:
        """There is nothing to wait for."""

    def drain(self) -> None:
        """No copy is under way."""


def _copy(target: Tensor, source: Tensor) -> Copied:
    with torch.no_grad():
        target.copy_(source)
    return Copied(_Point(), _Point())
