"""Buffers that a forward writes to (BatchNorm's statistics, spectral norm's vectors) move once, however often it runs.

When a group runs again, each buffer that moved in its first run is replaced by a copy of what it was before that run: the
second run computes what the first did, and what it writes is nobody's.

Note [Which buffers move]
Most writes show in a buffer's version, but torch's batch norm moves its statistics without counting. These are known by
their names, and taken to move in every run in training. For what else is written without counting, values are compared in the
first run of a group that ends well, and in the first after parts of it went between training and evaluation. What has moved once
is copied before every run. A buffer that is written to through `.data`, but not yet in that first run, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.saved import version_of

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What norms move in training, torch's and those made after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A buffer that the first run of a call has moved."""

    holder: dict[str, torch.Tensor | None]
    name: str
    before: torch.Tensor | None
    """Its value before that run; None where nobody expected it to move."""


class MovingBuffers:
    """Watches the buffers of a group."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if compat.buffers_of(part)]
        self._expected: dict[tuple[bool, ...], set[tuple[int, str]]] = {}

    @contextmanager
    def noted(self, moved: list[Moved]) -> Iterator[None]:
        """While the group runs for the first time: what has moved is put into `moved` at the end."""
        modes = tuple(part.training for part in self._parts)
        is_new = modes not in self._expected
        expected = {
            (index, name)
            for index, part in enumerate(self._parts)
            for name in compat.buffers_of(part)
            if part.training and name in STATISTICS
        }
        expected |= self._expected.get(modes, set())
        before = [
            (index, name, buffer, version_of(buffer), _copy(buffer) if is_new or (index, name) in expected else None)
            for index, part in enumerate(self._parts)
            for name, buffer in compat.buffers_of(part).items()
            if buffer is not None
        ]
        yield
        for index, name, buffer, version, value in before:
            holder = compat.buffers_of(self._parts[index])
            has_moved = holder.get(name) is not buffer or version_of(buffer) != version
            if has_moved or (is_new and _differs(buffer, value)):
                expected.add((index, name))
            if (index, name) in expected:
                moved.append(Moved(holder=holder, name=name, before=value))
        # Only now: a run that broke off has not shown everything.
        self._expected.setdefault(modes, set()).update(expected)


@contextmanager
def as_before(moved: list[Moved]) -> Iterator[None]:
    """While the group runs again: its buffers are copies of what they were, and themselves afterwards."""
    now = [(entry, entry.holder.get(entry.name)) for entry in moved]
    for entry, buffer in now:
        value = entry.before if entry.before is not None else buffer
        entry.holder[entry.name] = None if value is None else _copy(value)
    try:
        yield
    finally:
        for entry, buffer in now:
            entry.holder[entry.name] = buffer


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    if type(buffer) is not torch.Tensor:
        # A tensor of another kind may live by its mode, as the ghosts of a trace do.
        with torch.no_grad():
            return buffer.detach().clone()
    # Without modes: a selective checkpoint counts the operators that it sees.
    with torch.no_grad(), compat.without_modes():
        return buffer.detach().clone()


def _differs(buffer: torch.Tensor, value: torch.Tensor | None) -> bool:
    has_values = type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.device.type != "meta"
    if value is None or not has_values:
        return False
    with compat.without_modes():
        return not torch.equal(buffer, value)
