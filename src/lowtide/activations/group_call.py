"""GroupCall: one forward call of a group that can be run again, and the checkpoint that does so in the backward.

Note [What a checkpoint is given]
All tensors among the arguments, however nested, are arguments of the checkpoint. It saves them as autograd saves its
own, before it goes inside: `saved_tensors_hooks` around the checkpoint see the group's inputs and nothing else. The first
run gets the caller's own objects, so that a list or a dictionary that the group fills is the caller's. A later run gets new
containers around the same leaves, and what it puts into them is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import checkpoint

from lowtide import compat
from lowtide.activations.moving_buffers import Moved, MovingBuffers, as_before
from lowtide.activations.training_modes import TrainingModes

Run = Callable[..., Any]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Gives the contexts of the first run and of a later one."""


class GroupCall:
    """See the module's docstring. It holds no tensor of its own after its first run; its graph holds it.

    Args:
        run: Runs the group.
        args: Of this call.
        kwargs: Of this call.
        structure: Of both, by `compat.flatten`.
        buffers: Of the group.
        modes: Of the group's modules, now.
        on_again: Called before each later run.
    """

    def __init__(
        self,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        structure: Any,
        buffers: MovingBuffers,
        modes: TrainingModes,
        on_again: Callable[[], None],
    ) -> None:
        self._run = run
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._structure = structure
        self._buffers = buffers
        self._modes = modes
        self._moved: list[Moved] = []
        self._on_again = on_again

    def __call__(self, *leaves: Any) -> Any:
        """The first run, and every later one that the checkpoint asks for."""
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            with self._buffers.noted(self._moved):
                return self._run(*args, **kwargs)
        self._on_again()
        return self.again(self._run, leaves)

    def again(self, run: Run, leaves: Sequence[Any]) -> Any:
        """Run it again through `run`; buffers and training modes stay as they are."""
        args, kwargs = compat.unflatten(leaves, self._structure)
        with self._modes.again(), as_before(self._moved):
            return run(*args, **kwargs)


def checkpointed(call: GroupCall, leaves: Sequence[Any], contexts: Contexts | None = None) -> Any:
    """The call's output; what its backward needs is computed again then, with the same random numbers and autocast."""
    if contexts is None:
        return checkpoint(call, *leaves, use_reentrant=False)
    return checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)
