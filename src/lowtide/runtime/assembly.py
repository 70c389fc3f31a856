"""Parts that are made from others: the windows around modules, and the optimizer that steps through the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lowtide.optim.update_types import Numerics
from lowtide.planning.plan import Plan, Schedule, Site
from lowtide.runtime.backward import is_away
from lowtide.runtime.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.engine import Engine
from lowtide.runtime.finishing import Finisher
from lowtide.runtime.host_pool import HostPool
from lowtide.runtime.kernel_optimizer import KernelOptimizer
from lowtide.runtime.managed_optimizer import ManagedOptimizer
from lowtide.runtime.paged_state import Pages
from lowtide.runtime.unit import Unit
from lowtide.runtime.updater import Updater
from lowtide.runtime.window import Window


def make_windows(model: nn.Module, engine: Engine) -> list[Window]:
    """One for each module whose call must be known, not installed yet. Resident groups that the device updates need none."""
    by_path: dict[str, list[Unit]] = {}
    for unit in engine.units.values():
        if unit.is_on_host or (unit.is_resident and not any(map(is_away, unit.bounds))):
            continue
        for path in unit.group.spec.windows:
            by_path.setdefault(path, []).append(unit)
    if by_path or engine.schedule is Schedule.IN_BACKWARD or any(unit.is_on_host for unit in engine.units.values()):
        by_path.setdefault("", [])
    return [Window(model.get_submodule(path), path, tuple(units), engine) for path, units in by_path.items()]


def needs_managed_step(
    plan: Plan, windows: Sequence[Window], max_grad_norm: float | None, numerics: Numerics | None
) -> bool:
    """Whether torch's own step would not do."""
    is_asked_for = max_grad_norm is not None or numerics is not None
    return plan.schedule is not Schedule.DEFERRED or bool(windows) or is_asked_for


def make_optimizer(
    optimizer: torch.optim.Optimizer,
    engine: Engine,
    pool: HostPool,
    plan: Plan,
    *,
    max_grad_norm: float | None,
    numerics: Numerics | None,
    clock_origin_s: float,
    on_host_memory: Callable[[torch.Tensor], None],
    installed: ManagedOptimizer | None,
) -> ManagedOptimizer:
    """The user's optimizer, stepping by chunks; `installed` goes on where the session had another plan before."""
    device = engine.mover.device
    sites = {site for group in plan.groups for site in group.sites}
    devices = [device] * (Site.DEVICE in sites) + [torch.device("cpu")] * (Site.HOST in sites)
    runner: ChunkOptimizer
    if numerics is None:
        runner = ChunkOptimizer(optimizer, devices)
    else:
        paged = [
            id(bound.parameter) for unit in engine.units.values() for bound in unit.bounds if bound.site is Site.PAGED
        ]
        pages = Pages(engine.mover, engine.recorder, on_host_memory) if paged else None
        runner = KernelOptimizer(optimizer, numerics, pages=pages, paged=paged, on_host_memory=on_host_memory)
        if installed is None:
            runner.take_over()
        if installed is not None and isinstance(installed.runner, KernelOptimizer):
            runner.states = installed.runner.states
        if max_grad_norm is not None:
            engine.take_norms()
    updater = Updater(
        runner,
        engine.residency.store,
        engine.worker,
        pool.staging,
        engine.recorder,
        clock_origin_s=clock_origin_s,
    )
    finisher = engine.finisher = Finisher(updater, engine.residency, engine.mover, engine.recorder)
    engine.watch_gradients()
    updater.place_state(list(engine.units.values()), device)
    after_step = pool.tick if plan.defragment_every else None
    if installed is not None:
        installed.serve(engine, finisher, after_step)
        return installed
    managed = ManagedOptimizer(optimizer, engine, finisher, max_grad_norm=max_grad_norm, after_step=after_step)
    managed.install()
    return managed
