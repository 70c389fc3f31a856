"""Parts that are made from others: the engine over its units, and the optimizer that steps through the session."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lowtide.memory.store import Books, ChunkStore
from lowtide.planning.placement import window_bytes_needed
from lowtide.planning.plan import Plan, Schedule, Site, Weights
from lowtide.runtime.basis import Basis
from lowtide.runtime.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.chunk_proof import Proof, prove
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


def needs_managed_step(basis: Basis, plan: Plan) -> bool:
    """Whether torch's own step would not do: something is streamed, updated on the host or in backward, or asked for."""
    is_asked_for = basis.max_grad_norm is not None or basis.numerics is not None
    return plan.schedule is not Schedule.DEFERRED or is_asked_for or _has_windows(basis, plan)


def _has_windows(basis: Basis, plan: Plan) -> bool:
    """As `ModelCalls` will make them."""
    return any(
        group.weights is not Weights.RESIDENT
        or any(
            site is Site.HOST and chunk.spans[0].parameter.requires_grad
            for chunk, site in zip(basis.layout.chunks_of(group.name), group.sites, strict=True)
        )
        for group in plan.groups
    )


def prove_optimizer(optimizer: torch.optim.Optimizer, basis: Basis, plan: Plan) -> Proof:
    """Refuse an optimizer whose own step cannot be taken chunk by chunk, where that is what the plan asks of it.

    Raises:
        UnsupportedOptimizerError: It cannot. Nothing was changed.
    """
    if basis.numerics is None and needs_managed_step(basis, plan):
        sites = {site for group in plan.groups for site in group.sites}
        on_device, on_host = [basis.mover.device], [torch.device("cpu")]
        return prove(optimizer, on_device * (Site.DEVICE in sites) + on_host * (Site.HOST in sites))
    return Proof()


def make_optimizer(
    optimizer: torch.optim.Optimizer,
    basis: Basis,
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
    if basis.numerics is None:
        runner = ChunkOptimizer(optimizer, advances_groups=proof.advances_groups, fuses_on_host=device.type == "cuda")
    else:
        paged = [
            id(bound.parameter) for unit in engine.units.values() for bound in unit.bounds if bound.site is Site.PAGED
        ]
        pages = Pages(engine.mover, engine.recorder, basis.mark_host_memory) if paged else None
        runner = KernelOptimizer(
            optimizer, basis.numerics, pages=pages, paged=paged, on_host_memory=basis.mark_host_memory
        )
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
    after_step = pool.tick if plan.defragment_every else None
    if installed is not None:
        updater.place_state(list(engine.units.values()), device)
        installed.serve(engine, finisher, after_step)
        return installed
    managed = ManagedOptimizer(
        optimizer,
        engine,
        finisher,
        max_grad_norm=basis.max_grad_norm,
        num_closure_calls=proof.num_closure_calls,
        after_step=after_step,
    )
    try:
        if isinstance(runner, KernelOptimizer):
            runner.kept.take_over()
        updater.place_state(list(engine.units.values()), device)
        managed.install()
    except BaseException:
        if isinstance(runner, KernelOptimizer):
            runner.kept.hand_back()
        raise
    return managed
