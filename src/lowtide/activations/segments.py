"""Segments: several recomputed groups in a row keep one input, the first group's.

Note [How inputs inside a segment are made again]
Each group is checkpointed by itself. Where an input of a call is an output of the call before it in the same segment, no
tensor is saved for it but a `Remade`: which output of which call. When the backward reaches the last group of the segment
it asks for that output; the call before runs again, whose input is a `Remade` too, and so back to the segment's first call.
The outputs of these runs are kept until the backward of the group that reads them has taken them. So a group's forward runs
twice more at most: once for the inputs of those after it, once for its own backward.

Nothing is assumed about the code between the groups. An input that is not an output of the call before, by memory, shape and
version, is saved as it is. Only a write that does not count as a version, through `.data`, is not seen: an output must not be
changed that way where groups share a segment. A second run saves nothing for a backward, but runs with gradients enabled:
some operators choose their kernel by that, and another kernel may round otherwise.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide import compat
from lowtide.activations.group_call import GroupCall, Run, RunContext, checkpointed
from lowtide.activations.saved import Held, Saved, geometry_of, take, version_of
from lowtide.errors import ActivationError


class Mark:
    """Recognises a tensor by its memory, shape and version, without holding it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = compat.plain_storage(tensor)
        # A dead storage's place may be taken by another one.
        self._storage = None if storage is None else weakref.ref(storage)
        self._geometry = _describe(tensor)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has the value of the one that was marked."""
        if self._storage is None or (storage := self._storage()) is None:
            return False
        return compat.plain_storage(tensor) is storage and _describe(tensor) == self._geometry


def _describe(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        return ()
    return type(tensor), geometry_of(tensor), tensor.is_conj(), tensor.is_neg(), version_of(tensor)


class Remade:
    """An input that is an output of the call before: made again when it is asked for."""

    def __init__(self, link: Link, index: int) -> None:
        self.link, self.index = link, index
        self.value: torch.Tensor | None = None

    def peek(self) -> torch.Tensor:
        """Make the input, and keep it for the group's own backward."""
        if self.value is None:
            self.link.make_outputs()
        assert self.value is not None, "the call gave fewer tensors than before"
        return self.value

    def take(self) -> torch.Tensor:
        """Make the input if it is not there, and give it up."""
        value = self.peek()
        self.value = None
        return value


class Link:
    """One call in a segment: what it was given, what it gave, and how to run it again.

    Args:
        call: The call.
        rerun: Runs the group from outside, through whatever stands around it.
        leaves: The call's inputs.
        previous: The call before in the segment; None for the first.
        on_again: Called before it is run again for its outputs.
    """

    def __init__(
        self, call: GroupCall, rerun: Run, leaves: Sequence[Any], previous: Link | None, on_again: Callable[[], None]
    ) -> None:
        self._call, self._rerun, self._on_again = call, rerun, on_again
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._needs_gradient = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        self._tensor_indexes = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._inputs: dict[int, Saved] = {}
        self._context = RunContext(leaves)
        self._marks: list[Mark] = []
        self._readers: list[weakref.ref[Remade]] = []
        self._previous = previous
        self.position = 0

    def __call__(self, *leaves: Any) -> Any:
        """Called by the checkpoint: it keeps this link alive as long as the graph lives."""
        return self._call(*leaves)

    def save(self, tensor: torch.Tensor, indexes: list[int]) -> Saved:
        """Save an input that was given at these places: as a `Remade`, if the call before made it, else as it is."""
        remade = None if self._previous is None else self._previous.reference_to(tensor)
        if remade is not None and self._previous is not None:
            self.position = self._previous.position + 1
        saved: Saved = remade or Held(tensor)
        for index in indexes:
            self._inputs[index] = saved
        return saved

    def reference_to(self, tensor: torch.Tensor) -> Remade | None:
        """A `Remade` for this tensor, if it is an output of this call; None if it is not, or if the call cannot be run again."""
        for index, mark in enumerate(self._marks):
            if mark.fits(tensor):
                remade = Remade(self, index)
                self._readers.append(weakref.ref(remade))
                return remade
        return None

    def finish(self, output: object) -> None:
        """The first run has ended."""
        self._previous = None
        if all(index in self._inputs for index in self._tensor_indexes):
            self._marks = [Mark(tensor) for tensor in compat.tensors_in(output)]

    def make_outputs(self) -> None:
        """Run the call again, and give its outputs to those who read them."""
        leaves = list(self._leaves)
        for index in self._tensor_indexes:
            tensor = self._inputs[index].peek().detach()
            leaves[index] = tensor.requires_grad_() if self._needs_gradient[index] else tensor
        self._on_again()
        with self._context.again(), torch.enable_grad(), saved_tensors_hooks(_drop, _refuse):
            outputs = list(compat.tensors_in(self._call.again(self._rerun, leaves)))
        for reader in self._readers:
            if (remade := reader()) is not None:
                remade.value = outputs[remade.index].detach()


class Segments:
    """The segments of one model: knows the last call of each thread."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def run(
        self, call: GroupCall, rerun: Run, leaves: Sequence[Any], *, length: int, on_again: Callable[[], None]
    ) -> Any:
        """Run a call whose group is in segments of `length`."""
        last: Callable[[], Link | None] = getattr(self._thread, "last", lambda: None)
        previous = last()
        if previous is not None and previous.position + 1 >= length:
            previous = None
        link = Link(call, rerun, leaves, previous, on_again)
        places: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            places.setdefault(id(leaf), []).append(index)
        with saved_tensors_hooks(lambda tensor: link.save(tensor, places.get(id(tensor), [])), take):
            output = checkpointed(link, leaves)  # type: ignore[arg-type]  # called as the call is
        places.clear()
        link.finish(output)
        self._thread.last = weakref.ref(link)
        return output


def _drop(tensor: torch.Tensor) -> None:
    del tensor


def _refuse(saved: None) -> torch.Tensor:
    del saved
    raise ActivationError(
        "a group's forward asks for gradients of its own while it is run again for the groups after it; give the groups "
        "Recompute(segment=1)"
    )
