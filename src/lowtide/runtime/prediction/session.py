"""SessionFootprint: a session around a traced step.

Its forward and backward pass, its store and its updates by chunk are the runtime's own; what they handle has no memory, and
what they take shows in the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide import compat
from lowtide.activations.apply import Applied, apply
from lowtide.activations.host_embedding import find_repeats
from lowtide.activations.policy import Keep, Policy
from lowtide.errors import TraceError
from lowtide.memory.chunk import Chunk, ChunkState, Layout, StoredGroup
from lowtide.optim.update_types import Numerics
from lowtide.planning.placement import window_bytes_needed
from lowtide.planning.plan import GroupPlan, Plan, Schedule, Site, Weights
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter
from lowtide.runtime.passes.backward import BackwardPass
from lowtide.runtime.passes.forward import ForwardPass, make_windows
from lowtide.runtime.passes.lock import LostStep, SessionLock
from lowtide.runtime.prediction.without_memory import (
    FootprintGradients,
    FootprintMover,
    FootprintResidency,
    FootprintUpdater,
    FootprintWatch,
    KernelFootprint,
)
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.updates.norms import LossWatch
from lowtide.runtime.updates.updater import Finisher
from lowtide.runtime.updates.worker import HostWorker
from lowtide.tracing.settings import DeviceMemory


class FootprintLookup:
    """Stands in the embedding's calls until `remove`. What `activations.host_embedding.HostEmbedding` is in a session."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._inner = compat.replace_call(module, self._call)

    def remove(self) -> None:
        """The embedding is called as before."""
        compat.replace_call(self._module, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with _Lookups(self._module):
            return (self._inner or compat.plain_call(self._module))(*args, **kwargs)


class _Lookups(TorchFunctionMode):
    """Takes the lookups of the table out of whatever the module computes around them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding or args[1] is not self._module.weight:
            return func(*args, **(kwargs or {}))
        ids, weight = args[:2]
        return _Rows.apply(weight, ids, _num_different(ids))  # type: ignore[no-untyped-call]  # torch's has no types


class _Rows(torch.autograd.Function):
    """Makes what a lookup on the host makes on the device. The table's gradient is made on the host, and so is none here."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, num_different: int | None) -> Tensor:
        del ctx
        width, device = weight.shape[1], weight.device
        rows = torch.empty(
            ids.numel() if num_different is None else num_different, width, dtype=weight.dtype, device=device
        )
        if num_different is not None:
            positions = torch.empty(ids.numel(), dtype=torch.int64, device=device)
            rows = rows.index_select(0, positions)
        return rows.view(*ids.shape, width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        del ctx
        gradient.reshape(-1, gradient.shape[-1])  # a copy where it does not lie in rows
        return None, None, None


def _num_different(ids: Tensor) -> int | None:
    """How many rows are sent, where those that repeat are sent once; None where each id has its own, as `look_up` does it."""
    try:
        values = ids.tolist()
    except TraceError:  # computed in the model: at worst all are different
        return None
    repeats = find_repeats(torch.tensor(values))
    return None if repeats is None else repeats.rows.numel()


class FootprintLoss:
    """What `LossWatch` is in a session.

    Args:
        is_immediate: As there; the verdict is gone at once then.
    """

    def __init__(self, *, is_immediate: bool) -> None:
        self._watch = LossWatch(is_immediate=False)
        self._is_immediate = is_immediate

    @property
    def has_verdict(self) -> bool:
        """As in a session."""
        return self._watch.has_verdict

    def remember(self, output: object) -> None:
        """As in a session."""
        self._watch.remember(output)

    def forget_loss(self) -> None:
        """As in a session."""
        self._watch.forget_loss()

    def forget(self) -> None:
        """As in a session; also for the check in `step()`."""
        self._watch.forget()

    def judge(self, gradient: torch.Tensor | None) -> None:
        """As in a session, but for the answer."""
        self._watch.judge(gradient)
        if self._is_immediate:
            self._watch.forget()


MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class SessionFootprint:
    """The context of a traced step under a plan, and its optimizer.

    Args:
        plan: Of the model.
        layout: Of the model.
        make_optimizer: From parameters.
        numerics: Of updates through our own kernels; None for the optimizer's own.
    """

    def __init__(self, plan: Plan, layout: Layout, *, make_optimizer: MakeOptimizer, numerics: Numerics | None) -> None:
        self._plan = plan
        self._layout = layout
        self._make_optimizer = make_optimizer
        self._numerics = numerics
        self._runner: ChunkOptimizer | None = None
        self._applied: Applied | None = None

    def optimizer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer that the trace steps: through this session."""
        optimizer = self._make_optimizer(parameters)
        if self._numerics is None:
            self._runner = ChunkOptimizer(optimizer)
        else:
            self._runner = KernelFootprint(optimizer, self._numerics)
        vars(optimizer)["step"] = self._step
        return optimizer

    @property
    def num_warm_up_steps(self) -> int:
        """2 if weights move: nothing is prefetched in the first step, nor for the second, so the third is the first usual one."""
        return 2 if self._moves else 1

    @property
    def _moves(self) -> bool:
        return any(group.weights is not Weights.RESIDENT or Site.HOST in group.sites for group in self._plan.groups)

    def placed(self, model: nn.Module) -> list[nn.Parameter]:
        """The managed parameters."""
        parameters = dict(model.named_parameters())
        return [parameters[span.parameter.name] for chunk in self._layout.chunks for span in chunk.spans]

    @contextmanager
    def around(self, model: nn.Module, memory: DeviceMemory) -> Iterator[None]:
        """The session begins, and ends."""
        self._bind(model, memory)
        groups = self._residency.groups.values()
        windows = make_windows(model, groups, self._plan.schedule, self._forward, self._backward)
        self._backward.watch_gradients()
        with ExitStack() as stack:
            stack.callback(self._backward.stop)
            if policies := self._policies():
                self._applied = self._apply(model, policies, memory)
                stack.callback(self._applied.remove)
            for group in self._residency.groups.values():
                if group.is_on_host:
                    stack.callback(FootprintLookup(model.get_submodule(group.name)).remove)
            for window in windows:
                stack.callback(window.remove)
                window.install()  # outside of the policies, as in a session
            yield

    def offloaded_bytes(self) -> Mapping[str, int]:
        """The share of one step, as all of them send the same."""
        sent = {} if self._applied is None else self._applied.offloaded_bytes()
        return {path: num_bytes // (self.num_warm_up_steps + 1) for path, num_bytes in sent.items()}

    # -- putting together ----------------------------------------------------------------------------------------------

    def _policies(self) -> dict[str, Policy]:
        return {group.name: group.activation for group in self._plan.groups if not isinstance(group.activation, Keep)}

    def _apply(self, model: nn.Module, policies: dict[str, Policy], memory: DeviceMemory) -> Applied:
        storages = {compat.storage_key(parameter) for parameter in self.placed(model)}
        return apply(
            model, policies, mover=memory.mover, is_weight=lambda tensor: compat.storage_key(tensor) in storages
        )

    def _bind(self, model: nn.Module, memory: DeviceMemory) -> None:
        assert self._runner is not None, "the optimizer is made first"
        kept_bytes = max((group.nbytes for group in self._layout.groups), default=0)
        mover = self._mover = FootprintMover(memory, max_kept_bytes=kept_bytes)
        parameters = dict(model.named_parameters())
        groups = [self._group(plan, parameters) for plan in self._plan.groups]
        window_bytes = self._plan.budgets.window_bytes
        residency = self._residency = FootprintResidency(
            groups,
            mover,
            memory.tell,
            window_bytes=window_bytes if window_bytes is not None else window_bytes_needed(self._layout, self._plan),
            prefetch_depth=self._plan.prefetch_depth,
        )
        recorder, lock = Recorder(mover), SessionLock()
        watch = FootprintWatch(mover)
        self._loss = FootprintLoss(is_immediate=self._plan.schedule is Schedule.IN_BACKWARD)
        self._updater = FootprintUpdater(self._runner, residency.store, watch, self._plan.schedule)
        self._finisher = Finisher(self._updater, residency, mover, recorder)
        self._backward = BackwardPass(
            residency,
            mover,
            FootprintGradients(mover),
            recorder,
            self._plan.schedule,
            finisher=self._finisher,
            loss=self._loss,
            gradient_watch=watch,
            lost_step=LostStep(),
            average=None,
            observer=None,
            lock=lock,
        )
        self._forward = ForwardPass(
            residency,
            mover,
            HostWorker(),
            recorder,
            backward=self._backward,
            loss=self._loss,
            gradient_watch=watch,
            observer=None,
            lock=lock,
        )

    def _group(self, plan: GroupPlan, parameters: dict[str, nn.Parameter]) -> ManagedGroup:
        is_resident = plan.weights is Weights.RESIDENT
        chunks: list[Chunk] = []
        members: list[ManagedParameter] = []
        for spec, site in zip(self._layout.chunks_of(plan.name), plan.sites, strict=True):
            chunk = Chunk(spec, self._mover.host_buffer(spec.nbytes), self._mover.device_buffer(spec.nbytes))
            chunks.append(chunk)
            for span in spec.spans:
                parameter = parameters[span.parameter.name]
                managed = ManagedParameter(
                    parameter, span.parameter, chunk, site, host_view=None, device_view=parameter
                )
                if site is Site.HOST and parameter.requires_grad:
                    managed.update_through(parameter)
                members.append(managed)
            if is_resident:
                self._mover.grow(chunk.device)
                chunk.become(ChunkState.RESIDENT)
        group_spec = next(each for each in self._layout.groups if each.name == plan.name)
        is_on_host = plan.weights is Weights.HOST
        return ManagedGroup(StoredGroup(group_spec, chunks), members, is_resident=is_resident, is_on_host=is_on_host)

    # -- the step ------------------------------------------------------------------------------------------------------

    def _step(self, closure: Any = None) -> None:
        """As `ManagedOptimizer` takes it: loose parameters and resident weights first, then streamed ones by chunk."""
        del closure
        assert self._runner is not None
        self._loss.forget()
        settings = self._runner.settings()
        groups = list(self._residency.groups.values())
        here = [
            managed
            for group in groups
            if group.is_resident and self._plan.schedule is Schedule.DEFERRED
            for managed in group.members
            if managed.site is Site.DEVICE
        ]
        managed_ids = {id(managed.parameter) for group in groups for managed in group.members}
        loose = [
            parameter
            for params in self._runner.optimizer.param_groups
            for parameter in params["params"]
            if id(parameter) not in managed_ids
        ]
        self._updater.update_here(here, loose, settings)
        for group in groups:
            group.forget_backward()
            if self._plan.schedule is Schedule.DEFERRED:
                self._step_group(group)

    def _step_group(self, group: ManagedGroup) -> None:
        assert self._runner is not None
        settings = self._runner.settings()
        for chunk in group.stored.chunks:
            members = [managed for managed in group.members if managed.chunk is chunk]
            if any(managed.host_gradient is not None for managed in members):
                self._updater.update_on_host(group, chunk, members, settings)
                self._residency.store.drop(group.name)
            elif not group.is_resident and any(managed.parameter.grad is not None for managed in members):
                self._finisher.update_streamed_on_device(group, chunk, members, settings)
