"""From the two graphs of a partition to programs: buffers instead of tensors, views as other names of a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from lowtide import compat
from lowtide.tracing.compiled.program import KernelCall, Program, Step, Work

Buffers = str | tuple[str, ...]
"""The buffer of a node's result, or those of its several results."""

LOWERED_POINTWISE = ("aten.slice_scatter", "aten.select_scatter", "aten.constant_pad_nd")
"""Operators that inductor compiles to pointwise code, though the partitioner does not list them."""

MAX_FUSED_PARTS = 8
"""Parts of a concatenation that pointwise code reads, at most."""

STRAIGHT_VIEWS = ("aten.view", "aten.unsqueeze", "aten.squeeze", "aten.alias")
"""Views that leave every element where it is."""

BIASED = {"aten._scaled_dot_product_efficient_attention": 3, "aten._scaled_dot_product_efficient_attention_backward": 4}
"""Attention that takes a bias, by which of its arguments."""

BIAS_ALIGNMENT = 8
"""Elements that a row of a bias begins at a multiple of."""

HEAVY = ("aten.exp", "aten.log", "aten.log10", "aten.log1p", "aten.log2", "aten.sigmoid", "aten.tanh")
"""What inductor does not compute twice on a processor."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A tensor that a program returns: a buffer as its caller sees it."""

    buffer: str
    form: Tensor
    """Size, strides and type, on the meta device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A forward and a backward, with one name for each buffer in both."""

    forward: Program
    backward: Program
    kept: tuple[str, ...]
    """Inputs of the forward: weights, buffers and the batch, which live through both."""
    tangents: tuple[str, ...]
    """The gradients of the forward's outputs, zeros for all but the loss; autograd holds them as long as the backward runs."""
    saved: frozenset[str]
    """What the forward makes and the backward reads."""
    donated: frozenset[str]
    """The part of it that the caller does not get: the backward may write over it. Logits are also returned."""
    returned: tuple[Returned | None, ...]
    """What the caller of the forward gets; None for what is no tensor."""
    gradients: tuple[Returned | None, ...]
    """The gradient of each weight and input in turn; None where there is none."""
    held: frozenset[str]
    """Inputs of the forward that the backward reads again."""
    forms: Mapping[str, Tensor]
    """The form of each buffer, on the meta device."""

    @property
    def saved_bytes(self) -> int:
        """Bytes of what is saved; the forward's inputs are not counted, they live anyway."""
        return sum(self.forward.sizes[buffer] for buffer in self.saved)


