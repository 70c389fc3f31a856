"""The memory that a backward of inductor's holds, line by line of the generated code.

The code says it all: buffers are made by `empty_strided_cuda` and by operators that return several tensors, a `del` gives them
back, and a buffer that another one takes over is named again (`buf7 = buf3; del buf3  # reuse`). Weights and tangents stay: who
calls the code holds them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
HELD = ("primals", "tangents")
"""Arguments that outlive the call."""
BLOCK_BYTES = 512
"""The allocator's smallest."""


@dataclass(frozen=True, slots=True)
class Event:
    """A buffer that comes or goes."""

    buffer: int
    num_bytes: int
    """Negative where it goes."""
    line: int
    is_argument: bool = False
    is_planned: bool = False
    """Whether inductor decides where it lies, and not an operator that returns it."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that buffers have at once, and the line that asks for the last of them."""

    num_bytes: int
    line: int


def peak_of(events: Iterable[Event]) -> Peak:
    """The first of the highest moments."""
    used, peak = 0, Peak(0, 0)
    for event in events:
        used += event.num_bytes
        if used > peak.num_bytes:
            peak = Peak(used, event.line)
    return peak


def kept_for_reuse(events: Sequence[Event]) -> list[Event]:
    """The events if each buffer that goes were kept for the next one of its size, as inductor did before it asked whether that
    raises the peak (torch 2.8 does not ask, 2.11 does). Arguments are never kept, and what operators return is new each time.
    """
    result: list[Event | None] = []
    free: dict[int, list[int]] = defaultdict(list)
    stands_for: dict[int, int] = {}
    is_argument = {event.buffer: event.is_argument for event in events if event.num_bytes > 0}
    for event in events:
        waiting = free[abs(event.num_bytes)]
        if event.num_bytes > 0 and event.is_planned and waiting:
            gone = result[waiting[-1]]
            assert gone is not None
            result[waiting.pop()] = None
            stands_for[event.buffer] = gone.buffer
        elif event.num_bytes > 0:
            result.append(event)
        else:
            if not is_argument[event.buffer]:
                waiting.append(len(result))
            result.append(Event(stands_for.get(event.buffer, event.buffer), event.num_bytes, event.line))
    return [event for event in result if event is not None]


def read_events(code: str, dtype: str) -> list[Event]:
    """Of the function `call` in generated code.

    Args:
        code: The whole file.
        dtype: Of what operators with several outputs return: their text does not say.
    """
    tree = ast.parse(code)
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call")
    return _Reader(list(_statements(call.body)), dict(_arguments(tree)), SIZES[dtype]).events


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _arguments(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names and bytes, from the example that inductor writes below the code."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _called(node.value) == "rand_strided"
        ):
            assert isinstance(node.value, ast.Call)
            dtype = next(word.value for word in node.value.keywords if word.arg == "dtype")
            yield (
                node.targets[0].id,
                _bytes(node.value.args[0], node.value.args[1], SIZES[ast.unparse(dtype).rpartition(".")[2]]),
            )


class _Reader:
    """Follows which names stand for which buffer; a buffer goes with its last name."""

    def __init__(self, statements: Sequence[ast.stmt], arguments: dict[str, int], element_bytes: int) -> None:
        self.events: list[Event] = []
        self._parts = _parts_of_tuples(statements, element_bytes)
        self._sizes: list[int] = []
        self._named: dict[str, int] = {}
        for name, num_bytes in arguments.items():
            self._make(name, num_bytes, 0, is_argument=True)
        for statement in statements:
            if isinstance(statement, ast.Delete):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self._forget(target.id, statement.lineno)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._assign(statement.targets[0].id, statement.value, statement.lineno)

    def _assign(self, name: str, value: ast.expr, line: int) -> None:
        called = _called(value)
        if called.startswith("empty_strided"):
            assert isinstance(value, ast.Call)
            size, stride, dtype = value.args
            self._make(name, _bytes(size, stride, SIZES[ast.unparse(dtype).rpartition(".")[2]]), line, is_planned=True)
        elif name in self._parts:
            for part, num_bytes in self._parts[name].items():
                self._make(part, num_bytes, line)
        elif called == "reinterpret_tensor" or isinstance(value, ast.Name):
            source = value.args[0] if isinstance(value, ast.Call) else value
            if isinstance(source, ast.Name) and source.id in self._named:
                self._named[name] = self._named[source.id]

    def _make(
        self, name: str, num_bytes: int, line: int, *, is_argument: bool = False, is_planned: bool = False
    ) -> None:
        self._named[name] = len(self._sizes)
        self._sizes.append(num_bytes)
        self.events.append(Event(self._named[name], num_bytes, line, is_argument, is_planned))

    def _forget(self, name: str, line: int) -> None:
        if name not in self._named or name.startswith(HELD):
            return
        buffer = self._named.pop(name)
        if buffer not in self._named.values():
            self.events.append(Event(buffer, -self._sizes[buffer], line))


def _parts_of_tuples(statements: Sequence[ast.stmt], element_bytes: int) -> dict[str, dict[str, int]]:
    """Of each result that is several tensors, the names that these get later, and their bytes."""
    owner = {
        statement.targets[0].id: statement.value.value.id
        for statement in statements
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Subscript)
        and isinstance(statement.value.value, ast.Name)
    }
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    for statement in statements:
        if isinstance(statement, ast.Expr) and _called(statement.value) == "assert_size_stride":
            assert isinstance(statement.value, ast.Call)
            name, size, stride = statement.value.args[:3]
            if isinstance(name, ast.Name) and name.id in owner:
                parts[owner[name.id]][name.id] = _bytes(size, stride, element_bytes)
    return parts


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _bytes(size: ast.expr, stride: ast.expr, element_bytes: int) -> int:
    sizes, strides = ast.literal_eval(size), ast.literal_eval(stride)
    last = sum((extent - 1) * step for extent, step in zip(sizes, strides, strict=True))
    return 0 if 0 in sizes else -(-(last + 1) * element_bytes // BLOCK_BYTES) * BLOCK_BYTES
