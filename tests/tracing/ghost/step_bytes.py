"""Two ways to count a step's bytes: from a trace, and on the CPU by a counter that knows nothing of Lowtide's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.tracing.step_trace import Category, Phase, StepTrace


def requested_curve(trace: StepTrace) -> list[int]:
    """Requested bytes without scratch and library workspaces: before the step, then after each event."""
    counts = [0 if a.category is Category.WORKSPACE else a.requested_bytes for a in trace.allocations]
    start = sum(n for n, a in zip(counts, trace.allocations, strict=True) if a.born is None)
    curve = [start]
    for event in trace.events:
        nbytes = counts[event.allocation]
        curve.append(curve[-1] + (-nbytes if event.is_free else nbytes))
    return curve


def peak_in(trace: StepTrace, phase: Phase) -> int:
    """The highest requested bytes in a phase."""
    curve = requested_curve(trace)
    # A phase begins with what the one before it left.
    return max(max(curve[index : index + 2]) for index, event in enumerate(trace.events) if event.phase is phase)


def after(trace: StepTrace, phase: Phase) -> int:
    """Requested bytes when the last operator of a phase has run, before the next phase frees anything."""
    curve = requested_curve(trace)
    return curve[max(index for index, event in enumerate(trace.events) if event.phase is phase) + 1]


class StorageCounter(TorchDispatchMode):
    """Bytes of all live storages that operators made or touched, on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def see(self, tensor: Tensor, *, is_counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() * is_counted
        if key in self._known:
            return

        def forget(_: object) -> None:
            del self._known[key]
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, forget)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return out


def real_peak(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], Tensor],
) -> int:
    """Peak bytes of the second step on the CPU."""

    def step() -> None:
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    counter = StorageCounter()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    for tensor in (*model.parameters(), *model.buffers(), *batch):
        counter.see(tensor)
    for tensor in state:
        counter.see(tensor, is_counted=tensor.dim() > 0)  # a step count is on the host, also where the weights are not
    with counter:
        step()
    return counter.peak
