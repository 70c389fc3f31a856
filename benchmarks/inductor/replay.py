"""The memory that inductor's generated code holds, line by line.

The code says it all: buffers are made by `empty_strided_cuda` and by operators that return several tensors, a `del` gives them
back, and a buffer that another one takes over is named again (`buf7 = buf3; del buf3  # reuse`). Weights and tangents stay: who
calls the code holds them. What the reader does not know is an error, since a number that is too small would not be noticed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
HELD = ("primals", "tangents")
"""Arguments that outlive the call."""
BLOCK_BYTES = 512
"""What the allocator rounds each request up to; what it adds to large ones is left out."""
WITHOUT_MEMORY = ("get_raw_stream",)
"""Calls whose result is no tensor."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of memory: its elements from the first to the last, those between rows with them."""

    dtype: str
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """As the allocator hands it out."""
        return -(-self.num_elements * ELEMENT_BYTES[self.dtype] // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Event:
    """A buffer that comes or goes."""

    buffer: int
    extent: Extent
    comes: bool
    is_argument: bool = False
    is_planned: bool = False
    """Whether inductor decides where it lies, and not an operator that returns it."""

    @property
    def num_bytes(self) -> int:
        """Negative where it goes."""
        return self.extent.num_bytes if self.comes else -self.extent.num_bytes


def peak_bytes(events: Iterable[Event]) -> int:
    """The most that buffers have at once."""
    used = highest = 0
    for event in events:
        used += event.num_bytes
        highest = max(highest, used)
    return highest


def read_events(code: str, dtype: str) -> list[Event]:
    """The events of the function `call` in generated code.

    Args:
        code: The whole file.
        dtype: The type that operators with several outputs return: their text does not say.

    Raises:
        ValueError: The code has a statement that is not known.
    """
    tree = ast.parse(code)
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call")
    return _Reader(list(_statements(call.body)), dict(_arguments(tree)), dtype).events


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        elif isinstance(statement, ast.Assign | ast.Delete | ast.Expr | ast.Return):
            yield statement
        else:
            raise _unknown(statement)


def _arguments(tree: ast.Module) -> Iterator[tuple[str, Extent]]:
    """By name, from the example that inductor writes below the code."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _called(node.value) == "rand_strided"
        ):
            assert isinstance(node.value, ast.Call)
            dtype = next(word.value for word in node.value.keywords if word.arg == "dtype")
            yield node.targets[0].id, _extent(node.value.args[0], node.value.args[1], _name_of(dtype))


class _Reader:
    """Follows which names stand for which buffer; a buffer goes with its last name."""

    def __init__(self, statements: Sequence[ast.stmt], arguments: dict[str, Extent], dtype: str) -> None:
        self.events: list[Event] = []
        self._parts = _parts_of_tuples(statements, dtype)
        self._made: list[Event] = []
        self._named: dict[str, int] = {}
        for statement in statements:
            if isinstance(statement, ast.Delete):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self._forget(target.id)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
                for target in statement.targets[0].elts:  # the arguments, by `... = args`
                    if not isinstance(target, ast.Name) or target.id not in arguments:
                        raise _unknown(statement)
                    self._make(target.id, arguments[target.id], is_argument=True)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._assign(statement.targets[0].id, statement)

    def _assign(self, name: str, statement: ast.Assign) -> None:
        value = statement.value
        called = _called(value)
        if called.startswith("empty_strided"):
            assert isinstance(value, ast.Call)
            size, stride, dtype = value.args
            self._make(name, _extent(size, stride, _name_of(dtype)), is_planned=True)
        elif name in self._parts:
            for part, extent in self._parts[name].items():
                self._make(part, extent)
        elif called == "reinterpret_tensor" or isinstance(value, ast.Name):
            source = value.args[0] if isinstance(value, ast.Call) else value
            if not isinstance(source, ast.Name) or source.id not in self._named:
                raise _unknown(statement)
            self._named[name] = self._named[source.id]
        elif called not in WITHOUT_MEMORY and not isinstance(value, ast.Subscript):
            raise _unknown(statement)

    def _make(self, name: str, extent: Extent, *, is_argument: bool = False, is_planned: bool = False) -> None:
        event = Event(len(self._made), extent, comes=True, is_argument=is_argument, is_planned=is_planned)
        self._named[name] = event.buffer
        self._made.append(event)
        self.events.append(event)

    def _forget(self, name: str) -> None:
        if name not in self._named or name.startswith(HELD):
            return
        buffer = self._named.pop(name)
        if buffer not in self._named.values():
            made = self._made[buffer]
            self.events.append(Event(buffer, made.extent, comes=False, is_argument=made.is_argument))


def _parts_of_tuples(statements: Sequence[ast.stmt], dtype: str) -> dict[str, dict[str, Extent]]:
    """The names that the tensors of each result of several get later."""
    taken_from: dict[str, tuple[str, int]] = {}
    operators: dict[str, str] = {}
    parts: dict[str, dict[str, Extent]] = defaultdict(dict)
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
            operators[name] = _called(value)
            if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
                taken_from[name] = value.value.id, ast.literal_eval(value.slice)
        elif isinstance(statement, ast.Expr) and _called(statement.value) == "assert_size_stride":
            assert isinstance(statement.value, ast.Call)
            checked, size, stride = statement.value.args[:3]
            if isinstance(checked, ast.Name) and checked.id in taken_from:
                owner, place = taken_from[checked.id]
                # Beside its result attention returns the logarithms of its sums, in fp32.
                is_sums = place == 1 and operators[owner].endswith("_efficient_attention.default")
                parts[owner][checked.id] = _extent(size, stride, "float32" if is_sums else dtype)
    if missing := sorted(name for name, (owner, _) in taken_from.items() if name not in parts[owner]):
        raise ValueError(f"the code does not say how large {', '.join(missing)} are: let inductor write size_asserts")
    return parts


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _name_of(dtype: ast.expr) -> str:
    return ast.unparse(dtype).rpartition(".")[2]


def _extent(size: ast.expr, stride: ast.expr, dtype: str) -> Extent:
    sizes, strides = ast.literal_eval(size), ast.literal_eval(stride)
    last = sum((extent - 1) * step for extent, step in zip(sizes, strides, strict=True))
    return Extent(dtype, 0 if 0 in sizes else last + 1)


def _unknown(statement: ast.stmt) -> ValueError:
    return ValueError(
        f"line {statement.lineno} of the generated code is not known here: {ast.unparse(statement)[:200]}"
    )
