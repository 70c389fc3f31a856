"""`torch.cuda` as it would answer on a machine with one card of the target kind.

Models ask whether there is a card and which, wait for it, or empty its cache. The questions get the card's answers, the rest
does nothing. What changes the memory of a step (side streams, graphs) is not pretended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from lowtide.hardware import Hardware


@contextlib.contextmanager
def cuda_functions(hardware: Hardware) -> Iterator[None]:
    """While active, `torch.cuda` speaks for the card."""
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


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _answers(hardware: Hardware) -> dict[str, Callable[..., Any]]:
    major, minor = hardware.compute_capability
    properties = SimpleNamespace(
        name=hardware.label,
        major=major,
        minor=minor,
        total_memory=hardware.memory_bytes,
        multi_processor_count=hardware.num_sms,
    )
    # A model that logs its memory must not fail; what it logs is nobody's business here.
    logged = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    without_effect = (
        "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all",
        "set_rng_state",
    )  # fmt: skip
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: hardware.label,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (hardware.memory_bytes, hardware.memory_bytes),
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),  # there is no randomness to replay
        **{name: lambda device=None: 0 for name in logged},
        **dict.fromkeys(without_effect, _nothing),
    }
