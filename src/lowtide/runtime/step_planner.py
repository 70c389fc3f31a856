"""StepPlanner: plans for the step that `prepare` was given, at other sizes of its batch, while its model is under management.

A managed model cannot be traced, so the planner keeps a copy of model, batch, optimizer and loss whose tensors have no
memory. What a loop hands to the model's call has names and shapes; by them the batch of that copy is made larger or smaller.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import PlanError, TraceError
from lowtide.planning.plan import GroupPlan, Plan
from lowtide.runtime.prediction.trace import trace
from lowtide.tracing.prediction.job import Contents, TensorDescription, pack, unpack
from lowtide.tracing.step_trace import StepTrace
from lowtide.tracing.training_step import Loss, named_tensors, own_loss

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the tensors of one call of the model, by the name of the argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """A plan with its predicted step."""

    plan: Plan
    shapes: Shapes
    """The call it is made for; empty where that is not known."""
    peak_bytes: int
    reserved_bytes: int
    step_s: float | None = None
    """Predicted seconds; None where the plan was only replayed."""
    num_moved: int = 0
    """Groups that it updates elsewhere than the plan before."""


class Planned(Protocol):
    """What a search gives."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def trace(self) -> StepTrace:
        """Its step."""

    @property
    def step_s(self) -> float:
        """Predicted seconds."""


class StepPlanner:
    """Makes plans for a step at other sizes.

    Args:
        search: `lowtide.plan` with what does not change: hardware, host memory, schedule.
        words: What `trace` gets beside model, batch, optimizer, loss and plan.
        model: Not managed yet; likewise the others, which are copied without their memory.
        device_bytes: What a step may take of the device.
    """

    def __init__(
        self,
        search: Callable[..., Planned],
        words: Mapping[str, Any],
        *,
        model: nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None,
        device_bytes: int,
    ) -> None:
        self._search = search
        self._words = words
        self.device_bytes = device_bytes
        copied: Contents = unpack(pack(Contents(model, batch, optimizer, loss), batch), _Empty())
        self._model, self._batch, self._optimizer, self._loss = (
            copied.model,
            copied.batch,
            copied.optimizer,
            copied.loss,
        )
        compat.restore_registrations(self._model)
        self._names = list(inspect.signature(model.forward).parameters)
        self._call = self._captured(self._batch)

    @property
    def shapes(self) -> Shapes:
        """Those of the call that the given batch makes; empty where the loss calls only parts of the model."""
        return {name: tuple(tensor.shape) for name, tensor in self._call.items()}

    def first(self, planned: Planned) -> NextPlan:
        """The plan for the given batch."""
        return self._next(planned.plan, self.shapes, planned.trace, planned.step_s, 0)

    def shapes_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
        """The shapes of a call's tensors, by the names of the model's own arguments."""
        return {name: tuple(tensor.shape) for name, tensor in self._named(args, kwargs)}

    def at(self, shapes: Shapes, *, like: Plan, limit_bytes: int) -> NextPlan:
        """The fastest plan for calls of these shapes that updates each group where another plan does, if one fits.

        Args:
            shapes: Of the model's call; what the planner does not know of them stays as in the given batch.
            like: The plan whose update sites are kept where that is possible.
            limit_bytes: What the step may take of the device; the session's budget stays what it is.

        Raises:
            PlanError: Nothing fits.
            TraceError: The step cannot be predicted at that size.
        """
        search = partial(self._quietly, self._search, self._model, self._at(shapes), device_memory=limit_bytes)
        try:
            found: Planned = search(sites_of=like)
        except PlanError:
            found = search()
        chosen = replace(found.plan, budgets=replace(found.plan.budgets, device_bytes=self.device_bytes))
        return self._next(chosen, shapes, found.trace, found.step_s, num_moved(like, chosen))

    def replayed(self, plan: Plan, shapes: Shapes, limit_bytes: int) -> NextPlan | None:
        """What a step of this size takes under a plan, perhaps more than the limit; None where the host does not hold it."""
        limited = replace(plan, budgets=replace(plan.budgets, device_bytes=limit_bytes))
        found: StepTrace = self._quietly(trace, self._model, self._at(shapes), plan=limited, **self._words)
        host, pinned = plan.budgets.host_bytes, plan.budgets.pinned_bytes
        assert found.host_bytes is not None, "a trace under a plan has them"
        assert found.pinned_bytes is not None, "a trace under a plan has them"
        if (host is not None and found.host_bytes > host) or (pinned is not None and found.pinned_bytes > pinned):
            return None
        return self._next(plan, shapes, found, None, 0)

    def _next(self, plan: Plan, shapes: Shapes, found: StepTrace, step_s: float | None, moved: int) -> NextPlan:
        return NextPlan(
            plan=plan,
            shapes=shapes,
            peak_bytes=found.peak_bytes,
            reserved_bytes=found.peak_reserved_bytes,
            step_s=step_s,
            num_moved=moved,
        )

    def _quietly(self, make: Callable[..., Any], *args: Any, **words: Any) -> Any:
        # What there is to warn of was said when the session began.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(*args, optimizer=self._optimizer, loss=self._loss, **words)

    # -- batches of other sizes ----------------------------------------------------------------------------------------

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        given = {
            self._names[place] if place < len(self._names) else str(place): each for place, each in enumerate(args)
        }
        return list(named_tensors({**given, **kwargs}, ""))

    def _captured(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of the model's call when the loss is computed, which is broken off there."""

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _CalledError(self._named(args, kwargs) if module is self._model else [])

        hooks = [
            module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True) for module in self._model.modules()
        ]
        try:
            with torch.random.fork_rng(devices=[]):
                (self._loss or own_loss)(self._model, batch)
        except _CalledError as called:
            return dict(called.tensors)
        except Exception:
            return {}  # it computes with what has no values here
        finally:
            for hook in hooks:
                hook.remove()
        return {}

    def _at(self, shapes: Shapes) -> Any:
        """The batch that makes a call of these shapes."""
        known = {
            name: (tensor, shapes[name])
            for name, tensor in self._call.items()
            if name in shapes and len(shapes[name]) == tensor.dim()
        }
        if all(tuple(tensor.shape) == shape for tensor, shape in known.values()):
            return self._batch
        given = {id(tensor): shape for tensor, shape in known.values()}
        sizes: dict[tuple[int, int], int] = {}
        for tensor, shape in known.values():
            pairs = [*zip(enumerate(tensor.shape), shape, strict=True), ((0, tensor.numel()), prod(shape))]
            for place, size in pairs:
                sizes.setdefault(place, size)
        leaves, structure = compat.flatten(dict(self._batch) if isinstance(self._batch, Mapping) else self._batch)
        batch = compat.unflatten(
            [
                _resized(
                    leaf, given.get(id(leaf)) or tuple(sizes.get(place, place[1]) for place in enumerate(leaf.shape))
                )
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ],
            structure,
        )
        made = {name: tuple(tensor.shape) for name, tensor in self._captured(batch).items()}
        if any(made.get(name) != shape for name, (_, shape) in known.items()):
            raise TraceError(f"no batch could be made for which the model is called with {shapes}")
        return batch


