"""ModelCalls: what stands in the calls of a model's modules: activation policies, tables on the host, and windows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.apply import Applied, apply
from lowtide.activations.host_embedding import HostEmbedding, put_on_host
from lowtide.activations.policy import Keep
from lowtide.memory.mover import Copied, Mover, Ticket
from lowtide.memory.tier import Tier
from lowtide.planning.plan import Plan, Schedule
from lowtide.runtime.assembly import SessionSetup
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.host_memory import Tiers
from lowtide.runtime.parameters.group import ManagedGroup, chunks_in
from lowtide.runtime.passes.backward_task import is_away
from lowtide.runtime.passes.engine import Engine
from lowtide.runtime.passes.window import Window
from lowtide.runtime.statistics.phase_clock import PhaseClock
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.statistics.timeline import Reason


class CallWatch:
    """Stands around the calls of one model, from `install` to `remove`. Changes nothing about them.

    Where the user compiles the model while it is managed, calls no longer come through here; nothing else follows from
    that than that their time counts as the rest of the step.
    """

    def __init__(self, model: nn.Module, phases: PhaseClock, call_over: Callable[[bool], None]) -> None:
        self._model = model
        self._phases = phases
        self._call_over = call_over
        self._inner: Callable[..., Any] | None = None

    def install(self) -> None:
        """Take the model's calls."""
        self._inner = compat.call_of(self._model)
        compat.replace_call(self._model, self._call)

    def remove(self) -> None:
        """Give them back, unless the user has put something else there. May be repeated."""
        if compat.call_of(self._model) == self._call:
            compat.replace_call(self._model, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner or compat.plain_call(self._model)
        if compat.is_compiled_around() or compat.backward_number() is not None:
            return inner(*args, **kwargs)
        self._phases.enter("forward")
        went_well = False
        try:
            output = inner(*args, **kwargs)
            went_well = True
        finally:
            self._phases.leave("forward")
            self._call_over(went_well)
        if torch.is_grad_enabled():
            self._phases.watch_backward(output)
        return output


WHAT = "activations"


class ActivationMover:
    """Copies through the session's own queues, with host memory charged to its tiers.

    Args:
        mover: The session's.
        tiers: The host, and what is locked of it.
        tracked: The emulated device's books, which must not count the host's memory; None on a real one.
        recorder: Is told of each copy.
    """

    def __init__(self, mover: Mover, tiers: Sequence[Tier], tracked: TrackedMemory | None, recorder: Recorder) -> None:
        self._mover = mover
        self._recorder = recorder
        self._tiers = tuple(tiers)
        self._tracked = tracked

    @property
    def device(self) -> torch.device:
        """Where the computation runs."""
        return self._mover.device

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory for one saved tensor, if the host's budget has it.

        Raises:
            BudgetError: It has not.
        """
        charged: list[Tier] = []
        try:
            for tier in self._tiers:
                tier.charge(num_bytes, WHAT)
                charged.append(tier)
            # It is the host's also where the host plays the device.
            with compat.without_modes():
                buffer = self._mover.host_buffer(num_bytes)
        except BaseException:
            for tier in charged:
                tier.credit(num_bytes, WHAT)
            raise
        if self._tracked is not None:
            self._tracked.exclude(buffer)
        return buffer

    def free_host_buffer(self, buffer: torch.Tensor) -> None:
        """Give it back."""
        self._mover.free_host_buffer(buffer)
        for tier in self._tiers:
            tier.credit(buffer.nbytes, WHAT)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """See `Mover`."""
        return self._mover.device_buffer(num_bytes)

    def grow(self, buffer: torch.Tensor) -> None:
        """See `Mover`."""
        self._mover.grow(buffer)

    def shrink(self, buffer: torch.Tensor, after: Sequence[Ticket]) -> None:
        """See `Mover`."""
        self._mover.shrink(buffer, after)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = ()) -> Copied:
        """See `Mover`."""
        copied = self._mover.to_device(target, source, after)
        self._recorder.on_activation(copied, Reason.BRING_BACK, source.nbytes)
        return copied

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[Ticket] = (), *, keep: bool = True
    ) -> Copied:
        """See `Mover`."""
        copied = self._mover.to_host(target, source, after, keep=keep)
        self._recorder.on_activation(copied, Reason.OFFLOAD, source.nbytes)
        return copied

    def now(self) -> Ticket:
        """See `Mover`."""
        return self._mover.now()

    def compute_after(self, ticket: Ticket) -> None:
        """See `Mover`."""
        self._mover.compute_after(ticket)

    def drain(self) -> None:
        """See `Mover`."""
        self._mover.drain()


class ModelCalls:
    """Stands in the calls of one model under one plan, from `enter` to `remove`. Its windows tell the engine."""

    def __init__(self, setup: SessionSetup, plan: Plan, engine: Engine) -> None:
        self._setup = setup
        self._plan = plan
        self._engine = engine
        self.windows = engine.forward.windows = _make_windows(setup.model, engine)
        self._watch = None if self.windows else CallWatch(setup.model, engine.recorder.phases, engine.forward.call_over)
        self.applied: Applied | None = None
        """Activation policies; None where all keep what they save."""
        self._tables: list[HostEmbedding] = []

    @property
    def root_window(self) -> Window | None:
        """The one around the whole model; None where nothing needs one."""
        return next((window for window in self.windows if window.path == ""), None)

    def enter(self, tiers: Tiers) -> None:
        """Go around the modules' calls; what policies take to the host is charged to the tiers."""
        setup, groups = self._setup, self._engine.groups.values()
        self.applied = _apply_activations(setup, self._plan, groups, tiers, self._engine.recorder)
        for group in groups:
            if group.is_on_host:
                self._tables.append(
                    put_on_host(setup.model, group.name, device=setup.mover.device, on_host=setup.on_host)
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
    by_path: dict[str, list[ManagedGroup]] = {}
    for group in engine.groups.values():
        if group.is_on_host or (group.is_resident and not any(map(is_away, group.members))):
            continue
        for path in group.stored.spec.modules:
            by_path.setdefault(path, []).append(group)
    if by_path or engine.schedule is Schedule.IN_BACKWARD or any(group.is_on_host for group in engine.groups.values()):
        by_path.setdefault("", [])
    return [
        Window(model.get_submodule(path), path, tuple(groups), engine.forward, engine.backward)
        for path, groups in by_path.items()
    ]


def _apply_activations(
    setup: SessionSetup, plan: Plan, groups: Collection[ManagedGroup], tiers: Tiers, recorder: Recorder
) -> Applied | None:
    policies = {group.name: group.activation for group in plan.groups if not isinstance(group.activation, Keep)}
    if not policies:
        return None
    storages = {compat.storage_key(chunk.device) for chunk in chunks_in(groups)}
    return apply(
        setup.model,
        policies,
        mover=ActivationMover(setup.mover, (tiers.host, tiers.pinned), setup.tracked, recorder),
        is_weight=lambda tensor: compat.storage_key(tensor) in storages,
        poison=setup.poison,
    )
