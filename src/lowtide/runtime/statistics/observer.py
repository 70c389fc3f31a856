"""StepObserver: writes down what is in use on the device at each instant of a step, and how much of that is chunks.

An instant is the opening or closing of a window, forward or backward. Peaks are read only over times in which the chunks'
bytes stand still: between two such times chunks alone come and go, so that what is left after taking them off a peak is
exactly what was no chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from lowtide.memory.store import ChunkStore
from lowtide.planning.budget_plans import MonitorMode, StepSample
from lowtide.runtime.emulation.memory import TrackedMemory


class Gauge(Protocol):
    """Reads the device's memory."""

    highest_bytes: int
    """The most that was ever reserved, kept here because `take_peak` resets the device's own record of it."""

    def current_bytes(self) -> int:
        """In use now."""

    def take_peak(self) -> int:
        """The most in use since the last call."""


class TrackedGauge:
    """Reads what an emulated device counts."""

    def __init__(self, tracked: TrackedMemory) -> None:
        self.highest_bytes = 0
        self._tracked = tracked

    def current_bytes(self) -> int:
        """In use now."""
        return self._tracked.current_bytes

    def take_peak(self) -> int:
        """The most in use since the last call."""
        peak_bytes = self._tracked.reset_peak()
        self.highest_bytes = max(self.highest_bytes, peak_bytes)
        return peak_bytes


class CudaGauge:
    """Reads the allocator's own counters of a CUDA device; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.highest_bytes = 0
        self._device = device

    def current_bytes(self) -> int:
        """In live tensors now."""
        return torch.cuda.memory_allocated(self._device)

    def take_peak(self) -> int:
        """The most in live tensors since the last call."""
        self.highest_bytes = max(self.highest_bytes, torch.cuda.max_memory_reserved(self._device))
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_bytes


class StepObserver:
    """Takes samples until it is told to stop.

    Only the fullest instant of each group and phase is kept: the plan asks for no more, and a loop that accumulates over
    many batches would otherwise pile them up.

    Args:
        gauge: Reads the device.
        mode: What a sample holds.
    """

    def __init__(self, gauge: Gauge, mode: MonitorMode) -> None:
        self.gauge = gauge
        self.is_watching = True
        self.has_seen_backward = False
        self._mode = mode
        self._store: ChunkStore | None = None
        self._resident_bytes = 0
        self._num_samples = 0
        self._last = ("", "forward")
        self._fullest: dict[tuple[str, str], StepSample] = {}

    def watch(self, store: ChunkStore, resident_bytes: int) -> None:
        """Chunks on the device are those of the store, and resident ones of so many bytes."""
        self._store, self._resident_bytes = store, resident_bytes
        store.be_observed_by(self)

    @property
    def samples(self) -> tuple[StepSample, ...]:
        """The fullest instant of each group and phase, in the order of the step."""
        return tuple(sorted(self._fullest.values(), key=lambda sample: sample.number))

    def begin(self) -> None:
        """Whatever the device held before this is no part of the step: an earlier training in the same process."""
        self.gauge.take_peak()

    def take_sample(self, group: str, phase: str) -> None:
        """A window has opened or is about to close."""
        if not self.is_watching:
            return
        self.has_seen_backward = self.has_seen_backward or phase == "backward"
        used = self.gauge.take_peak() if self._mode is MonitorMode.PEAKS else self.gauge.current_bytes()
        self._write(group, phase, used)
        self._last = (group, phase)

    def chunks_change(self) -> None:
        """Chunks are about to come or go: a peak from before belongs to the bytes that they hold now."""
        if self.is_watching and self._mode is MonitorMode.PEAKS:
            self._write(*self._last, self.gauge.take_peak())

    def chunks_changed(self) -> None:
        """Chunks have come or left: memory in use from here on is compared with their new bytes."""
        if self.is_watching and self._mode is MonitorMode.PEAKS:
            self.gauge.take_peak()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no part of the step: an evaluation in the middle of it."""
        if not self.is_watching:
            yield
            return
        if self._num_samples:
            self.chunks_change()
        self.is_watching = False
        try:
            yield
        finally:
            self.is_watching = True
            self.chunks_changed()

    def stop(self) -> None:
        """Stop watching: the step is over."""
        if self.is_watching:
            self.take_sample("", "update")
            self.is_watching = False

    def give_up(self) -> None:
        """No more samples are wanted."""
        self.is_watching = False

    def _write(self, group: str, phase: str, used_bytes: int) -> None:
        assert self._store is not None
        sample = StepSample(
            number=self._num_samples,
            group=group,
            phase=phase,
            used_bytes=used_bytes,
            chunk_bytes=self._resident_bytes + self._store.used_bytes,
        )
        self._num_samples += 1
        fullest = self._fullest.get((group, phase))
        if fullest is None or sample.other_bytes > fullest.other_bytes:
            self._fullest[group, phase] = sample
