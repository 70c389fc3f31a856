"""Timing calls on a device or on the host: so many of them that a clock can tell, and without the host's launches between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowtide import compat
from lowtide.hardware.calibration import Measurement
from lowtide.models.llama import LlamaConfig

_MOST_CALLS = 400
"""In a repeat: what a stream takes before the host has to wait for it, with room."""
_MOST_HIDDEN_S = 0.2
"""Seconds of launches that are hidden behind a busy device."""
LARGE = LlamaConfig(
    vocab_size=32000, context_length=2048, num_layers=4, hidden_size=2048, intermediate_size=8192, num_heads=16, num_kv_heads=16,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=512, context_length=64, num_layers=12, hidden_size=64, intermediate_size=256, num_heads=4, num_kv_heads=4,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large what is measured is, and how long it is measured."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    squares: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    num_tokens: int = 8192
    """Rows of the tall products, and tokens of each attention."""
    hidden_size: int = 4096
    inner_size: int = 11008
    lengths: tuple[int, ...] = (512, 2048, 8192)
    """Lengths of attention; each divides the number of tokens."""
    head_size: int = 128
    memory_bytes: int = 512 << 20
    """Bytes of the arrays that memory is measured with: far more than caches hold."""
    copy_bytes: int = 256 << 20
    num_updated: int = 1 << 26
    """Parameters of an update."""
    large: LlamaConfig = LARGE
    """Its step is bound by the device."""
    large_batch: tuple[int, int] = (4, 2048)
    small: LlamaConfig = SMALL
    """Its step is bound by the host."""
    small_batch: tuple[int, int] = (1, 16)
    model_dtype: str = "bfloat16"
    num_steps: int = 15
    least_s: float = 0.15
    """Seconds of each measurement, all repeats together."""
    num_repeats: int = 5


@dataclass(slots=True)
class Timer:
    """Times calls on one device, and keeps what it found."""

    device: torch.device
    sizes: Sizes
    tell: Callable[[str], None] = lambda text: None
    found: list[Measurement] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        """Whether the device works beside the host."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def on_device(self, name: str, work: float, unit: str, call: Callable[[], object]) -> Measurement:
        """Time work of the device, without the host's launches where they are shorter than the work of many calls."""
        self.tell(name)
        call()
        self.wait()
        began_s = time.perf_counter()
        call()
        launched_s = time.perf_counter() - began_s
        self.wait()
        once_s = time.perf_counter() - began_s
        count = max(1, min(_MOST_CALLS, round(self.sizes.least_s / self.sizes.num_repeats / once_s)))
        repeat = self._timed_by_events if self.is_cuda else self._timed_by_clock
        return self.note(name, work, unit, [repeat(call, count, launched_s) for _ in range(self.sizes.num_repeats)])

    def on_host(self, name: str, work: float, unit: str, call: Callable[[], object], *, count: int = 1) -> Measurement:
        """Time work of the host, after one call that does not count."""
        self.tell(name)
        call()
        return self.note(
            name, work, unit, [self._timed_by_clock(call, count, 0.0) for _ in range(self.sizes.num_repeats)]
        )

    def note(self, name: str, work: float, unit: str, times_s: list[float]) -> Measurement:
        """Keep what was timed."""
        self.found.append(Measurement(name=name, work=float(work), unit=unit, times_s=tuple(times_s)))
        return self.found[-1]

    def _timed_by_clock(self, call: Callable[[], object], count: int, launched_s: float) -> float:
        del launched_s
        self.wait()
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - began_s) / count

    def _timed_by_events(self, call: Callable[[], object], count: int, launched_s: float) -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.wait()
        # The calls are launched while the device is busy, so that it goes from one to the next.
        compat.keep_device_busy(min(_MOST_HIDDEN_S, 1.5 * launched_s * count + 1e-4))
        began.record()
        for _ in range(count):
            call()
        ended.record()
        self.wait()
        return float(began.elapsed_time(ended)) * 1e-3 / count
