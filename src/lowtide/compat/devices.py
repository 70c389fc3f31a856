"""Devices: CUDA's streams, memory locked for copies, torch's records of memory, and a device of our own in torch's free slot."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(index: int) -> torch.cuda.Stream:
    """The stream that this thread uses on a CUDA device. torch's own function takes 20 microseconds, this one less than one."""
    key = (index, int(torch._C._cuda_getCurrentRawStream(index)))
    stream = _STREAMS.get(key)
    if stream is None:
        # The same handle is the same stream for as long as torch's pool of streams lives, which is for good.
        stream = _STREAMS[key] = torch.cuda.current_stream(index)
    return stream


CudaEvent = torch._C._CudaEventBase
"""What `torch.cuda.Event` wraps. Each of its methods is a function of Python more, and a step records a hundred events."""


def timed_event(stream: torch.cuda.Stream) -> CudaEvent:
    """A new event at the point that the stream has been told to reach so far."""
    event = CudaEvent(enable_timing=True)
    event.record(stream)
    return event


class OnStream:
    """Runs what is inside on a CUDA stream, as `torch.cuda.stream` does, at a tenth of its cost. One use each."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def __exit__(self, *error: object) -> None:
        stream_id, index, kind = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)
        if self._device != index:
            torch._C._cuda_setDevice(self._device)


def register_python_backend(name: str, module: object) -> None:
    """Give torch's spare backend slot (PrivateUse1) a name, a Python device module and do-nothing device guards."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def allow_foreach_on(kind: type[torch.Tensor]) -> None:
    """Let the optimizers take their foreach form for parameters of this type, as they do for plain CUDA parameters."""
    from torch.optim.optimizer import _foreach_supported_types

    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def treat_cuda_as(name: str, on_autocast_exit: Callable[[], None]) -> None:
    """Make `torch.autocast("cuda")` mean the backend `name` in this process, and tell of the outermost context's end."""
    original_init = torch.autocast.__init__
    original_clear = torch.clear_autocast_cache

    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original_init(self, name if device_type == "cuda" else device_type, *args, **kwargs)

    def clear() -> None:
        on_autocast_exit()
        original_clear()

    torch.autocast.__init__ = init  # type: ignore[method-assign]  # in the tracing subprocess alone
    torch.clear_autocast_cache = clear


class MemoryProfile:
    """A context that records every operator and every allocation of all threads that work for this one.

    `roots` holds the profiler's event trees afterwards. The profiler sits below Python: it holds no tensor and makes
    none, so autograd sums gradients in place as it would unwatched, which it does not under a dispatch mode.
    """

    def __init__(self) -> None:
        self.roots: list[Any] = []
        self._profile = torch.autograd.profiler.profile(use_kineto=True, record_shapes=True, profile_memory=True)

    def __enter__(self) -> MemoryProfile:
        self._profile.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._profile.__exit__(kind, error, traceback)
        if kind is None and self._profile.kineto_results is not None:
            self.roots = self._profile.kineto_results.experimental_event_tree()


def is_profiling() -> bool:
    """Whether a torch profiler watches this thread: torch has room for one."""
    return bool(torch._C._autograd._profiler_enabled())


def start_allocator_history(device: torch.device, max_entries: int) -> None:
    """Let the CUDA allocator note each request with its Python stack; what it noted before is dropped."""
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=max_entries, device=device, clear_history=True
    )


def stop_allocator_history(device: torch.device) -> None:
    """End what `start_allocator_history` began."""
    torch.cuda.memory._record_memory_history(None, device=device)


def allocator_history(device: torch.device) -> list[dict[str, Any]]:
    """What the CUDA allocator noted, oldest first.

    Each entry has `action`, `addr`, `size` (as requested) and, for an allocation, `frames`, the innermost first.
    """
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot(device)["device_traces"][device.index]
    return entries


def allocator_segments() -> list[dict[str, Any]]:
    """The CUDA allocator's segments, each with its `blocks` in order of address."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return segments


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU."""
    return importlib.util.find_spec("triton") is not None


def lock_host_memory(buffer: torch.Tensor) -> str | None:
    """Lock a host tensor's memory for copies; what CUDA answered where it could not, None where it did.

    Registered memory has exactly the tensor's size; torch's own locked allocations are rounded up to a power of two.
    """
    answer = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(answer) == 0:
        return None
    # CUDA keeps the refusal as its last error, and the next kernel that the user starts would be blamed for it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return str(answer)


def unlock_host_memory(address: int) -> None:
    """Undo `lock_host_memory` of the memory that begins there."""
    torch.cuda.cudart().cudaHostUnregister(address)


def keep_device_busy(seconds: float) -> None:
    """Give the current stream nothing to do for about so long: what is launched meanwhile runs without waiting for the host."""
    torch.cuda._sleep(int(seconds * 2e9))  # cycles, at about 2 GHz


def free_cublas_workspaces() -> None:
    """Give back what cuBLAS keeps of the allocator's memory; the next product takes it anew."""
    torch._C._cuda_clearCublasWorkspaces()


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many small tensors in few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)