def read_partition(graphs: compat.ForwardBackward) -> Partition:
    """The programs of a partition."""
    forward = _Reader("", {})
    returned = forward.read(graphs.forward)
    num_outputs = graphs.num_outputs
    # What is saved of a view is the buffer behind it: of a transposed weight, the weight.
    saved = {result.name: result.buffers for result in returned[num_outputs:]}
    backward = _Reader("backward ", saved)
    gradients = backward.read(graphs.backward)
    sizes = {**forward.sizes, **backward.sizes}
    kept = tuple(dict.fromkeys(forward.inputs))
    made = frozenset(_flat(saved.values())) - frozenset(kept)
    return Partition(
        forward=Program(
            inputs=kept,
            steps=tuple(forward.steps),
            outputs=frozenset(_flat(result.buffers for result in returned)),
            sizes=sizes,
        ),
        backward=Program(
            inputs=tuple(dict.fromkeys((*kept, *backward.inputs))),
            steps=tuple(backward.steps),
            outputs=frozenset(_flat(result.buffers for result in gradients)),
            sizes=sizes,
        ),
        kept=kept,
        tangents=tuple(buffer for buffer in backward.inputs if buffer in backward.sizes),
        saved=made,
        donated=made - frozenset(_flat(result.buffers for result in returned[:num_outputs])),
        returned=tuple(result.as_returned() for result in returned[:num_outputs]),
        gradients=tuple(result.as_returned() for result in gradients),
        held=frozenset(_flat(saved.values())) & frozenset(kept),
        forms={**forward.forms, **backward.forms},
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """One of the values that a graph returns."""

    name: str
    buffers: Buffers
    value: object

    def as_returned(self) -> Returned | None:
        if not isinstance(self.value, Tensor) or not isinstance(self.buffers, str):
            return None
        return Returned(self.buffers, _form(self.value))


class _Reader:
    """Goes through one graph."""

    def __init__(self, prefix: str, known: Mapping[str, Buffers]) -> None:
        # What is computed again in the backward has its name from the forward, and is another buffer.
        self._prefix, self._known = prefix, known
        self._buffers: dict[fx.Node, Buffers] = {}
        self._turned: set[fx.Node] = set()
        self._returned: set[fx.Node] = set()
        self._formulas: set[Buffers] = set()
        self._fusible = compat.fusible_operators()
        self.inputs: list[str] = []
        self.steps: list[Step] = []
        self.sizes: dict[str, int] = {}
        self.forms: dict[str, Tensor] = {}

    def read(self, graph: fx.Graph) -> list[_Result]:
        """Note down inputs, steps and sizes; returns the outputs."""
        self._returned = {_viewed(node) for node in _returned(graph) if isinstance(node, fx.Node)}
        for node in graph.nodes:
            match node.op:
                case "placeholder":
                    known = self._known.get(node.name)
                    self._buffers[node] = self._begin(node) if known is None else known
                    self.inputs += _flat([self._buffers[node]])
                case "call_function":
                    self._buffers[node] = self._call(node)
                case "get_attr":
                    # A constant that the trace came upon: it lives with the graph, and is no part of the step.
                    self._buffers[node] = ()
        # The gradient of an input that needs none is returned as None.
        return [
            _Result(node.name, self._buffers[node], node.meta.get("val"))
            if isinstance(node, fx.Node)
            else _Result("", (), None)
            for node in _returned(graph)
        ]

    def _call(self, node: fx.Node) -> Buffers:
        copied = self._copied_bias(node)
        arguments = [copied.get(argument, self._buffers[argument]) for argument in node.all_input_nodes]
        if node.target is getitem:
            index = node.args[1]
            assert isinstance(index, int), "results are numbered"
            # The parts of a view share its buffer.
            if node.all_input_nodes[0] in self._turned:
                self._turned.add(node)
            return arguments[0][index] if isinstance(arguments[0], tuple) and arguments[0] else arguments[0]
        if compat.is_view(node.target) and arguments:
            if _packet(node) not in STRAIGHT_VIEWS or node.all_input_nodes[0] in self._turned:
                self._turned.add(node)
            return arguments[0]
        written_over = compat.writes_argument(node.target) and arguments
        buffers = arguments[0] if written_over else self._begin(node)
        reads = tuple(dict.fromkeys(_flat(arguments)))
        writes = () if written_over else _flat([buffers])
        turned = frozenset(_flat(self._buffers[of] for of in node.all_input_nodes if of in self._turned))
        if reads or writes:
            work = self._work(node)
            if work is Work.POINTWISE and node not in self._returned:
                self._formulas.add(buffers)
            self.steps.append(
                Step(
                    self._prefix + node.name,
                    reads,
                    writes,
                    work,
                    turned,
                    is_heavy=_packet(node) in HEAVY,
                    extent=_num_elements(node) if work is Work.POINTWISE else _num_read(node),
                    over_rows=_is_over_rows(node),
                    operator=_packet(node),
                    call=_kernel_call(node) if work is Work.KERNEL else None,
                )
            )
        return buffers

    def _copied_bias(self, node: fx.Node) -> dict[fx.Node, Buffers]:
        """Where attention finds its bias, if inductor makes a copy for it.

        The kernel wants rows that are aligned in memory. Inductor does not ask how a bias that is no buffer yet, only a formula,
        would be written: each attention gets a copy, so that what the graph has as one tensor, from the forward's attention
        to the backward's, is computed twice and does not wait in between. What the bias is repeated along, such as the batch,
        takes no memory in the forward's copy, other than within a matrix, and is written out in the backward's. A bias that was
        padded and cut has aligned rows as it is: the backward's attention has it written that way, and reads the cut.
        """
        bias = node.args[BIASED[_packet(node)]] if _packet(node) in BIASED else None
        # What is an input, a constant, the result of a kernel or an output is a buffer.
        if not isinstance(bias, fx.Node) or self._buffers[bias] not in self._formulas:
            return {}
        value, name = bias.meta["val"], f"{self._prefix}{node.name} bias"
        sizes = _bias_sizes(value, is_written_out=_packet(node).endswith("_backward"))
        if not sizes:
            return {}
        num_elements = math.prod(sizes)
        self.sizes[name] = num_elements * value.itemsize
        self.forms[name] = torch.empty(sizes, dtype=value.dtype, device="meta")
        reads = _flat([self._buffers[bias]])
        turned = frozenset(reads if bias in self._turned else ())
        self.steps.append(
            Step(name, reads, (name,), Work.POINTWISE, turned, extent=num_elements, operator="aten.clone")
        )
        return {bias: name}

    def _begin(self, node: fx.Node) -> Buffers:
        """New buffers for a node's results."""
        name, value = self._prefix + node.name, node.meta.get("val")
        if isinstance(value, Tensor):
            self.sizes[name] = value.nbytes
            self.forms[name] = _form(value)
            return name
        if isinstance(value, tuple | list):
            parts = tuple(f"{name}.{index}" for index in range(len(value)))
            self.sizes |= {part: getattr(of, "nbytes", 0) for part, of in zip(parts, value, strict=True)}
            self.forms |= {part: _form(of) for part, of in zip(parts, value, strict=True) if isinstance(of, Tensor)}
            return parts
        # A number.
        return ()

    def _work(self, node: fx.Node) -> Work:
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in self._fusible and _packet(node) not in LOWERED_POINTWISE and not self._is_fused_cat(node):
            return Work.KERNEL
        return Work.REDUCTION if _num_elements(node) < _num_read(node) else Work.POINTWISE

    def _is_fused_cat(self, node: fx.Node) -> bool:
        """Whether parts are put together inside of their readers, as inductor does for few parts and pointwise readers."""
        parts = node.args[0] if node.args else ()
        if _packet(node) != "aten.cat" or not isinstance(parts, tuple | list) or len(parts) > MAX_FUSED_PARTS:
            return False
        return all(
            getattr(user.target, "overloadpacket", None) in self._fusible or _packet(user) in LOWERED_POINTWISE
            for user in node.users
        )


def _returned(graph: fx.Graph) -> tuple[Any, ...]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    (values,) = output.args
    assert isinstance(values, tuple | list), "a partition returns several values"
    return tuple(values)


def _viewed(node: fx.Node) -> fx.Node:
    """The node whose buffer a node is a view of."""
    while compat.is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _packet(node: fx.Node) -> str:
    """The operator without its overload: `aten.view`."""
    return str(getattr(node.target, "overloadpacket", ""))


def _flat(results: Iterable[Buffers]) -> tuple[str, ...]:
    return tuple(name for buffers in results for name in ((buffers,) if isinstance(buffers, str) else buffers))


def _bias_sizes(value: Tensor, *, is_written_out: bool) -> list[int]:
    """Sizes of the copy that attention gets of a bias; empty where it reads what the bias was cut from."""
    *leading, rows, columns = value.shape
    aligned = -(-columns // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    if is_written_out:
        return [*leading, rows, columns] if columns == aligned else []
    shared = [size for size, stride in zip(leading, value.stride(), strict=False) if stride]
    return [*shared, rows, aligned]


def _kernel_call(node: fx.Node) -> KernelCall:
    args = map_arg(node.args, lambda argument: _forms(argument.meta.get("val")))
    return KernelCall(node.target, args, _forms(node.meta.get("val")))


def _forms(value: Any) -> Any:  # tensors, numbers and tuples of them, as the graph has them
    if isinstance(value, tuple | list):
        return type(value)(_forms(item) for item in value)
    return _form(value) if isinstance(value, Tensor) else value


def _form(value: Tensor) -> Tensor:
    """A tensor like one of the graph, without the mode that belongs to it."""
    size, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.as_strided(size, stride, int(value.storage_offset())) if value.numel() else empty.reshape(size)


def _num_read(node: fx.Node) -> int:
    return max((_num_elements(argument) for argument in node.all_input_nodes), default=0)


def _is_over_rows(node: fx.Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not isinstance(dims, tuple | list) or not isinstance(value, Tensor):
        return True
    return -1 in dims or value.dim() - 1 in dims


def _num_elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return sum(part.numel() for part in values if isinstance(part, Tensor))
