"""DevicePeak: the most that the device held, through resets of the device's own record."""

from __future__ import annotations

import torch

from lowtide.runtime.basis import Basis
from lowtide.runtime.observer import Gauge


class DevicePeak:
    """Remembers what a reset makes the device forget.

    Args:
        basis: Knows the device.
        before_bytes: The most under the plans before; None under the first.
        gauge: Of an observer, which resets the device's record too.
    """

    def __init__(self, basis: Basis, before_bytes: int | None, gauge: Gauge | None) -> None:
        self._basis = basis
        self._before_bytes = before_bytes
        self._gauge = gauge
        self._taken_bytes = 0
        """What the statistics would show, had `take` not begun a new peak."""

    def take(self) -> int:
        """The most in use since this was last called, or since the start; a new peak begins."""
        if self._basis.tracked is not None:
            peak_bytes = shown_bytes = self._basis.tracked.reset_peak()
        else:
            device = self._basis.mover.device
            peak_bytes, shown_bytes = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._taken_bytes = max(self._taken_bytes, shown_bytes)
        return peak_bytes

    def highest_bytes(self) -> int | None:
        """The most of the whole session, on CUDA as reserved by the allocator; None where only chunks are known."""
        if self._basis.tracked is not None:
            peaks = [self._basis.tracked.peak_bytes, self._taken_bytes]
        elif self._basis.is_on_cuda:
            peaks = [torch.cuda.max_memory_reserved(self._basis.mover.device), self._taken_bytes]
        else:
            peaks = []
        if self._before_bytes is not None:
            peaks.append(self._before_bytes)
        if self._gauge is not None:
            peaks.append(self._gauge.highest_bytes)
        return max(peaks, default=None)
