"""GroupCall: one forward call of a group that can be run again just so, and the checkpoint that does so in the backward.

A second run has the arguments, training modes, buffers, random numbers and autocast of the first.

Note [What a checkpoint is given]
All tensors among the arguments, however nested, are arguments of the checkpoint. It saves them as autograd saves its
own, before it goes inside: `saved_tensors_hooks` around the checkpoint see the group's inputs and nothing else. The first
run gets the caller's own objects, so that a list or a dictionary that the group fills is the caller's. A later run gets new
containers around the same leaves, and what it puts into them is nobody's.

Note [Buffers move once]
A forward may write to buffers (BatchNorm's statistics, spectral norm's vectors). When a group runs again, each buffer that
moved in its first run is replaced by a copy of what it was before that run: the second run computes what the first did, and
what it writes is nobody's.

Note [Which buffers move]
Most writes show in a buffer's version, but torch's batch norm moves its statistics without counting. These are known by
their names, and taken to move in every run in training. For what else is written without counting, values are compared in the
first run of a group that ends well, and in the first after parts of it went between training and evaluation. What has moved once
is copied before every run. A buffer that is written to through `.data`, but not yet in that first run, is not seen.

Note [Training modes]
A group runs again as it ran first, in training or in evaluation: the loop may have called `eval()` before its backward.
Without this a changed dropout or norm would save other tensors than in the forward, which torch's checkpoint notices by their
number at best, or as many with other values, which nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lowtide import compat
from lowtide.activations.saved import version_of

Run = Callable[..., Any]
_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""A function that gives the contexts of the first run and of a later one."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What norms move in training, torch's and those made after them."""


@dataclass(slots=True, eq=False)
class GroupCall:
    """One call of a group, which can run again. After its first run it holds no tensors itself; its graph holds it."""

    run: Run
    """Runs the group."""
    given: tuple[tuple[Any, ...], dict[str, Any]] | None
    """The call's positional and keyword arguments, until its first run."""
    structure: Any
    """How the arguments are nested, as `compat.flatten` gives it."""
    buffers: MovingBuffers
    modes: TrainingModes
    on_again: Callable[[], None]
    """Called before each later run."""
    moved: list[_Moved] = field(default_factory=list)

    def __call__(self, *leaves: Any) -> Any:
        """The first run, and every later one that the checkpoint asks for."""
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            with self.buffers.noted(self.moved):
                return self.run(*args, **kwargs)
        self.on_again()
        return self.again(self.run, leaves)

    def again(self, run: Run, leaves: Sequence[Any]) -> Any:
        """Run the call again through `run`; buffers and training modes stay as they are."""
        args, kwargs = compat.unflatten(leaves, self.structure)
        with self.modes.again(), _as_before(self.moved):
            return run(*args, **kwargs)


def checkpointed(call: GroupCall, leaves: Sequence[Any], contexts: _Contexts | None = None) -> Any:
    """The call's output. Its backward computes the tensors that it needs again, with the same random numbers and autocast."""
    if contexts is None:
        return checkpoint(call, *leaves, use_reentrant=False)
    return checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)


class MovingBuffers:
    """Watches the buffers of a group; see Note [Which buffers move]."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if compat.buffers_of(part)]
        self._expected: dict[tuple[bool, ...], set[tuple[int, str]]] = {}

    @contextmanager
    def noted(self, moved: list[_Moved]) -> Iterator[None]:
        """A context for the group's first run: buffers that the run changed are put into `moved` at the end."""
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
                moved.append(_Moved(holder=holder, name=name, before=value))
        # Only now: a run that broke off has not shown everything.
        self._expected.setdefault(modes, set()).update(expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """A buffer that the first run of a call has changed."""

    holder: dict[str, torch.Tensor | None]
    name: str
    before: torch.Tensor | None
    """Its value before that run; None if it was not expected to change."""


@contextmanager
def _as_before(moved: list[_Moved]) -> Iterator[None]:
    """A context for a later run: the group's buffers are copies of their old values in it, and themselves again afterwards."""
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
    # Without modes: a selective checkpoint counts the operators that it sees. But a tensor of another kind may live by its
    # mode, as the ghosts of a trace do.
    with torch.no_grad(), compat.without_modes() if type(buffer) is torch.Tensor else nullcontext():
        return buffer.detach().clone()


def _differs(buffer: torch.Tensor, value: torch.Tensor | None) -> bool:
    has_values = type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.device.type != "meta"
    if value is None or not has_values:
        return False
    with compat.without_modes():
        return not torch.equal(buffer, value)


class TrainingModes:
    """Records which of a group's modules are in training when it is made; see Note [Training modes]."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._modes = [part.training for part in parts]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with these modes; the present ones come back afterwards."""
        changed = [part for part, mode in zip(self._parts, self._modes, strict=True) if part.training is not mode]
        for part in changed:
            part.training = not part.training
        try:
            yield
        finally:
            for part in changed:
                part.training = not part.training


class RunContext:
    """Random numbers and autocast, as they are when it is made: what a run depends on besides its inputs.

    Args:
        inputs: The run's, on whose devices random numbers may be drawn.
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._device_type = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        self._host_state = torch.get_rng_state()
        self._devices: list[int] = []
        self._device_states: list[torch.Tensor] = []
        if self._device_type == "cuda":
            devices, self._device_states = get_device_states(*tensors)
            self._devices = list(devices)
        self._autocasts = [
            partial(
                torch.amp.autocast,
                kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys((self._device_type, "cpu"))
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with these random numbers and this autocast; the present ones come back afterwards."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices))
            torch.set_rng_state(self._host_state)
            if self._devices:
                set_device_states(self._devices, self._device_states, device_type=self._device_type)
            for autocast in self._autocasts:
                stack.enter_context(autocast())
            yield
