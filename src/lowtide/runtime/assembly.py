"""Assembly: the parts of a session are made from what it is about, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.memory.layout import Layout
from lowtide.memory.mover import Mover
from lowtide.memory.store import Books, ChunkStore
from lowtide.optim.update_types import Numerics
from lowtide.planning.placement import window_bytes_needed
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.host_memory import HostPool
from lowtide.runtime.parameters.gradients import GradientMover
from lowtide.runtime.parameters.group import ManagedGroup, chunks_in
from lowtide.runtime.parameters.residency import Residency
from lowtide.runtime.passes.engine import Engine
from lowtide.runtime.statistics.observer import ObservedStore, StepObserver
from lowtide.runtime.statistics.recording import Recorder, is_resident
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer
from lowtide.runtime.updates.managed_optimizer import ManagedOptimizer
from lowtide.runtime.updates.paged_state import Pages
from lowtide.runtime.updates.proof import Proof, prove
from lowtide.runtime.updates.updater import Finisher, Updater
from lowtide.runtime.updates.worker import HostWorker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionSetup:
    """Stays the same when the session goes on under another plan."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None where the model is run and not trained."""
    layout: Layout
    """How the model's groups lie in chunks."""
    mover: Mover
    """Copies to and from the device; an emulated one comes with `tracked`."""
    tracked: TrackedMemory | None
    """The emulated device's books; None on a real one."""
    max_grad_norm: float | None
    """Clip the gradients to this norm before each step; None leaves them."""
    numerics: Numerics | None
    """How our own kernels update; None for the optimizer's own step."""
    poison: bool
    """Fill memory that holds nothing with NaN."""

    @property
    def is_on_cuda(self) -> bool:
        """Whether the device is a real one."""
        return self.mover.device.type == "cuda"

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """What is made in it is the host's: an emulated device would count it as its own."""
        return contextlib.nullcontext() if self.tracked is None else self.tracked.on_host()

    def mark_host_memory(self, memory: torch.Tensor) -> None:
        """The memory is the host's, whoever made it."""
        if self.tracked is not None:
            self.tracked.exclude(memory)

    def mark_device_buffer(self, buffer: torch.Tensor) -> None:
        """The memory is the device's, and on the books already."""
        if self.tracked is not None:
            self.tracked.exclude_charged(buffer)


def make_engine(
    setup: SessionSetup,
    plan: Plan,
    groups: Collection[ManagedGroup],
    pool: HostPool,
    worker: HostWorker,
    recorder: Recorder,
    *,
    books: Books,
    observer: StepObserver | None,
) -> Engine:
    """The engine over these groups and a store for their chunks; `observer` watches both."""
    gradients = GradientMover(setup.mover, worker, pool.staging, plan.schedule, recorder)
    residency = Residency(groups, recorder)
    engine = Engine(residency, setup.mover, gradients, worker, recorder, plan.schedule, observer)
    window_bytes = plan.budgets.window_bytes
    residency.store = (ChunkStore if observer is None else ObservedStore)(
        [group.stored for group in groups],
        setup.mover,
        [books],
        window_bytes=window_bytes if window_bytes is not None else window_bytes_needed(setup.layout, plan),
        prefetch_depth=plan.prefetch_depth,
        listener=residency,
    )
    for group in groups:
        group.settler = engine
    if observer is not None:
        observer.watch(residency.store, sum(chunk.spec.nbytes for chunk in chunks_in(groups) if is_resident(chunk)))
    return engine


def needs_managed_step(setup: SessionSetup, plan: Plan) -> bool:
    """Whether torch's own step would not do: something is streamed, updated on the host or in backward, or asked for."""
    is_asked_for = setup.max_grad_norm is not None or setup.numerics is not None
    return plan.schedule is not Schedule.DEFERRED or is_asked_for or _has_windows(setup, plan)


def _has_windows(setup: SessionSetup, plan: Plan) -> bool:
    """As `ModelCalls` will make them."""
    return any(
        group.weights is not Weights.RESIDENT
        or any(
            site is Site.HOST and chunk.spans[0].parameter.requires_grad
            for chunk, site in zip(setup.layout.chunks_of(group.name), group.sites, strict=True)
        )
        for group in plan.groups
    )


def prove_optimizer(optimizer: torch.optim.Optimizer, setup: SessionSetup, plan: Plan) -> Proof:
    """Refuse an optimizer whose own step cannot be taken chunk by chunk, where that is what the plan asks of it.

    Raises:
        UnsupportedOptimizerError: It cannot. Nothing was changed.
    """
    if setup.numerics is None and needs_managed_step(setup, plan):
        sites = {site for group in plan.groups for site in group.sites}
        on_device, on_host = [setup.mover.device], [torch.device("cpu")]
        return prove(optimizer, on_device * (Site.DEVICE in sites) + on_host * (Site.HOST in sites))
    return Proof()


def make_optimizer(
    optimizer: torch.optim.Optimizer,
    setup: SessionSetup,
    plan: Plan,
    engine: Engine,
    pool: HostPool,
    *,
    proof: Proof,
    clock_origin_s: float,
    installed: ManagedOptimizer | None,
) -> ManagedOptimizer:
    """The user's optimizer, stepping by chunks; `installed` goes on where the session had another plan before."""
    device = engine.mover.device
    runner: ChunkOptimizer
    if setup.numerics is None:
        runner = ChunkOptimizer(optimizer, advances_groups=proof.advances_groups, fuses_on_host=device.type == "cuda")
    else:
        paged = [
            id(managed.parameter)
            for group in engine.groups.values()
            for managed in group.members
            if managed.site is Site.PAGED
        ]
        pages = Pages(engine.mover, engine.recorder, setup.mark_host_memory) if paged else None
        runner = KernelOptimizer(
            optimizer, setup.numerics, pages=pages, paged=paged, on_host_memory=setup.mark_host_memory
        )
        if installed is not None and isinstance(installed.runner, KernelOptimizer):
            runner.kept.by_parameter = installed.runner.kept.by_parameter
        if setup.max_grad_norm is not None:
            engine.take_totals()
    updater = Updater(
        runner,
        engine.residency.store,
        engine.worker,
        pool.staging,
        engine.recorder,
        engine.gradient_watch,
        clock_origin_s=clock_origin_s,
    )
    finisher = engine.backward.finisher = Finisher(updater, engine.residency, engine.mover, engine.recorder)
    engine.backward.watch_gradients()
    after_step = pool.tick if plan.defragment_every else None
    if installed is not None:
        updater.place_state(list(engine.groups.values()), device)
        installed.serve(engine, finisher, after_step)
        return installed
    stepping = ManagedOptimizer(
        optimizer,
        engine,
        finisher,
        max_grad_norm=setup.max_grad_norm,
        num_closure_calls=proof.num_closure_calls,
        after_step=after_step,
    )
    try:
        if isinstance(runner, KernelOptimizer):
            runner.kept.take_over()
        updater.place_state(list(engine.groups.values()), device)
        stepping.install()
    except BaseException:
        if isinstance(runner, KernelOptimizer):
            runner.kept.hand_back()
        raise
    return stepping
