"""What is remembered of the calls of repeated blocks while a step runs: positions in the record, tensors, circumstances.

Nothing here holds a tensor of the step beyond the call it belongs to: that would change what the trace measures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import compat
from lowtide.tracing.ghost.tensor import Ghost
from lowtide.tracing.recorder import Recorder


class CannotRepeatError(Exception):
    """The step is not the repetition it seemed to be: it has to be traced in full."""


class Position(NamedTuple):
    """A moment of the trace: how much had been recorded."""

    events: int
    ops: int
    lives: int

    @classmethod
    def of(cls, recorder: Recorder) -> Position:
        """This moment."""
        return cls(len(recorder.log), len(recorder.op_names), len(recorder.lives))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCopy:
    """How to make a tensor like one that a block made."""

    index: int
    """Which of the storages born in the segment it lies in."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, ghost: Ghost, first_life: int) -> TensorCopy:
        """The description of a tensor whose storage was born at or after `first_life`."""
        inner = ghost.inner
        return cls(
            index=ghost.life.number - first_life,
            shape=tuple(inner.shape),
            stride=tuple(inner.stride()),
            offset=int(inner.storage_offset()),
            dtype=inner.dtype,
            storage_bytes=inner.untyped_storage().nbytes(),
        )

    def make(self, storage: torch.UntypedStorage) -> Tensor:
        """The meta tensor over a storage."""
        return torch.empty(0, dtype=self.dtype, device="meta").set_(storage, self.offset, self.shape, self.stride)


class Emission(NamedTuple):
    """What a block's backward leaves to the world."""

    gradient: TensorCopy | None
    """Of its input; None: the gradient it was given, passed on."""
    weights: tuple[TensorCopy | bool, ...]
    """For each weight the new `.grad`; True: the old one, added to; False: none before and after."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of one block of a run."""

    rank: int
    """Which block of the run."""
    inputs: tuple[int, ...]
    """Numbers of the lives of the tensors it was given."""
    enter: Position
    leave: Position
    is_repeated: bool
    begin: Position | None = None
    """Where its backward begins."""
    end: Position | None = None
    """Where its backward is over: where the one of the block before begins."""
    gradient: int = -1
    """Number of the life of the gradient its backward starts from."""
    grads_before: tuple[int | None, ...] = ()
    stand_ins: dict[tuple[str, int], int] = field(default_factory=dict)
    """For a repeated call, the tensors that exist: segment ("forward", "backward") and index to the life's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What the first block that was watched tells of a call's forward."""

    circumstances: tuple[Any, ...]
    output: TensorCopy
    is_tuple: bool
    """Whether the output is a tuple, of the tensor and `rest`."""
    rest: tuple[Any, ...]
    keeps: tuple[bool, ...]
    """For each input whether the block holds it afterwards."""
    keeps_output: bool
    source: int | None
    """Which input gets a gradient; None where nothing is differentiated."""

    @classmethod
    def of(
        cls, output: Any, call: Call, about: tuple[Any, ...], tensors: list[Ghost], keeps: tuple[bool, ...]
    ) -> Template | None:
        """None for a call that cannot be imitated."""
        tensor, rest = (output[0], output[1:]) if type(output) is tuple and output else (output, ())
        others: list[Ghost] = []
        described = flatten(rest, others)
        if not isinstance(tensor, Ghost) or others or "object" in str(described):
            return None
        if tensor.value() is not None or tensor._is_view():
            return None
        sources = [index for index, candidate in enumerate(tensors) if candidate.requires_grad]
        if tensor.life.number < call.enter.lives or not tensor.life.on_device or len(sources) != tensor.requires_grad:
            return None
        return cls(
            circumstances=about,
            output=TensorCopy.of(tensor, call.enter.lives),
            is_tuple=type(output) is tuple,
            rest=rest,
            keeps=keeps,
            keeps_output=compat.num_storage_owners(tensor.inner) > 1,
            source=sources[0] if sources else None,
        )


@dataclass(slots=True, eq=False)
class Turn:
    """One pass over a run: a forward through its blocks, and the backward through them."""

    is_open: bool
    """Whether all calls so far were in order."""
    calls: list[Call] = field(default_factory=list)
    """By rank."""
    last_node: int = -1
    template: Template | None = None
    emission: Emission | None = None


def circumstances(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Ghost]]:
    """All that a block's behaviour in a call can depend on besides the block itself, as a comparable value; and the tensors."""
    tensors: list[Ghost] = []
    arguments = flatten((args, kwargs), tensors)
    lives = [tensor.life.number for tensor in tensors]
    is_cast = torch.is_autocast_enabled("ghost")
    value = (
        arguments,
        tuple(_describe(tensor) for tensor in tensors),
        tuple(lives.index(life) for life in lives),  # which arguments share a storage
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_cast and torch.get_autocast_dtype("ghost"),
        is_cast and torch.is_autocast_cache_enabled(),
        compat.has_saved_tensor_hooks(),
        _caller(),
    )
    return value, tensors


def flatten(value: Any, tensors: list[Ghost]) -> Any:
    """A comparable value for a nest of arguments; the ghosts in it are added to `tensors`."""
    if isinstance(value, Ghost):
        tensors.append(value)
        return Ghost
    if isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | None):
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return type(value), *(flatten(item, tensors) for item in value)
    if type(value) is dict:
        return dict, *((key, flatten(item, tensors)) for key, item in value.items())
    return "object", id(value)


def _describe(tensor: Ghost) -> tuple[Any, ...]:
    # A block may look at values: where there are some, only the very same tensor, not written to since, is as good.
    is_known = tensor.value() is not None
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor._is_view(),
        tensor.life.requested_bytes,
        (id(tensor), tensor.life.number, tensor.life.version) if is_known else None,
    )


def _caller() -> tuple[str, int]:
    """The line that calls the block: operators of blocks made of torch's own modules are attributed to it."""
    frame = sys._getframe(4)
    return frame.f_code.co_filename, frame.f_lineno


def owners(tensor: Ghost) -> tuple[int, int, int]:
    """How many hold a tensor, in the three ways there are: a count that grew in a call means that the block keeps it."""
    return compat.reference_count(tensor), compat.num_storage_owners(tensor.inner), sys.getrefcount(tensor)
