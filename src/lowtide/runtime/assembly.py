"""Assembly: makes the parts of a session, in order.

`SessionSetup` says which model and optimizer the session is for, and how they are trained. From it are made the runner of the
optimizer, the executor of the plan, `ModelCalls` around the model's calls, and the optimizer's new step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.apply import Applied, apply
from lowtide.activations.host_embedding import HostEmbedding, put_on_host
from lowtide.activations.policy import Keep
from lowtide.distributed.ranks import Ranks
from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.memory.chunk import Layout
from lowtide.memory.mover import GradientCarrier
from lowtide.memory.store import Books
from lowtide.optim.rules import Adafactor, require_rule
from lowtide.optim.update_types import Numerics
from lowtide.planning.placement import parts_by_chunk, window_bytes_needed
from lowtide.planning.plan import Collective, Plan, Schedule, Site, Weights
from lowtide.runtime.emulation.memory import TrackedMemory
from lowtide.runtime.host_memory import HostPool, Tiers
from lowtide.runtime.parameters.group import ManagedGroup, chunks_in
from lowtide.runtime.passes.activation_mover import ActivationMover
from lowtide.runtime.passes.device_switch import DeviceSwitch
from lowtide.runtime.passes.devices import DeviceSet
from lowtide.runtime.passes.exchange import Averaged, Bucket, GradientAverage, SharedBuffers, WholeBucket
from lowtide.runtime.passes.executor import CallWatch, Executor
from lowtide.runtime.passes.forward import Gate, Window
from lowtide.runtime.passes.replicas import ReplicatedCalls
from lowtide.runtime.passes.spread import ChunkParts, PartBucket
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer
from lowtide.runtime.updates.managed_optimizer import ManagedOptimizer
from lowtide.runtime.updates.paged_state import Pages
from lowtide.runtime.updates.proof import Proof, prove, prove_slices
from lowtide.runtime.updates.worker import HostWorker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionSetup:
    """Stays the same when the session goes on under another plan."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None where the model is run and not trained."""
    layout: Layout
    """How the model's groups lie in chunks."""
    mover: GradientCarrier
    """Copies to and from the device; an emulated one comes with `tracked`."""
    tracked: TrackedMemory | None
    """The emulated device's books; None on a real one."""
    max_grad_norm: float | None
    """Clip the gradients to this norm before each step; None leaves them."""
    numerics: Numerics | None
    """How our own kernels update; None for the optimizer's own step."""
    poison: bool
    """Fill memory that holds nothing with NaN."""
    ranks: Ranks | None = None
    """The processes that train the model together; None for one."""
    devices: DeviceSet | None = None
    """The devices over which the model is replicated, behind `mover`; None for one."""

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
    if plan.sharding is not None and plan.sharding.collective is Collective.GATHER:
        _prove_slices(optimizer, setup)
    if setup.numerics is None and needs_managed_step(setup, plan):
        sites = {site for group in plan.groups for site in group.sites}
        on_device, on_host = [setup.mover.device], [torch.device("cpu")]
        return prove(optimizer, on_device * (Site.DEVICE in sites) + on_host * (Site.HOST in sites))
    return Proof()


def _prove_slices(optimizer: torch.optim.Optimizer, setup: SessionSetup) -> None:
    if setup.numerics is None:
        prove_slices(optimizer, torch.device("cpu"))
        return
    for group in optimizer.param_groups:
        if isinstance(require_rule(optimizer, group), Adafactor):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} updates whole matrices, and ranks that gather have equal parts of each chunk, which "
                "cut them; give Sharding(collective='one to all'), where each rank updates whole parameters"
            )


