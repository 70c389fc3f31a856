"""Which blocks of a model are alike: same classes, same tensors, same settings.

Alike is decided before anything runs, and strictly: what cannot be compared (a foreign object that is not the very same
one) makes two blocks different. The only difference allowed is a block's own number, as in `layer_idx`, and only where the
block's code hands that number on (to a cache, say) without computing or deciding anything with it.
"""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.tracing.ghost.tensor import Ghost

_STANDARD = frozenset(vars(nn.Module())) | {"_hf_hook", "_is_hf_initialized", "_compiled_call_impl"}
"""The last holds an activation policy, the same for all blocks of a trace; a user's compiled code does not travel."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.memory_format)
_CACHE_STORES = frozenset({"layers", "is_updated", "key_cache", "value_cache"})
"""Attributes of caches of keys and values that a layer looks itself up in."""
_CACHE_METHODS = frozenset({"update", "get", "get_seq_length"})
"""Methods of those that take a layer's number."""
_SILENT = ("CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "RESUME")
_LOADS = ("LOAD_", "KW_NAMES", "BUILD_", "PUSH_NULL", "DICT_", "LIST_")


@dataclass(frozen=True, slots=True)
class Signature:
    """A block's description: equal for blocks that behave alike, up to `numbers`."""

    structure: tuple[Any, ...]
    numbers: tuple[tuple[type, str, int], ...]
    """Integer settings with the class and the attribute they are found in."""


def describe(block: nn.Module) -> Signature | None:
    """The signature of a block; None for one that has hooks, whose effects nobody can foresee."""
    paths = {id(module): path for path, module in block.named_modules()}
    tensors: dict[int, str] = {}
    numbers: list[tuple[type, str, int]] = []
    structure: list[Any] = []
    for path, module in block.named_modules():
        if _has_hooks(module):
            return None
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is None:
                    structure.append((path, kind, name))
                    continue
                if any(not _is_own(hook) for hook in compat.tensor_hooks(tensor)):
                    return None
                place = tensors.setdefault(id(tensor), f"{path}.{name}")
                structure.append((path, kind, name, place, _describe_tensor(tensor)))
    words = _Words(paths, tensors, numbers)
    for path, module in block.named_modules():
        settings = vars(module)
        names = settings.keys() - _STANDARD
        described = tuple((name, words.describe(settings[name], type(module), name)) for name in sorted(names))
        structure.append((path, type(module), module.training, tuple(module._modules), described))
    return Signature(tuple(structure), tuple(numbers))


def _has_hooks(module: nn.Module) -> bool:
    """Whether anything but the module's own code runs when it is called."""
    return any(getattr(module, name) for name in _HOOKS)


def without_own_numbers(signature: Signature) -> tuple[Any, ...]:
    """What is left of a signature without the numbers that its block decides nothing by: equal for blocks that are alike."""
    return signature.structure, tuple(number for number in signature.numbers if _decides_by(number[0], number[1]))


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


def _is_own(hook: Any) -> bool:
    """The tracer's own hooks, which mark gradients and update in the backward, do the same to every parameter."""
    return str(getattr(hook, "__module__", "")).startswith("lowtide.tracing.")


class _Words:
    """Describes attribute values, relative to one block."""

    def __init__(self, paths: dict[int, str], tensors: dict[int, str], numbers: list[tuple[type, str, int]]) -> None:
        self._paths = paths
        self._tensors = tensors
        self._numbers = numbers

    def describe(self, value: Any, kind: type, name: str) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        if type(value) is int:
            self._numbers.append((kind, name, value))
            return int
        if isinstance(value, Tensor):
            return "tensor", self._tensors.get(id(value), id(value))
        if isinstance(value, nn.Module):
            return "module", self._paths.get(id(value), id(value))
        if type(value) in (tuple, list, torch.Size):
            return type(value), tuple(self.describe(item, kind, name) for item in value)
        if type(value) is dict:
            return dict, tuple((key, self.describe(item, kind, name)) for key, item in value.items())
        if isinstance(value, types.MethodType):
            return "method", value.__func__, self.describe(value.__self__, kind, name)
        if isinstance(value, functools.partial):
            bound = (value.func, list(value.args), dict(value.keywords))
            return "partial", *(self.describe(part, kind, name) for part in bound)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = (cells, list(value.__defaults__ or ()), dict(value.__kwdefaults__ or {}))
            return "function", value.__code__, *(self.describe(part, kind, name) for part in parts)
        return "object", id(value)


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
