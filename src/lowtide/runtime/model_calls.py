"""ModelCalls: what stands in the calls of a model's modules: activation policies, tables on the host, and windows."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lowtide import compat
from lowtide.activations.apply import Applied, apply
from lowtide.activations.host_embedding import HostEmbedding, put_on_host
from lowtide.activations.policy import Keep
from lowtide.planning.plan import Plan, Schedule
from lowtide.runtime.activation_mover import ActivationMover
from lowtide.runtime.backward_task import is_away
from lowtide.runtime.basis import Basis
from lowtide.runtime.call_watch import CallWatch
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_tiers import Tiers
from lowtide.runtime.recording import Recorder
from lowtide.runtime.unit import Unit, chunks_in
from lowtide.runtime.window import Window


class ModelCalls:
    """Of one model under one plan, from `enter` to `remove`. The engine is told by the windows."""

    def __init__(self, basis: Basis, plan: Plan, engine: Engine) -> None:
        self._basis = basis
        self._plan = plan
        self._engine = engine
        self.windows = engine.forward.windows = _make_windows(basis.model, engine)
        self._watch = None if self.windows else CallWatch(basis.model, engine.recorder.phases, engine.forward.call_over)
        self.applied: Applied | None = None
        """Activation policies; None where all keep what they save."""
        self._tables: list[HostEmbedding] = []

    @property
    def root_window(self) -> Window | None:
        """The one around the whole model; None where nothing needs one."""
        return next((window for window in self.windows if window.path == ""), None)

    def enter(self, tiers: Tiers) -> None:
        """Go around the modules' calls; what policies take to the host is charged to the tiers."""
        basis, units = self._basis, self._engine.units.values()
        self.applied = _apply_activations(basis, self._plan, units, tiers, self._engine.recorder)
        for unit in units:
            if unit.is_on_host:
                self._tables.append(
                    put_on_host(basis.model, unit.name, device=basis.mover.device, on_host=basis.on_host)
                )
        for window in self.windows:
            window.install()  # outside of the policies: a group is open while its forward runs again
        if self._watch is not None:
            self._watch.install()

    def remove(self) -> None:
        """The modules are called as before; what was put in last goes first. Also after an `enter` that was refused."""
        if self._watch is not None:
            self._watch.remove()
        for window in self.windows:
            window.remove()
        for table in self._tables:
            table.remove()
        if self.applied is not None:
            self.applied.remove()


def _make_windows(model: nn.Module, engine: Engine) -> list[Window]:
    """One for each module whose call must be known, not installed yet. Resident groups that the device updates need none."""
    by_path: dict[str, list[Unit]] = {}
    for unit in engine.units.values():
        if unit.is_on_host or (unit.is_resident and not any(map(is_away, unit.bounds))):
            continue
        for path in unit.group.spec.modules:
            by_path.setdefault(path, []).append(unit)
    if by_path or engine.schedule is Schedule.IN_BACKWARD or any(unit.is_on_host for unit in engine.units.values()):
        by_path.setdefault("", [])
    return [
        Window(model.get_submodule(path), path, tuple(units), engine.forward, engine.backward)
        for path, units in by_path.items()
    ]


def _apply_activations(
    basis: Basis, plan: Plan, units: Collection[Unit], tiers: Tiers, recorder: Recorder
) -> Applied | None:
    policies = {group.name: group.activation for group in plan.groups if not isinstance(group.activation, Keep)}
    if not policies:
        return None
    storages = {compat.storage_key(chunk.device) for chunk in chunks_in(units)}
    return apply(
        basis.model,
        policies,
        mover=ActivationMover(basis.mover, (tiers.host, tiers.pinned), basis.tracked, recorder),
        is_weight=lambda tensor: compat.storage_key(tensor) in storages,
        poison=basis.poison,
    )
