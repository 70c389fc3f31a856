"""An H200 that inductor can ask about its properties, on a machine without one. Nothing runs on it.

Needs a build of torch for CUDA, which need not find a GPU, and Triton beside it. Checked in 2.8.0 and 2.11.0. A torch that asks
more than these raises from within its call of the driver; the traceback names the function whose answer is to be added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    total_memory=140 << 30,
    L2_cache_size=50 << 20,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)


@contextlib.contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Within it inductor generates code for the GPU above, as long as nobody loads the code."""
    import torch.utils._triton as triton_support
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import reinplace

    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "device": _no_guard,
            "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
            "get_device_properties": lambda device=None: PROPERTIES,
            "get_rng_state": lambda *words: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *words, **named: None,
            "synchronize": lambda *words: None,
        },
        CudaInterface: {
            "current_device": staticmethod(lambda: 0),
            "device": _no_guard,
            "get_compute_capability": staticmethod(lambda device=None: 90),
            "get_device_properties": staticmethod(lambda device=None: PROPERTIES),
            "is_available": staticmethod(lambda: True),
            "is_bf16_supported": staticmethod(lambda *words, **named: True),
            "is_triton_capable": staticmethod(lambda device=None: True),
            "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        },
        CudaInterface.Worker: {
            "current_device": staticmethod(lambda: 0),
            "get_device_properties": staticmethod(lambda device=None: PROPERTIES),
        },
        triton_support: {"triton_hash_with_backend": lambda: "none"},
        # A fake tensor's copy asks the driver for the device; only the form of the result counts there.
        reinplace: {"_inplace_generalized_scatter": lambda whole, part, view_ops: whole},
    }
    with contextlib.ExitStack() as stack:
        for owner, by_name in answers.items():
            for name, answer in by_name.items():
                stack.enter_context(mock.patch.object(owner, name, answer))
        yield


@contextlib.contextmanager
def _no_guard(*words: object) -> Iterator[None]:
    yield
