"""What the compiler would make of a group's call: its graphs, parted under a budget, from the forms of its tensors alone.

The group's code is traced as one graph of forward and backward on tensors without values, and torch's own partitioner cuts
it, as inside of `torch.compile`. One capture serves all groups that are alike and are called alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import TraceError
from lowtide.partition.program import Program
from lowtide.partition.reading import Partition, read_partition
from lowtide.partition.scheduling import schedule
from lowtide.tracing import block_signature
from lowtide.tracing.attention_rules import enabled_backends
from lowtide.tracing.card_attention import CardAttention
from lowtide.tracing.ghost.attention import Attention
from lowtide.tracing.ghost.tensor import Ghost

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

TENSOR = object()
"""Stands for a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A group's call, compiled in thought."""

    partition: Partition
    forward: Program
    """As compiled code would run it."""
    backward: Program
    needs_gradient: tuple[bool, ...]
    """For each tensor that the group returns."""
    others: tuple[Any, ...]
    """What the group returns, flat; `TENSOR` in the place of each tensor."""
    structure: Any
    """Of what it returns."""


@dataclass(frozen=True, slots=True)
class GroupCall:
    """A call of a group, taken apart."""

    module: nn.Module
    path: str
    weights: dict[str, Tensor]
    """Parameters and buffers, by their names in the module."""
    leaves: list[Any]
    """Its arguments, flat."""
    structure: Any

    @classmethod
    def of(cls, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupCall:
        """A call with these arguments."""
        leaves, structure = compat.flatten((args, kwargs))
        weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return cls(module, path, weights, leaves, structure)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


class Captures:
    """The captures of one trace."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._made: list[tuple[tuple[Any, ...], Captured]] = []

    def of(self, call: GroupCall, share: float) -> Captured:
        """The capture of a call, made the first time.

        Raises:
            TraceError: The group cannot be traced as one graph, or its call goes beyond what is modelled.
        """
        key = (share, *_circumstances(call))
        # A list, because what a signature is made of can be compared, and not always hashed.
        for known, captured in self._made:
            if known == key:
                return captured
        made = self._capture(call, share)
        self._made.append((key, made))
        return made

    def _capture(self, call: GroupCall, share: float) -> Captured:
        _refuse_objects(call)
        returned = _Returned()
        with compat.without_modes(), CardAttention(self._attention), _explained(call):
            weights = [_form(weight) for weight in call.weights.values()]
            joint = compat.trace_joint_graph(_as_function(call, returned), weights, [_form(t) for t in call.inputs])
            partition = read_partition(compat.partition(joint, share))
        _check(call, partition, returned)
        return Captured(
            partition=partition,
            forward=schedule(partition.forward),
            backward=schedule(partition.backward, freeable=partition.saved),
            needs_gradient=tuple(returned.needs_gradient),
            others=tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in returned.leaves),
            structure=returned.structure,
        )


class _Returned:
    """What the group returned when it was traced."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.needs_gradient: list[bool] = []


class _Plain(nn.Module):
    """A module called in its own way, past whatever has taken its calls: that is who asks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return compat.plain_call(self.module)(*args, **kwargs)


def _as_function(call: GroupCall, returned: _Returned) -> Any:
    plain = _Plain(call.module)

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = {f"module.{name}": tensor for name, tensor in zip(call.weights, tensors, strict=False)}
        inputs = iter(tensors[len(call.weights) :])
        leaves = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = compat.unflatten(leaves, call.structure)
        out = torch.func.functional_call(plain, named, args, kwargs)
        returned.leaves, returned.structure = compat.flatten(out)
        found = [leaf for leaf in returned.leaves if isinstance(leaf, Tensor)]
        returned.needs_gradient = [tensor.requires_grad for tensor in found]
        return tuple(found)

    return forward


def _form(tensor: Tensor) -> Tensor:
    inner = tensor.inner if isinstance(tensor, Ghost) else tensor
    form = torch.empty_strided(inner.size(), inner.stride(), dtype=inner.dtype, device="meta")
    return form.requires_grad_(tensor.requires_grad)


def _circumstances(call: GroupCall) -> tuple[Any, ...]:
    """All that a capture can depend on, as a comparable value."""
    signature = block_signature.describe(call.module)
    group = ("module", id(call.module)) if signature is None else block_signature.without_own_numbers(signature)
    arguments = tuple(_describe(leaf) for leaf in call.leaves)
    return group, arguments, call.structure, frozenset(enabled_backends())


def _describe(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf


def _refuse_objects(call: GroupCall) -> None:
    """Refuse a call with objects that the group could write to: tensors of the capture must not stay behind in them."""
    for leaf in call.leaves:
        if not isinstance(leaf, _PLAIN):
            advice = "; switch caches off (use_cache=False)" if "Cache" in type(leaf).__name__ else ""
            raise _refusal(call, f"it is given a {type(leaf).__name__}, which it may write to{advice}")


def _check(call: GroupCall, partition: Partition, returned: _Returned) -> None:
    """Refuse what the graphs do not say all about."""
    num_given = len(call.weights) + len(call.inputs)
    if len(partition.kept) != num_given or len(partition.gradients) != num_given:
        raise _refusal(
            call, f"its graph has {len(partition.kept)} inputs for {num_given} tensors, random state among them"
        )
    if len(partition.returned) != len(returned.needs_gradient):
        raise _refusal(call, "it writes to its arguments, which the compiler returns to its caller")
    for result in partition.returned:
        if result is None or result.buffer in partition.kept:
            raise _refusal(call, "it returns one of its arguments, or a view of it")


@contextlib.contextmanager
def _explained(call: GroupCall) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch's tracer and the group's own code may raise anything
        text = str(error).strip().splitlines()
        raise _refusal(call, f"{type(error).__name__}: {text[0] if text else ''}") from error


def _refusal(call: GroupCall, reason: str) -> TraceError:
    return TraceError(
        f"{type(call.module).__name__} at {call.path or 'the top'} has a compile budget, and cannot be captured as one graph of "
        f"forward and backward ({reason}); its memory is known only once it is compiled: use lowtide.observe on a machine with "
        "a GPU, or another policy",
        module=call.path,
    )
