"""Autograd: nodes, gradient hooks, versions, and what graphs hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

SavedTensor = torch._C._autograd.SavedTensor
"""What a node of a graph, or a checkpoint, keeps for the backward: a tensor, or what a hook packed it into."""


def is_autograd_holder(kind: type) -> bool:
    """Whether `autograd_references` has something to say about objects of this type."""
    return issubclass(kind, torch.Tensor | torch.autograd.graph.Node | SavedTensor)


def autograd_references(holder: object) -> list[object]:
    """What a tensor, an autograd node or a saved tensor keeps alive from C++, where the collector cannot see it.

    For a tensor: its node, its gradient, the base it is a view of, its indices and values. For a node: the nodes before
    it, the leaf it accumulates into, what it saved for the backward. Packed values (`saved_tensors_hooks`) come as they
    were packed together with their unpack hook; nothing is unpacked, because that may copy or recompute.
    """
    if isinstance(holder, torch.Tensor):
        # A subclass would get to see these attribute reads through __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            return _tensor_references(holder)
    if isinstance(holder, SavedTensor):
        return _saved_references(holder)
    references = [function for function, _ in getattr(holder, "next_functions", ())]
    references.append(getattr(holder, "variable", None))
    for name in dir(type(holder)):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(holder, name)
            except RuntimeError:  # a list of saved tensors that the backward has freed already
                continue
            for entry in saved if isinstance(saved, list | tuple) else (saved,):
                references += _saved_references(entry)
    return [reference for reference in references if reference is not None]


def _saved_references(saved: Any) -> list[object]:  # Any: torch's stub of SavedTensor lacks both
    try:
        return [reference for reference in (saved.data, saved.unpack_hook) if reference is not None]
    except RuntimeError:  # packed by hooks of C++, or freed by the backward
        return []


def _tensor_references(tensor: torch.Tensor) -> list[object]:
    references: list[object] = [tensor.grad_fn, tensor._base]
    if tensor.is_leaf or tensor.retains_grad:  # reading it elsewhere warns
        references.append(tensor.grad)
    if tensor.layout is torch.sparse_coo:
        references += (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        references += (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        references += (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return [reference for reference in references if reference is not None]


def next_node_number() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_node_number() -> int | None:
    """The sequence number of the autograd node that runs in this thread, None outside of any."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any]:
    """The hooks that run when a parameter's gradient is complete, by number: the dictionary itself, {} without any."""
    hooks: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


def register_first_gradient_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Run a hook when the parameter's gradient is complete, before those registered earlier; returns its handle."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    # Autograd walks the dictionary itself, whose order `move_to_end` of an OrderedDict does not change.
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)
    return handle


def make_last_gradient_hook(parameter: torch.Tensor, handle: Any) -> bool:
    """Let this one of the parameter's post-accumulate hooks run after all others; whether there are others."""
    hooks = post_accumulate_hooks(parameter)
    if len(hooks) < 2 or handle.id not in hooks:
        return False
    if next(reversed(hooks)) != handle.id:
        # See `register_first_gradient_hook` on why it is not moved in place.
        hooks[handle.id] = hooks.pop(handle.id)
    return True


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., object]]:
    """The hooks that run when a tensor's gradient is computed or accumulated."""
    hooks: list[Callable[..., object]] = list((tensor._backward_hooks or {}).values())
    hooks += (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()
    return hooks


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks see the tensor's gradient before it is accumulated."""
    return bool(tensor._backward_hooks)


def accumulates_into(leaf: torch.Tensor) -> bool:
    """Whether the running backward adds to the leaf's `.grad`: not `torch.autograd.grad`, nor one with other `inputs`."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # asked about a leaf whose gradient is given to the caller
        return False


ENGINE_FUNCTION = "_engine_run_backward"
"""The Python function that enters autograd's engine: under it, until the next Python frame, everything is C++."""


def backward_number() -> int | None:
    """A number that tells the backward that this thread is running from others; None outside of one."""
    number = int(torch._C._current_graph_task_id())
    return None if number < 0 else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have the running backward call this at its end, in the thread that called `backward`. Not called if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class OldestNode:
    """Finds the oldest node that the calls of one module make. A call makes the same graph as the one before, as a rule:
    the way from its output to its first node is remembered, and tried before all nodes are looked at.
    """

    def __init__(self) -> None:
        self._way: tuple[int, ...] = ()

    def find(self, ends: list[Any], since: int) -> Any:  # nodes have no public type
        """The oldest graph node that these lead to and that was made since a node number; None without one."""
        if self._way and (node := _follow(self._way, ends)) is not None and node._sequence_nr() == since:
            return node  # nothing is older that was made since
        found, self._way = _search(ends, since)
        return found


def _follow(way: tuple[int, ...], ends: list[Any]) -> Any:
    """The node at the end of the way; None where the graph has no such way."""
    try:
        node = ends[way[0]]
        for edge in way[1:]:
            node = node.next_functions[edge][0]
    except (IndexError, AttributeError):
        return None
    return node


def _search(ends: list[Any], since: int) -> tuple[Any, tuple[int, ...]]:
    """The oldest node made since, and the way to it."""
    found: Any = None
    way: Any = None
    oldest = sys.maxsize
    seen: set[Any] = set()
    waiting: list[tuple[Any, Any]] = [(node, (None, edge)) for edge, node in enumerate(ends)]
    while waiting:
        node, step = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Accumulations of gradients have the largest number there is, so that they run at once.
        number = int(node._sequence_nr())
        if number < since or number > sys.maxsize // 2:
            continue
        if number < oldest:
            found, way, oldest = node, step, number
        waiting += [(following, (step, edge)) for edge, (following, _) in enumerate(node.next_functions)]
    edges: list[int] = []
    while way is not None:
        way, edge = way
        edges.append(edge)
    return found, tuple(reversed(edges))


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place."""
    return int(tensor._version)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`version_of` each."""
    return [tensor._version for tensor in tensors]


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (`retain_graph=True`), for others to come. True outside of one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