def make_runner(
    setup: SessionSetup,
    groups: Iterable[ManagedGroup],
    recorder: Recorder,
    *,
    proof: Proof,
    installed: ManagedOptimizer | None,
) -> ChunkOptimizer:
    """Steps the user's optimizer by chunks; goes on with the state of `installed`, where the session had another plan before."""
    assert setup.optimizer is not None
    if setup.numerics is None:
        return ChunkOptimizer(setup.optimizer, advances_groups=proof.advances_groups, fuses_on_host=setup.is_on_cuda)
    groups = list(groups)
    paged = [id(managed.parameter) for group in groups for managed in group.members if managed.site is Site.PAGED]
    leaves = {id(managed.parameter): managed.leaf for group in groups if group.is_spread for managed in group.members}
    runner = KernelOptimizer(
        setup.optimizer,
        setup.numerics,
        leaves=leaves,
        pages=Pages(setup.mover, recorder, setup.mark_host_memory) if paged else None,
        paged=paged,
        on_host_memory=setup.mark_host_memory,
    )
    if installed is not None and isinstance(installed.runner, KernelOptimizer):
        runner.kept.go_on_from(installed.runner.kept)
    return runner


def make_executor(
    setup: SessionSetup,
    plan: Plan,
    groups: Collection[ManagedGroup],
    runner: ChunkOptimizer | None,
    pool: HostPool,
    worker: HostWorker,
    recorder: Recorder,
    *,
    books: Books,
    clock_origin_s: float,
    observer: StepObserver | None,
    switch: DeviceSwitch | None,
) -> Executor:
    """The executor of the plan over these groups; `observer` watches its store, `switch` is between replicas' devices."""
    window_bytes = plan.budgets.window_bytes
    return Executor(
        groups,
        runner,
        setup.mover,
        books,
        pool.staging,
        worker,
        recorder,
        plan.schedule,
        window_bytes=window_bytes if window_bytes is not None else window_bytes_needed(setup.layout, plan),
        prefetch_depth=plan.prefetch_depth,
        # Our own kernels clip as they update, and need the norm alone.
        takes_totals=setup.numerics is not None and setup.max_grad_norm is not None,
        clock_origin_s=clock_origin_s,
        average=None if setup.ranks is None else _make_average(setup, setup.ranks, groups),
        observer=observer,
        switch=switch,
    )


def _make_average(setup: SessionSetup, ranks: Ranks, groups: Collection[ManagedGroup]) -> GradientAverage:
    """For all that is trained, also what no chunk has, and what the optimizer holds beside the model.

    Raises:
        ConfigError: A table is looked up on the host, and the ranks send between devices.
    """
    tables = [group.name for group in groups if group.is_on_host]
    if tables and setup.is_on_cuda:
        raise ConfigError(
            f"group {tables[0]} stays on the host (weights='host'), and its gradients cannot be averaged between GPUs; make it "
            "'streamed' or 'resident'",
            key="ranks",
        )
    owners = {id(managed.parameter): (group, managed) for group in groups for managed in group.members}
    named = {id(parameter): (name, parameter) for name, parameter in setup.model.named_parameters()}
    for params in () if setup.optimizer is None else setup.optimizer.param_groups:
        for number, parameter in enumerate(params["params"]):
            named.setdefault(id(parameter), (f"parameter {number} of the optimizer", parameter))
    members = [
        Averaged(parameter, name, owners.get(key))
        for key, (name, parameter) in named.items()
        if parameter.requires_grad
    ]
    by_chunk = {
        chunk.spec.name: chunk.exchange for chunk in chunks_in(groups) if isinstance(chunk.exchange, ChunkParts)
    }

    def make_bucket(found: Sequence[Averaged]) -> Bucket:
        owner = found[0].owner
        parts = None if owner is None else by_chunk.get(owner[1].chunk.spec.name)
        return WholeBucket(found) if parts is None else PartBucket(parts, found)

    return GradientAverage(ranks, members, setup.mover.device, make_bucket)


