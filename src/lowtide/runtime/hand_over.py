"""Hand-over: what a session gives back at its end, or leaves to its next plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.memory.store import Books
from lowtide.planning.plan import Site
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.parameters.group import ManagedGroup
from lowtide.runtime.passes.executor import Executor, host_gradients
from lowtide.runtime.statistics.recording import Recorder, is_resident
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer
from lowtide.runtime.updates.managed_optimizer import ManagedOptimizer
from lowtide.runtime.updates.worker import HostWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What one plan leaves to the next, so that it is one session all along.

    The weights, gradients and optimizer state are with the user's own objects.
    """

    original: dict[int, torch.device]
    """Where each parameter was before the session, by `id`."""
    moved_along: list[tuple[nn.Module, str, torch.device]]
    """What went to the device whole, and where it was before."""
    recorder: Recorder
    """Goes on counting steps and copies."""
    clock_origin_s: float
    managed: ManagedOptimizer | None
    """Stays installed: a scheduler may have wrapped it by now."""
    num_fetches: dict[str, int]
    """By chunk."""
    peak_bytes: int
    """The most that the device held so far."""


def forget_device_memory(groups: Iterable[ManagedGroup], books: Books) -> None:
    """Let go of the weights on the device, whose parameters look elsewhere by now."""
    for group in groups:
        for chunk in group.stored.chunks:
            if is_resident(chunk):
                books.credit(chunk.spec.nbytes, chunk.spec.name)
            chunk.forget_device()
        group.forget_device()


def count_state(
    groups: Iterable[ManagedGroup],
    runner: ChunkOptimizer | None,
    optimizer: torch.optim.Optimizer,
    tracked: TrackedMemory,
) -> None:
    """Tell an emulated device which optimizer state lies there: under a new plan, or loaded. Moving it copied nothing."""
    for managed in (managed for group in groups for managed in group.members):
        if isinstance(runner, KernelOptimizer):
            kept = runner.kept.by_parameter.get(id(managed.parameter))
            tensors = [] if kept is None else kept.all_tensors()
        else:
            state = dict.get(optimizer.state, managed.parameter) or {}
            # Counts of steps are the host's on every device.
            tensors = [each for key, each in state.items() if isinstance(each, torch.Tensor) and key != "step"]
        for tensor in tensors:
            if managed.site is Site.DEVICE:
                tracked.include(tensor, "optimizer state")
            elif managed.site is Site.HOST:
                tracked.exclude(tensor)


def settle_for_good(executor: Executor, worker: HostWorker) -> Exception | None:
    """Settle what can be settled, and end the worker; the first error, for when everything has been given back."""
    errors: list[Exception] = []

    def attempt(settle: Callable[[], None]) -> bool:
        try:
            settle()
        except Exception as error:
            errors.append(error)
            return False
        return True

    attempt(executor.check_broken)
    worker.close()
    # In any case: whatever was left half made, wherever that was.
    attempt(executor.put_in_order)
    executor.mover.drain()
    for group in executor.groups.values():
        # A failed update is forgotten once it has been reported: what follows it gets its turn.
        for _ in range(len(group.stored.chunks) + 1):
            if attempt(partial(executor.settle_group, group)):
                break
        for gradient in host_gradients(group):
            while not attempt(gradient.settle):
                pass
    attempt(worker.check)
    attempt(partial(executor.gradient_watch.check, waits=True))
    executor.mover.drain()
    first = errors[0] if errors else None
    errors.clear()  # the errors' own frames see this list: a cycle would keep what they hold
    return first


def return_rest(moved: Iterable[tuple[nn.Module, str, torch.device]]) -> None:
    """Buffers and unmanaged parameters go back to where they were."""
    for module, name, device in moved:
        buffer, parameter = module._buffers.get(name), module._parameters.get(name)
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
        elif parameter is not None:
            parameter.data = parameter.data.to(device)


def bring_state_to_parameters(optimizer: torch.optim.Optimizer | None) -> None:
    """State lies beside its parameter, as a plain optimizer expects it. Step counts lie where torch keeps them."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            bring_state(optimizer.state.get(parameter, {}), parameter, group)


def bring_state(state: dict[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
    """The state of one parameter lies beside it; `group` are its settings."""
    # Kernels that read the count read it on the device; else it is a number on the host.
    stays = () if group.get("capturable") or group.get("fused") else ("step",)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and key not in stays and value.device != parameter.device:
            state[key] = value.to(parameter.device)
