"""What is measured while a run trains: the device's peak in each phase, and through one step."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.lab.record import MemoryFigures
from lowtide.memory.groups import find_groups
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.session import Session

TakePeak = Callable[[], int]
"""The most since the last call, in bytes of tensors; a new peak begins."""


class Meter:
    """Collects the peak of each phase of a run.

    Args:
        take_peak: Asked at each phase's end.
        device: A CUDA device, whose reserved memory is noted too.
    """

    def __init__(self, take_peak: TakePeak, device: torch.device) -> None:
        self._take_peak, self._device = take_peak, device
        self._by_phase: dict[str, int] = {}
        self._reserved_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The largest of all phases so far."""
        return max(self._by_phase.values(), default=0)

    def begin(self) -> None:
        """Begin to measure: what was held before does not count."""
        self._note_reserved()
        self._take_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """At the end, what was held since the end of the phase before was held in this one."""
        yield
        self._note_reserved()
        self._by_phase[name] = max(self._by_phase.get(name, 0), self._take_peak())

    def figures(self, timeline: tuple[tuple[str, int], ...] = ()) -> MemoryFigures:
        """The figures of the run."""
        return MemoryFigures(
            peak_bytes=self.peak_bytes,
            by_phase=dict(self._by_phase),
            reserved_bytes=self._reserved_bytes or None,
            host_bytes=_host_peak_bytes(),
            timeline=timeline,
        )

    def _note_reserved(self) -> None:
        # Before the peak is taken, which begins a new one of these too.
        if self._device.type == "cuda":
            self._reserved_bytes = max(self._reserved_bytes, torch.cuda.max_memory_reserved(self._device))


@contextmanager
def metered(model: nn.Module, session: Session | None, device: torch.device) -> Iterator[TakePeak]:
    """How to ask for peaks while the model is trained: of the session, of the GPU, or of a host that stands in for one."""
    if session is not None:
        # The step that a warm-up watches has its peaks for itself; the run is measured from the next one on.
        yield lambda: 0 if session.is_warming_up else session.take_device_peak()
        return
    if device.type == "cuda":

        def take_cuda_peak() -> int:
            peak_bytes = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return peak_bytes

        yield take_cuda_peak
        return
    tracked = TrackedMemory(None)
    tracked.start()
    try:
        for tensor in chain(model.parameters(), model.buffers()):
            tracked.include(tensor, "weights")
        yield tracked.reset_peak
    finally:
        tracked.stop()


def _host_peak_bytes() -> int:
    """The largest resident size of this process."""
    try:
        # On Linux `getrusage` remembers the process that started this one, if that was larger.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Watch:
    """Points of a timeline; the code that runs the step says which phase it is in."""

    def __init__(self, take_peak: TakePeak) -> None:
        self._take_peak = take_peak
        self._phase = "forward"
        self.points: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Points in between are of this phase, and one is added at its end."""
        self._phase = name
        yield
        self.mark(name)

    def mark(self, phase: str | None = None) -> None:
        """Add a point with the most that was held since the last one."""
        self.points.append((phase or self._phase, self._take_peak()))


def watched_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls are marked: those of a plain model's groups, because a session may hide parameters."""
    paths = dict.fromkeys(window for group in find_groups(model) for window in group.modules)
    return [model.get_submodule(path) for path in paths if path]


@contextmanager
def watched(modules: Sequence[nn.Module], watch: Watch) -> Iterator[None]:
    """Mark the ends of the calls of modules, and the beginnings of their backwards. Changes no tensor and no graph."""

    def on_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        watch.mark()
        for tensor in compat.flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda _: watch.mark("backward"))
                break

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(on_forward))
        yield