def spread_chunks(setup: SessionSetup, plan: Plan) -> dict[str, ChunkParts]:
    """By the name of each chunk that is spread over ranks, its parts.

    Raises:
        ConfigError: The plan is for several ranks, and there are none, or another number.
    """
    sharding = plan.sharding
    if sharding is None:
        return {}
    if setup.ranks is None:
        raise ConfigError(
            f"the plan spreads weights over {sharding.shards} ranks, and this is one process without a group; start the script "
            "with torchrun and give ranks=torch.distributed.group.WORLD, or make the plan without sharding",
            key="ranks",
        )
    spread = setup.ranks.spread(sharding.shards)
    chunks = {chunk.name: chunk for chunk in setup.layout.chunks}
    return {
        name: ChunkParts(chunks[name], parts, spread, setup.mover, sharding.collective)
        for name, parts in parts_by_chunk(plan, setup.layout).items()
    }


def install_optimizer(
    setup: SessionSetup,
    executor: Executor,
    *,
    proof: Proof,
    after_step: Callable[[], None] | None,
    installed: ManagedOptimizer | None,
) -> ManagedOptimizer:
    """The user's optimizer, stepping through the executor; `installed` goes on where the session had another plan before."""
    assert setup.optimizer is not None
    assert executor.updater is not None
    groups, device = list(executor.groups.values()), setup.mover.device
    if installed is not None:
        executor.updater.place_state(groups, device)
        installed.serve(executor, after_step)
        return installed
    managed = ManagedOptimizer(
        setup.optimizer,
        executor,
        max_grad_norm=setup.max_grad_norm,
        num_closure_calls=proof.num_closure_calls,
        after_step=after_step,
    )
    runner = managed.runner
    try:
        if isinstance(runner, KernelOptimizer):
            runner.kept.take_over()
        executor.updater.place_state(groups, device)
        managed.install()
    except BaseException:
        if isinstance(runner, KernelOptimizer):
            runner.kept.hand_back()
        raise
    return managed


class ModelCalls:
    """Goes around the calls of one model under one plan, from `enter` to `remove`: its windows call the executor's passes."""

    def __init__(self, setup: SessionSetup, plan: Plan, executor: Executor, switch: DeviceSwitch | None) -> None:
        self._setup = setup
        self._plan = plan
        self._executor = executor
        self.windows = executor.windows(setup.model)
        self._watch = (
            None if self.windows else CallWatch(setup.model, executor.recorder.phases, executor.forward.call_over)
        )
        self.applied: Applied | None = None
        """Activation policies; None where all keep what they save."""
        self._tables: list[HostEmbedding] = []
        self._buffers: SharedBuffers | None = None
        self._replicas: ReplicatedCalls | None = None
        if switch is not None:
            self._replicas = ReplicatedCalls(setup.model, executor, switch, self.root_window)
            self.go_through(self._replicas.call)

    @property
    def root_window(self) -> Window | None:
        """The one around the whole model; None where nothing needs one."""
        return next((window for window in self.windows if window.path == ""), None)

    def go_through(self, gate: Gate | None) -> None:
        """The gate decides how calls of the whole model go on, until it is None."""
        for place in (self.root_window, self._watch):
            if place is not None:
                place.go_through(gate)

    def enter(self, tiers: Tiers) -> None:
        """Go around the modules' calls; what policies take to the host is charged to the tiers."""
        setup, groups = self._setup, self._executor.groups.values()
        self.applied = _apply_activations(setup, self._plan, groups, tiers, self._executor.recorder)
        for group in groups:
            if group.is_on_host:
                self._tables.append(
                    put_on_host(setup.model, group.name, device=setup.mover.device, on_host=setup.on_host)
                )
        for window in self.windows:
            window.install()  # outside of the policies: a group is open while its forward runs again
        if self._watch is not None:
            self._watch.install()
        if setup.ranks is not None and self._executor.average is not None:
            self._buffers = SharedBuffers(setup.model, setup.ranks, self._executor.average)

    def remove(self) -> None:
        """The modules are called as before; what was put in last goes first. Also after an `enter` that was refused."""
        if self._buffers is not None:
            self._buffers.remove()
        if self._replicas is not None:
            self._replicas.remove()
        if self._watch is not None:
            self._watch.remove()
        for window in self.windows:
            window.remove()
        for table in self._tables:
            table.remove()
        if self.applied is not None:
            self.applied.remove()


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