class _CalledError(Exception):
    """The model was called."""

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.tensors = tensors


class _Empty:
    """Makes tensors from descriptions: with their values where these are known, without memory where not."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, description: TensorDescription, values: Tensor | None) -> Tensor:
        if values is None:
            key, size = description.storage_key, description.storage_bytes
            if key not in self._storages:
                self._storages[key] = torch.UntypedStorage(size, device="meta")
            values = compat.meta_tensor_over(
                self._storages[key], description.dtype, description.shape, description.stride, description.offset
            )
        if description.is_parameter:
            return nn.Parameter(values, requires_grad=description.requires_grad)
        return values.requires_grad_(description.requires_grad)


def _resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor cut or repeated along each dimension: models look at masks and positions."""
    for dim, size in enumerate(shape):
        if size != tensor.shape[dim]:
            places = torch.arange(size, device=tensor.device) % max(1, tensor.shape[dim])
            tensor = tensor.index_select(dim, places)
    return tensor


def bucket(size: int) -> int:
    """The next size that plans are made for: four steps in each doubling, so that a loop of many sizes has few plans.

    Example:
        >>> [bucket(size) for size in (1, 5, 8, 9, 11, 1000)]
        [1, 5, 8, 10, 12, 1024]
    """
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def bucketed(shapes: Shapes, known: Shapes) -> Shapes:
    """The shapes with each dimension that differs from the known ones at the size of its bucket."""
    return {
        name: tuple(size if size == before else bucket(size) for size, before in zip(shape, known[name], strict=True))
        if name in known and len(known[name]) == len(shape)
        else shape
        for name, shape in shapes.items()
    }


def elements(shapes: Shapes, others: Shapes) -> int:
    """Elements of the tensors that both calls have."""
    return sum(prod(shape) for name, shape in shapes.items() if name in others)


def num_moved(before: Plan, after: Plan) -> int:
    """Groups that are updated elsewhere than before."""
    sites: dict[str, GroupPlan] = {group.name: group for group in before.groups}
    return sum(sites[group.name].sites != group.sites for group in after.groups)
