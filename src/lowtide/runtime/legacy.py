"""Legacy: what the machinery of one plan leaves to that of the next, so that it is one session all along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.memory.store import Books
from lowtide.runtime.managed_optimizer import ManagedOptimizer
from lowtide.runtime.recording import Recorder, is_resident
from lowtide.runtime.unit import Bound, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Legacy:
    """See the module's docstring. The weights, gradients and optimizer state are with the user's own objects."""

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
    """Of the device so far."""


def forget_device_memory(units: Iterable[Unit], books: Books) -> None:
    """Let go of the weights on the device, whose parameters look elsewhere by now."""
    for unit in units:
        for chunk in unit.group.chunks:
            if is_resident(chunk):
                books.credit(chunk.spec.nbytes, chunk.spec.name)
            chunk.forget_device()
        for bound in unit.bounds:
            bound.device_view = chunk.device


def place_gradient(bound: Bound, *, is_copied: bool) -> None:
    """Bring a gradient that was there before the plan to where the plan wants it.

    Args:
        bound: Bound by the plan.
        is_copied: To the device in any case: what stood for the host's memory on an emulated device does no longer.
    """
    parameter = bound.parameter
    gradient = parameter.grad
    if gradient is None:
        return
    data = parameter.data
    is_for_host = bound.twin is not None
    home = bound.host_view if is_for_host else data
    assert home is not None
    if gradient.device == home.device and (is_for_host or not is_copied):
        return
    parameter.grad = None
    # A parameter on the device may have a gradient on the host, but not be given one.
    parameter.data = home
    parameter.grad = gradient.detach().to(home.device, copy=True)
    parameter.data = data
