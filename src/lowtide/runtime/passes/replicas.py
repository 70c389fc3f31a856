"""Replication in one process: each batch is split over several devices, and the loop sees one model and one loss.

    model(batch) ──split──▶ parts ──one forward each, on its device──▶ outputs ──join──▶ loss
    loss.backward() ──▶ `_Joined` ──one backward each, the last part first──▶ gradients summed at the managed parameters

`split` and `join` are functions on tensors. `ReplicatedCalls` stands in the calls of the whole model, and `DeviceSwitch`
(`passes.device_switch`) moves the session's device side to a part's device before its forward and before its backward.

Note [One part after the other]
To a session the parts of a batch are micro-batches, whose gradients it adds up exactly already; what is new is that each is on
a device of its own. The parts of a backward are backwards of their own, run inside of the one that the loop has called, as a
checkpoint with `use_reentrant=True` does. In one graph autograd would hold the gradients of all weights on the device
from the first part until the last part brings its share; so they leave a device group by group, as without replication.

Rejected: a thread for each device with copies of the modules, as in torch.nn.parallel. Autograd's numbers of nodes, by which
a visit knows its end, are those of a thread, and the session's lock admits one. And to broadcast each group from the first
device inside one window: all bytes would go over that device's link, or all parts would have to walk through the model in
step. Here each device fetches streamed groups over its own link, as many bytes as it would alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import HigherOrderError, SessionError
from lowtide.runtime.passes.device_switch import DeviceSwitch
from lowtide.runtime.passes.devices import Device
from lowtide.runtime.passes.executor import Executor
from lowtide.runtime.passes.forward import Window


class ReplicatedCalls:
    """Splits each call of the model, runs the parts on their devices, and joins what they return.

    Args:
        model: The managed one.
        executor: Of the plan.
        switch: Between the devices.
        window: Around the whole model; None where no group needs one.
    """

    def __init__(self, model: nn.Module, executor: Executor, switch: DeviceSwitch, window: Window | None) -> None:
        self._name = type(model).__name__
        self._model = model
        self._executor = executor
        self._switch = switch
        self._window = window
        self._is_inside = False
        # Weakly: torch keeps what it calls, and that would keep a session that is forgotten with its model.
        refuse = weakref.WeakMethod(self._refuse_chosen)

        def look(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
            refused = refuse()
            if refused is not None:
                refused(roots, inputs)

        self.remove = weakref.finalize(self, compat.watch_chosen_inputs(look))
        """Leaves the model. May be repeated."""
        self.remove.atexit = False

    def _refuse_chosen(self, roots: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Refuse to give the gradients of weights to the caller: the joined output's graph does not lead to them."""
        own = {id(parameter) for parameter in self._model.parameters()}
        is_ours = any(id(each) in own for each in inputs) and any(
            isinstance(parts := getattr(node, "parts", None), Parts) and parts.belongs_to(self._executor)
            for node in compat.nodes_before(roots)
        )
        if is_ours:
            raise SessionError(
                f"torch.autograd.grad, or backward(inputs=), asks for gradients of weights of {self._name}, which is replicated "
                f"over {self._num_devices} devices: the backwards of its parts add to p.grad alone. Call backward() and read "
                "p.grad, or manage the model without replicas. Nothing was run"
            )

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the whole model."""
        if self._is_inside or compat.backward_number() is not None:
            return run(*args, **kwargs)
        if compat.is_in_transform() or compat.is_functional_call():
            raise SessionError(
                f"{self._name} is replicated over {self._num_devices} devices, and torch.func calls it with other weights, which "
                "are on one of them; manage it without replicas. Nothing was run"
            )
        leaves, structure = compat.flatten((args, kwargs))
        sizes = split_sizes(leaves, self._num_devices, self._name)
        self._is_inside = True
        try:
            outputs = [self._run_part(run, leaves, structure, index, sizes) for index in range(len(sizes))]
            output = outputs[0] if len(sizes) == 1 else self._join(outputs, sizes)
        finally:
            self._is_inside = False
        if self._window is not None:
            self._executor.forward.model_returned(output)
        return output

    @property
    def _num_devices(self) -> int:
        return len(self._switch.devices.devices)

    def _run_part(
        self, run: Callable[..., Any], leaves: Sequence[Any], structure: Any, index: int, sizes: Sequence[int]
    ) -> Any:
        start = sum(sizes[:index])
        store = self._executor.residency.store
        with self._switch.forward_on(index, store) as device:
            part = [
                self._bring(device, leaf[start : start + sizes[index]] if leaf.dim() else leaf, index)
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf in leaves
            ]
            args, kwargs = compat.unflatten(part, structure)
            with self._executor.forward.later_part() if index else nullcontext():
                return run(*args, **kwargs)

    def _bring(self, device: Device, tensor: torch.Tensor, index: int) -> torch.Tensor:
        if not index and tensor.device == device.mover.device:
            return tensor
        return self._switch.copy_to(device, tensor, between=index)

    # -- what the parts return -----------------------------------------------------------------------------------------

    def _join(self, outputs: list[Any], sizes: Sequence[int]) -> Any:
        flat = [compat.flatten(output) for output in outputs]
        first, structure = flat[0]
        if any(other != structure for _, other in flat[1:]):
            raise _cannot_join(self._name, "outputs of one structure on one device and of another on the next")
        columns = [[leaves[place] for leaves, _ in flat] for place in range(len(first))]
        joined = [self._join_column(column, sizes) for column in columns]
        tracked = [place for place, column in enumerate(columns) if _needs_gradient(column)]
        if tracked:
            parts = Parts(self._executor, self._switch, [columns[place] for place in tracked], sizes)
            anchor = torch.zeros((), requires_grad=True)
            tied = _Joined.apply(anchor, parts, *[joined[place] for place in tracked])  # type: ignore[no-untyped-call]  # torch's
            for place, tensor in zip(tracked, tied, strict=True):
                joined[place] = tensor
        return compat.unflatten(joined, structure)

    def _join_column(self, column: Sequence[Any], sizes: Sequence[int]) -> Any:
        """What all parts have at one place of their outputs, on the first device."""
        first = column[0]
        if not all(isinstance(each, torch.Tensor) for each in column):
            if all(each is first or (type(each) is type(first) and _is_equal(each, first)) for each in column):
                return first
            raise _cannot_join(self._name, f"a {type(first).__name__} that is another one on each device")
        device = self._switch.devices.devices[0]
        if all(tensor.dim() == 0 and tensor.is_floating_point() for tensor in column):
            brought = torch.stack(
                [self._switch.copy_to(device, tensor.detach(), between=index) for index, tensor in enumerate(column)]
            )
            return device.include(mean_by_rows(brought, sizes))
        shapes = [tuple(tensor.shape) for tensor in column]
        if any(
            not shape or shape[0] != size or shape[1:] != shapes[0][1:]
            for shape, size in zip(shapes, sizes, strict=True)
        ):
            raise _cannot_join(
                self._name,
                f"tensors of shapes {', '.join(map(str, shapes))} ({first.dtype}) from {', '.join(map(str, sizes))} rows",
            )
        with torch.no_grad():
            whole = torch.empty(
                (sum(sizes), *first.shape[1:]), dtype=first.dtype, device=device.mover.device, requires_grad=False
            )
            device.include(whole)
            for index, (place, tensor) in enumerate(zip(whole.split(list(sizes)), column, strict=True)):
                place.copy_(tensor.detach(), non_blocking=True)
                self._switch.copied_bytes[index] += place.nbytes
        return whole


class Parts:
    """The graphs of one call's parts, until their backward. The joined output's graph alone refers to it."""

    def __init__(
        self,
        executor: Executor,
        switch: DeviceSwitch,
        columns: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[int],
    ) -> None:
        self._executor, self._switch = executor, switch
        self._columns: Sequence[Sequence[torch.Tensor]] | None = columns
        self._sizes = tuple(sizes)

    def belongs_to(self, executor: Executor) -> bool:
        """Whether it is of this session, under its present plan."""
        return self._executor is executor

    def run_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward of each part; see Note [One part after the other]."""
        if torch.is_grad_enabled():
            raise HigherOrderError(
                "create_graph=True asks for gradients of gradients through a model that is replicated over several devices, "
                "whose parts have backwards of their own; manage it without replicas. Nothing was updated"
            )
        if self._columns is None:
            raise SessionError(
                "a second backward through one call of a replicated model: its graphs are gone. Give the first one "
                "retain_graph=True, or call the model again. Nothing was updated"
            )
        if self._executor.backward.is_stopped:
            raise SessionError(
                "this backward goes through a replicated model in a session that was closed since, or has another plan; run the "
                "forward again. Nothing was updated"
            )
        keeps = compat.keeps_graph()
        backward, columns = self._executor.backward, self._columns
        try:
            for index in reversed(range(len(self._sizes))):
                with self._switch.backward_on(index, self._executor.residency.store) as device:
                    backward.begin_part(has_more=bool(index))
                    roots, received = self._roots(columns, gradients, index, device)
                    if roots:
                        torch.autograd.backward(roots, received, retain_graph=keeps)
                    backward.end_part()
        finally:
            backward.end_parts()
            if not keeps:
                self._columns = None

    def _roots(
        self,
        columns: Sequence[Sequence[torch.Tensor]],
        gradients: Sequence[torch.Tensor | None],
        index: int,
        device: Device,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of a part, and their gradients on its device."""
        start, size = sum(self._sizes[:index]), self._sizes[index]
        roots: list[torch.Tensor] = []
        received: list[torch.Tensor] = []
        for column, gradient in zip(columns, gradients, strict=True):
            root = column[index]
            if gradient is None or not root.requires_grad:
                continue
            share = gradient[start : start + size] if root.dim() else gradient * (size / sum(self._sizes))
            roots.append(root)
            received.append(self._switch.copy_to(device, share, between=index) if index else share)
        return roots, received


class _Joined(torch.autograd.Function):
    """What the parts return together, whose gradient starts their backwards."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, parts: Parts, *joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.parts.run_backward(gradients)
        return (None,) * (2 + len(gradients))


def split_sizes(leaves: Sequence[Any], num_devices: int, model: str) -> list[int]:
    """Rows of each part, as `torch.chunk` would split them; fewer parts than devices where there are not enough rows.

    Example:
        >>> split_sizes([torch.ones(5, 2), None], 2, "Model"), split_sizes([torch.ones(1, 2)], 2, "Model")
        ([3, 2], [1])
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rows = sorted({tensor.shape[0] for tensor in tensors if tensor.dim()})
    if len(rows) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise SessionError(
            f"{model} is replicated over {num_devices} devices, and its batch cannot be split along the first dimension: it was "
            f"called with {shapes}. Give it tensors with one row for each sample, and what is alike for all samples as a "
            "buffer, a number, or a tensor without dimensions. Nothing was run"
        )
    if any(tensor.requires_grad for tensor in tensors):
        raise SessionError(
            f"{model} is replicated over {num_devices} devices, and was called with a tensor that requires a gradient: gradients "
            "of inputs do not go through its parts. Detach it, or manage the model without replicas. Nothing was run"
        )
    size = max(1, -(-rows[0] // num_devices))
    return [min(size, rows[0] - start) for start in range(0, rows[0], size)] or [0]


def mean_by_rows(losses: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The mean of the parts' losses, weighted by their rows.

    Example:
        >>> mean_by_rows(torch.tensor([1.0, 6.0]), [3, 2])
        tensor(3.)
    """
    total = sum(sizes)
    wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
    weighted = [loss * (size / total) for loss, size in zip(wide, sizes, strict=True)]
    return torch.stack(weighted).sum().to(losses.dtype)


def _needs_gradient(column: Sequence[Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in column)


def _is_equal(one: object, other: object) -> bool:
    return isinstance(one, bool | int | float | str | type(None)) and one == other


def _cannot_join(model: str, what: str) -> SessionError:
    return SessionError(
        f"{model} is replicated over several devices, and returned {what}, which cannot be put together: tensors with a row "
        "for each sample are joined, losses (floating-point tensors without dimensions) are averaged by rows, numbers and words "
        "must be equal. Return such values alone (for a Hugging Face model, config.use_cache = False), or manage the model "
        "without replicas. Nothing was updated"
    )
