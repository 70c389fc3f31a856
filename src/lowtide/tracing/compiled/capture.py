"""What the compiler would make of a group's call: graphs of its forward and backward, from shapes and types alone.

The group's code is traced as one graph of forward and backward on tensors without values, and torch's own partitioner cuts
it, as inside of `torch.compile`. One capture serves all groups that are alike and are called alike.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import TraceError
from lowtide.tracing.attention.rules import enabled_backends
from lowtide.tracing.attention.use import Attention, TargetAttention
from lowtide.tracing.compiled.partition import Partition, read_partition
from lowtide.tracing.compiled.program import Program
from lowtide.tracing.compiled.schedule import schedule
from lowtide.tracing.ghost.tensor import Ghost

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

TENSOR = object()
"""Stands for a tensor."""
_STANDARD = frozenset(vars(nn.Module())) | {"_hf_hook", "_is_hf_initialized", "_compiled_call_impl"}
"""The last holds an activation policy, the same for all blocks of a trace; a user's compiled code does not travel."""
_PLAIN_SETTINGS = (bool, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.memory_format)
_CACHE_STORES = frozenset({"layers", "is_updated", "key_cache", "value_cache"})
"""Attributes of caches of keys and values that a layer looks itself up in."""
_CACHE_METHODS = frozenset({"update", "get", "get_seq_length"})
"""Methods of those that take a layer's number."""
_SILENT = ("CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "RESUME")
_LOADS = ("LOAD_", "KW_NAMES", "BUILD_", "PUSH_NULL", "DICT_", "LIST_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What compiling a group's call would give."""

    partition: Partition
    forward: Program
    """As compiled code would run it."""
    backward: Program
    needs_gradient: tuple[bool, ...]
    """For each tensor that the group returns."""
    others: tuple[Any, ...]
    """What the group returns, flat; `TENSOR` in the place of each tensor."""
    structure: Any
    """The nesting of what it returns, for `compat.unflatten`."""


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
        # All that a capture can depend on.
        group = signature_of(call.module) or ("module", id(call.module))
        arguments = tuple(_describe(leaf) for leaf in call.leaves)
        key = (share, group, arguments, call.structure, frozenset(enabled_backends()))
        # A list, because what a signature is made of can be compared, and not always hashed.
        for known, captured in self._made:
            if known == key:
                return captured
        made = self._capture(call, share)
        self._made.append((key, made))
        return made

    def _capture(self, call: GroupCall, share: float) -> Captured:
        for leaf in call.leaves:
            # The group could write to any other object, and tensors of the capture must not stay behind in it.
            if not isinstance(leaf, _PLAIN):
                advice = "; switch caches off (use_cache=False)" if "Cache" in type(leaf).__name__ else ""
                raise _refusal(call, f"it is given a {type(leaf).__name__}, which it may write to{advice}")
        returned = _Returned()
        with compat.without_modes(), TargetAttention(self._attention), _explained(call):
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


@dataclass(slots=True)
class _Returned:
    """What the group returned when it was traced."""

    leaves: list[Any] = field(default_factory=list)
    structure: Any = None
    needs_gradient: list[bool] = field(default_factory=list)


class _Plain(nn.Module):
    """Calls a module's own forward, past the policy that has taken over its calls."""

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


def _describe(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf


def _check(call: GroupCall, partition: Partition, returned: _Returned) -> None:
    """Refuse a call that does more than its graphs say."""
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


def signature_of(block: nn.Module) -> tuple[Any, ...] | None:
    """A block's description, equal for blocks that behave alike; None for one that has hooks, whose effects cannot be foreseen.

    Alike is decided before anything runs, and strictly: what cannot be compared (a foreign object that is not the very same
    one) makes two blocks different. The only difference allowed is a block's own number, as in `layer_idx`, and only where
    the block's code hands that number on (to a cache, say) without computing or deciding anything with it.
    """
    paths = {id(module): path for path, module in block.named_modules()}
    tensors: dict[int, str] = {}
    structure: list[Any] = []
    for path, module in block.named_modules():
        if compat.has_module_hooks(module):
            return None
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is None:
                    structure.append((path, kind, name))
                    continue
                # The tracer's own hooks, which mark gradients and update in the backward, do the same to every parameter.
                makers = [str(getattr(hook, "__module__", "")) for hook in compat.tensor_hooks(tensor)]
                if not all(maker.startswith("lowtide.tracing.") for maker in makers):
                    return None
                place = tensors.setdefault(id(tensor), f"{path}.{name}")
                structure.append((path, kind, name, place, _describe_tensor(tensor)))

    def describe(value: Any, kind: type, name: str) -> Any:
        """The value of a setting, relative to the block."""
        if isinstance(value, _PLAIN_SETTINGS):
            return type(value), value
        if type(value) is int:
            return int, value if _decides_by(kind, name) else None
        if isinstance(value, Tensor):
            return "tensor", tensors.get(id(value), id(value))
        if isinstance(value, nn.Module):
            return "module", paths.get(id(value), id(value))
        if type(value) in (tuple, list, torch.Size):
            return type(value), tuple(describe(item, kind, name) for item in value)
        if type(value) is dict:
            return dict, tuple((key, describe(item, kind, name)) for key, item in value.items())
        if isinstance(value, types.MethodType):
            return "method", value.__func__, describe(value.__self__, kind, name)
        if isinstance(value, functools.partial):
            held = (value.func, list(value.args), dict(value.keywords))
            return "partial", *(describe(part, kind, name) for part in held)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = (cells, list(value.__defaults__ or ()), dict(value.__kwdefaults__ or {}))
            return "function", value.__code__, *(describe(part, kind, name) for part in parts)
        return "object", id(value)

    for path, module in block.named_modules():
        settings = vars(module)
        names = sorted(settings.keys() - _STANDARD)
        described = tuple((name, describe(settings[name], type(module), name)) for name in names)
        structure.append((path, type(module), module.training, tuple(module._modules), described))
    return tuple(structure)


def _describe_tensor(tensor: Tensor) -> tuple[Any, ...]:
    known = tensor.value() if isinstance(tensor, Ghost) else None
    values = None if known is None else known.get()
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        type(tensor),
        None if values is None else values.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
    )


@functools.cache
def _codes_of(kind: type) -> frozenset[types.CodeType]:
    """The code of a class's own methods, decorated and nested ones included."""
    found: set[types.CodeType] = set()

    def visit(function: types.FunctionType) -> None:
        stack = [function.__code__]
        while stack:
            code = stack.pop()
            found.add(code)
            stack += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for cell in function.__closure__ or ():  # a decorator keeps the function itself in one
            if _holds_function(cell) and cell.cell_contents.__code__ not in found:
                visit(cell.cell_contents)

    for base in kind.__mro__:
        if base not in (nn.Module, object):
            for name, function in vars(base).items():
                if isinstance(function, types.FunctionType) and name not in ("__init__", "extra_repr"):
                    visit(function)
    return frozenset(found)


@functools.cache
def _decides_by(kind: type, name: str) -> bool:
    """Whether a method of the class does anything with `self.name` but looking itself up in a cache."""
    return any(name in code.co_names and _branches(code, name) for code in _codes_of(kind))


def _holds_function(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:  # an empty cell
        return False


def _branches(code: types.CodeType, name: str) -> bool:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    for position, instruction in enumerate(instructions):
        if instruction.argval != name or instruction.opname in ("LOAD_CONST", "KW_NAMES"):
            continue
        if not instruction.opname.startswith("LOAD_ATTR") or position + 1 == len(instructions):
            return True
        following = instructions[position + 1]
        if following.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") or following.argrepr == "[]":
            # What is looked into was loaded just before `self` was.
            if position < 2 or instructions[position - 2].argval not in _CACHE_STORES:
                return True
        elif not _is_argument(instructions, position):
            return True
    return False


def _is_argument(instructions: list[dis.Instruction], position: int) -> bool:
    """Whether what is loaded at a position goes into the call of one of a cache's methods."""
    for later in instructions[position + 1 :]:
        if later.opname.startswith("CALL"):
            break
        if not later.opname.startswith(_LOADS):
            return False
    for earlier in reversed(instructions[: position - 1]):
        if earlier.opname == "LOAD_METHOD" or (earlier.opname == "LOAD_ATTR" and earlier.argval in _CACHE_METHODS):
            return earlier.argval in _CACHE_METHODS
        if not earlier.opname.startswith(_LOADS):
            return False
    return False
