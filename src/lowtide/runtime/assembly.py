"""Parts that are made from others: the engine over its units, and the optimizer that steps through the session."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from lowtide.memory.store import Books, ChunkStore
from lowtide.planning.plan import Plan, Schedule, Site
from lowtide.planning.window_need import window_bytes_needed
from lowtide.runtime.basis import Basis
from lowtide.runtime.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.engine import Engine
from lowtide.runtime.finishing import Finisher
from lowtide.runtime.gradients import GradientMover
from lowtide.runtime.host_pool import HostPool
from lowtide.runtime.host_worker import HostWorker
from lowtide.runtime.kernel_optimizer import KernelOptimizer
from lowtide.runtime.managed_optimizer import ManagedOptimizer
from lowtide.runtime.observer import ObservedStore, StepObserver
from lowtide.runtime.paged_state import Pages
from lowtide.runtime.recording import Recorder, is_resident
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Unit, chunks_in
from lowtide.runtime.updater import Updater
from lowtide.runtime.window import Window


def make_engine(
    basis: Basis,
    plan: Plan,
    units: Collection[Unit],
    pool: HostPool,
    worker: HostWorker,
    recorder: Recorder,
    *,
    books: Books,
    observer: StepObserver | None,
) -> Engine:
    """The engine over these units and a store for their chunks; `observer` watches both."""
    gradients = GradientMover(basis.mover, worker, pool.staging, plan.schedule, recorder)
    residency = Residency(units, recorder)
    engine = Engine(residency, basis.mover, gradients, worker, recorder, plan.schedule, observer)
    window_bytes = plan.budgets.window_bytes
    residency.store = (ChunkStore if observer is None else ObservedStore)(
        [unit.group for unit in units],
        basis.mover,
        [books],
        window_bytes=window_bytes if window_bytes is not None else window_bytes_needed(basis.layout, plan),
        prefetch_depth=plan.prefetch_depth,
        listener=residency,
    )
    for unit in units:
        unit.settler = engine
    if observer is not None:
        observer.watch(residency.store, sum(chunk.spec.nbytes for chunk in chunks_in(units) if is_resident(chunk)))
    return engine


def needs_managed_step(basis: Basis, plan: Plan, windows: Sequence[Window]) -> bool:
    """Whether torch's own step would not do."""
    is_asked_for = basis.max_grad_norm is not None or basis.numerics is not None
    return plan.schedule is not Schedule.DEFERRED or bool(windows) or is_asked_for


def make_optimizer(
    optimizer: torch.optim.Optimizer,
    basis: Basis,
    plan: Plan,
    engine: Engine,
    pool: HostPool,
    *,
    clock_origin_s: float,
    installed: ManagedOptimizer | None,
) -> ManagedOptimizer:
    """The user's optimizer, stepping by chunks; `installed` goes on where the session had another plan before."""
    device = engine.mover.device
    sites = {site for group in plan.groups for site in group.sites}
    devices = [device] * (Site.DEVICE in sites) + [torch.device("cpu")] * (Site.HOST in sites)
    runner: ChunkOptimizer
    if basis.numerics is None:
        runner = ChunkOptimizer(optimizer, devices)
    else:
        paged = [
            id(bound.parameter) for unit in engine.units.values() for bound in unit.bounds if bound.site is Site.PAGED
        ]
        pages = Pages(engine.mover, engine.recorder, basis.mark_host_memory) if paged else None
        runner = KernelOptimizer(
            optimizer, basis.numerics, pages=pages, paged=paged, on_host_memory=basis.mark_host_memory
        )
        if installed is None:
            runner.kept.take_over()
        if installed is not None and isinstance(installed.runner, KernelOptimizer):
            runner.kept.by_parameter = installed.runner.kept.by_parameter
        if basis.max_grad_norm is not None:
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
    updater.place_state(list(engine.units.values()), device)
    after_step = pool.tick if plan.defragment_every else None
    if installed is not None:
        installed.serve(engine, finisher, after_step)
        return installed
    managed = ManagedOptimizer(optimizer, engine, finisher, max_grad_norm=basis.max_grad_norm, after_step=after_step)
    managed.install()
    return managed
