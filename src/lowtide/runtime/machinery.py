"""Machinery: the parts of one session, put together and taken apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
from torch import nn

from lowtide import compat
from lowtide.activations.apply import ActivationStats, Applied, apply
from lowtide.activations.host_embedding import HostEmbedding, put_on_host
from lowtide.activations.policy import Keep
from lowtide.memory.capacity import (
    host_capacity_bytes,
    pinned_capacity_bytes,
    resolve_budget,
)
from lowtide.memory.chunk import Chunk
from lowtide.memory.device_limit import DeviceLimit
from lowtide.memory.layout_types import Layout
from lowtide.memory.mover import Mover
from lowtide.memory.store import Books, ChunkStore
from lowtide.memory.tier import Tier
from lowtide.optim.update_types import Numerics
from lowtide.planning.check_plan import check_plan
from lowtide.planning.placement import by_first_use
from lowtide.planning.plan import Plan
from lowtide.planning.window_need import window_bytes_needed
from lowtide.runtime.activation_mover import ActivationMover
from lowtide.runtime.assembly import make_optimizer, make_windows, needs_managed_step
from lowtide.runtime.binding import Binder, Fill, copy_values, is_held, move_part, release
from lowtide.runtime.chunk_rows import chunk_rows
from lowtide.runtime.engine import Engine
from lowtide.runtime.giving_back import bring_state_to_parameters, return_rest, settle_for_good
from lowtide.runtime.gradients import GradientMover
from lowtide.runtime.host_need import host_need
from lowtide.runtime.host_pool import HostPool
from lowtide.runtime.host_worker import HostWorker
from lowtide.runtime.legacy import Legacy, forget_device_memory, place_gradient
from lowtide.runtime.managed_optimizer import ManagedOptimizer
from lowtide.runtime.observer import ObservedStore, StepObserver
from lowtide.runtime.recording import Recorder, is_resident
from lowtide.runtime.residency import Residency
from lowtide.runtime.session_stats import CacheRow, SessionStats, TierRow
from lowtide.runtime.tier_rows import tier_rows
from lowtide.runtime.timeline import Timeline
from lowtide.runtime.tracked_memory import TrackedMemory
from lowtide.runtime.unit import Unit
from lowtide.runtime.window import Window


class Machinery:
    """Everything that a session owns. Built in one go, taken apart by `close`.

    Args:
        mover: Of the device; an emulated one comes with `tracked`.
        tracked: The emulated device's books; None on a real one.
        fill: Where each parameter's values come from.
        numerics: Of updates through our own kernels; None for the optimizer's own.
        poison: Fill memory that holds nothing with NaN.
        observer: Watches the device's memory at each opening and closing of a window.
        legacy: Of the machinery before, where the session goes on under another plan; its tracker is stopped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        layout: Layout,
        mover: Mover,
        *,
        tracked: TrackedMemory | None,
        fill: Fill,
        max_grad_norm: float | None,
        numerics: Numerics | None,
        poison: bool,
        observer: StepObserver | None = None,
        legacy: Legacy | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.session: object = None
        """Kept alive for as long as the model goes through this."""
        self._layout = layout
        self._mover = mover
        self._tracked = tracked
        self._earlier_peak_bytes = 0
        """What the statistics would show, had `take_device_peak` not begun a new peak."""
        self._max_grad_norm = max_grad_norm
        self._numerics = numerics
        self._poison = poison
        self._observer = observer
        self._legacy = legacy
        self.limit: DeviceLimit | None = None
        """What the allocator may reserve; set when the model has left the device, if it was there."""
        self._count: torch.utils.hooks.RemovableHandle | None = None
        self._applied: Applied | None = None
        self._tables: list[HostEmbedding] = []
        self._clock_origin_s = time.perf_counter() if legacy is None else legacy.clock_origin_s
        self._original = (
            {id(parameter): parameter.device for parameter in model.parameters() if not parameter.is_meta}
            if legacy is None
            else legacy.original
        )
        self._need = host_need(layout, plan, optimizer, numerics)
        budgets = plan.budgets
        self._host = Tier("host", resolve_budget(budgets.host_bytes, host_capacity_bytes(), what="host budget"))
        pinned = resolve_budget(
            budgets.pinned_bytes, pinned_capacity_bytes(), what="pinned budget", limit="what can be pinned"
        )
        self._pinned = Tier("pinned", pinned)
        for tier in (self._host, self._pinned):
            for what in ("weights", "gradients", "staging"):
                tier.charge(getattr(self._need, f"{what.removesuffix('s')}_bytes"), what)
        self._host.charge(self._need.state_bytes, "optimizer state")
        for tier in (self._host, self._pinned):
            tier.charge(self._need.paged_bytes, "optimizer state that visits the device")
        self._host.charge(self._need.table_bytes, "tables that stay, and their gradients")
        self._device = Tier("device", plan.budgets.device_bytes if plan.budgets.device_bytes is not None else 1 << 62)
        self._books: Books = tracked if tracked is not None else self._device
        self._recorder = Recorder() if legacy is None else legacy.recorder
        self._worker = HostWorker()
        self._units: dict[str, Unit] = {}
        self.moved_along: list[tuple[nn.Module, str, torch.device]] = [] if legacy is None else legacy.moved_along
        """Buffers and unmanaged parameters, and where they were before: `close` takes them back."""
        # An emulated device's host memory must not be born on the device.
        with self._on_host():
            self._pool = HostPool(
                mover,
                self._worker,
                self._need.total_bytes,
                (self._host, self._pinned),
                cached_buffers=plan.cached_buffers,
                defragment_every=plan.defragment_every,
                on_move=lambda key, flat: move_part(self._units, key, flat),
                may_move=self._is_quiet,
                poison=poison,
            )
        if tracked is not None:
            tracked.exclude(self._pool.buffer)
        with contextlib.ExitStack() as undo:
            # Where anything below is refused, the model is as it was.
            undo.callback(self._pool.close)
            binder = self._make_binder()
            undo.callback(release, binder.bounds, self._original)
            groups = {group.name: group for group in layout.groups}
            for group in plan.groups:
                self._units[group.name] = binder.bind(groups[group.name], group, fill)
            for place, name in enumerate(by_first_use(layout)):
                self._units[name].place = place
            for bound in binder.bounds:
                place_gradient(bound, is_copied=legacy is not None)
            self._engine = self._make_engine()
            undo.callback(self._engine.stop)
            self._windows = self._engine.windows = make_windows(model, self._engine)
            self._managed = self._make_optimizer()
            undo.callback(self._release_optimizer)
            undo.callback(self._remove_from_calls)
            self._applied = self._apply_activations()
            for unit in self._units.values():
                if unit.is_on_host:
                    self._tables.append(put_on_host(model, unit.name, device=mover.device, on_host=self._on_host))
            for window in self._windows:
                window.install()  # outside of the policies: a group is open while its forward runs again
            undo.pop_all()

    # -- asked by the session ------------------------------------------------------------------------------------------

    @property
    def is_on_cuda(self) -> bool:
        """Whether the device is a real one."""
        return self._mover.device.type == "cuda"

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The norm before clipping."""
        return None if self._managed is None else self._managed.last_norm

    @property
    def root_window(self) -> Window | None:
        """The one around the whole model; None where nothing needs one."""
        return next((window for window in self._windows if window.path == ""), None)

    def settle(self) -> None:
        """Wait until every update is made and every copy is done."""
        for unit in self._units.values():
            self._engine.settle_unit(unit)
            for bound in unit.bounds:
                bound.settle_gradient()
        self._worker.check()
        self._mover.drain()

    def timeline(self) -> Timeline:
        """What the lanes did in the last steps."""
        self._mover.drain()
        resident = [chunk for chunk in self._chunks() if is_resident(chunk)]
        return self._recorder.timeline(self._mover.now(), is_emulated=self._tracked is not None, resident=resident)

    def stats(self) -> SessionStats:
        """What happened so far."""
        timeline = self.timeline()
        seconds = self._recorder.seconds(timeline)
        cache, _ = self._pool.counts()
        return SessionStats(
            num_steps=self._recorder.num_updates or self._recorder.step,
            moved=self._recorder.moved(),
            exposed_copy_s=seconds.waiting_s,
            seconds=seconds,
            chunks=chunk_rows(self.plan, self._units, timeline),
            cache=CacheRow(hits=cache.num_hits, misses=cache.num_misses, held_bytes=cache.held_bytes),
            tiers=self._tier_rows(),
            is_emulated=self._tracked is not None,
            activations=self.activation_stats(),
        )

    def take_device_peak(self) -> int:
        """The most that the device held since this was last called, or since the start; a new peak begins."""
        if self._tracked is not None:
            peak_bytes = shown_bytes = self._tracked.reset_peak()
        else:
            device = self._mover.device
            peak_bytes, shown_bytes = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._earlier_peak_bytes = max(self._earlier_peak_bytes, shown_bytes)
        return peak_bytes

    def activation_stats(self) -> ActivationStats | None:
        """What activation policies did; None where all keep what they save."""
        return None if self._applied is None else self._applied.stats()

    def close(self) -> None:
        """Take everything apart; model and optimizer are plain afterwards, whatever condition the session was in."""
        error = settle_for_good(self._engine, self._worker)
        if self.limit is not None:
            # Before weights go back to a device that they came from.
            self.limit.lift()
        self._remove_from_calls()
        self._engine.stop()
        try:
            self._release_optimizer()
        except Exception as failed:
            # What cannot be given back must not keep the rest.
            error = error or failed
        if self._tracked is not None:
            # Before the parameters get memory of their own: that is no longer the session's.
            self._tracked.stop()
        for unit in self._units.values():
            unit.consumed.clear()
            unit.look_at_host()
            release(unit.bounds, self._original)
        return_rest(self.moved_along)
        bring_state_to_parameters(self.optimizer)
        self._pool.close()
        if error is not None:
            raise error

    def is_quiet(self) -> bool:
        """Whether the last step went well and nothing of it is left, so that `follow` may be called."""
        if self._engine.lost is not None or not self._engine.is_idle():
            return False
        self.settle()
        return self._engine.is_quiet()

    def follow(self, plan: Plan) -> Machinery:
        """Take this apart and put the session together anew for another plan; `is_quiet` must hold.

        Weights, gradients and optimizer state are carried over exactly, the optimizer stays wrapped, and steps, copies
        and fetches are counted on. The host holds the weights a second time while this runs.
        """
        check_plan(plan, self._layout)
        legacy = self._hand_over()
        try:
            machinery = Machinery(
                self.model,
                self.optimizer,
                plan,
                self._layout,
                self._mover,
                tracked=self._tracked,
                fill=copy_values,
                max_grad_norm=self._max_grad_norm,
                numerics=self._numerics,
                poison=self._poison,
                legacy=legacy,
            )
        except BaseException:
            if legacy.managed is not None:
                legacy.managed.remove()
            return_rest(self.moved_along)
            bring_state_to_parameters(self.optimizer)
            raise
        machinery.limit = self.limit
        if self._tracked is not None:
            self._tracked.start()
        elif self.is_on_cuda:
            # What filled the new buffers must be done before a copy on another stream takes their place.
            torch.cuda.synchronize(self._mover.device)
        return machinery

    def _hand_over(self) -> Legacy:
        self._worker.close()
        self._remove_from_calls()
        self._engine.stop()
        peak_bytes = next(row.peak_bytes for row in self._tier_rows() if row.tier == "device")
        host = torch.device("cpu")
        with self._on_host():
            for unit in self._units.values():
                release(unit.bounds, dict.fromkeys(map(id, (bound.parameter for bound in unit.bounds)), host))
        if self._tracked is not None:
            # What the next machinery makes is counted by itself.
            self._tracked.stop()
        forget_device_memory(self._units.values(), self._books)
        self._pool.close()
        return Legacy(
            original=self._original,
            moved_along=self.moved_along,
            recorder=self._recorder,
            clock_origin_s=self._clock_origin_s,
            managed=self._managed,
            num_fetches={chunk.spec.name: chunk.num_fetches for chunk in self._chunks()},
            peak_bytes=peak_bytes,
        )

    # -- putting together ----------------------------------------------------------------------------------------------

    def _make_binder(self) -> Binder:
        return Binder(
            self.model,
            self._layout,
            self.plan,
            self._mover,
            self._pool,
            self._books,
            has_optimizer=self.optimizer is not None,
            on_device_buffer=lambda buffer: None if self._tracked is None else self._tracked.exclude_charged(buffer),
            on_host_memory=self._mark_host_memory,
        )

    def _make_engine(self) -> Engine:
        gradients = GradientMover(self._mover, self._worker, self._pool.staging, self.plan.schedule, self._recorder)
        residency = Residency(self._units.values(), self._recorder)
        engine = Engine(residency, self._mover, gradients, self._worker, self._recorder, self.plan.schedule)
        window_bytes = self.plan.budgets.window_bytes
        residency.store = (ChunkStore if self._observer is None else ObservedStore)(
            [unit.group for unit in self._units.values()],
            self._mover,
            [self._books],
            window_bytes=window_bytes if window_bytes is not None else window_bytes_needed(self._layout, self.plan),
            prefetch_depth=self.plan.prefetch_depth,
            listener=residency,
        )
        for unit in self._units.values():
            unit.settler = engine
        if self._observer is not None:
            self._observer.watch(
                residency.store, sum(chunk.spec.nbytes for chunk in self._chunks() if is_resident(chunk))
            )
            engine.observer = self._observer
        if self._legacy is not None:
            for chunk in self._chunks():
                chunk.num_fetches = self._legacy.num_fetches[chunk.spec.name]
        return engine

    def _apply_activations(self) -> Applied | None:
        policies = {
            group.name: group.activation for group in self.plan.groups if not isinstance(group.activation, Keep)
        }
        if not policies:
            return None
        storages = {compat.storage_key(chunk.device) for chunk in self._chunks()}
        return apply(
            self.model,
            policies,
            mover=ActivationMover(self._mover, (self._host, self._pinned), self._tracked, self._recorder),
            is_weight=lambda tensor: compat.storage_key(tensor) in storages,
            poison=self._poison,
        )

    def _make_optimizer(self) -> ManagedOptimizer | None:
        if self.optimizer is None:
            return None
        installed = None if self._legacy is None else self._legacy.managed
        if installed is None and not needs_managed_step(self.plan, self._windows, self._max_grad_norm, self._numerics):
            # Nothing to manage: torch's own step runs. State that was loaded before may lie elsewhere.
            bring_state_to_parameters(self.optimizer)
            self._count = self.optimizer.register_step_post_hook(lambda *_: self._recorder.count_update())
            return None
        return make_optimizer(
            self.optimizer,
            self._engine,
            self._pool,
            self.plan,
            max_grad_norm=self._max_grad_norm,
            numerics=self._numerics,
            clock_origin_s=self._clock_origin_s,
            on_host_memory=self._mark_host_memory,
            installed=installed,
        )

    def _release_optimizer(self) -> None:
        if self._managed is not None:
            self._managed.remove()
        if self._count is not None:
            self._count.remove()

    def _remove_from_calls(self) -> None:
        """The model's modules are called as before; what was put in last goes first."""
        for window in self._windows:
            window.remove()
        for table in self._tables:
            table.remove()
        if self._applied is not None:
            self._applied.remove()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _on_host(self) -> contextlib.AbstractContextManager[None]:
        """What is made in it is the host's: an emulated device would count it as its own."""
        return contextlib.nullcontext() if self._tracked is None else self._tracked.on_host()

    def _mark_host_memory(self, memory: torch.Tensor) -> None:
        if self._tracked is not None:
            self._tracked.exclude(memory)

    def _is_quiet(self) -> bool:
        """Whether nothing points into the host's memory but what `move_part` knows. Waits for updates, if that helps."""
        if not self._units or not self.is_quiet():
            return False
        return not any(is_held(bound) for unit in self._units.values() for bound in unit.bounds)

    def _chunks(self) -> Sequence[Chunk]:
        return [chunk for unit in self._units.values() for chunk in unit.group.chunks]

    def _tier_rows(self) -> tuple[TierRow, ...]:
        if self._tracked is not None:
            peaks = [self._tracked.peak_bytes, self._earlier_peak_bytes]
        elif self.is_on_cuda:
            peaks = [torch.cuda.max_memory_reserved(self._mover.device), self._earlier_peak_bytes]
        else:
            peaks = []
        if self._legacy is not None:
            peaks.append(self._legacy.peak_bytes)
        if self._observer is not None:
            peaks.append(self._observer.gauge.highest_bytes)
        return tier_rows(
            self._engine.residency.store,
            self._chunks(),
            device_peak_bytes=max(peaks, default=None),
            device_budget_bytes=self.plan.budgets.device_bytes,
            host=self._host,
            pinned=self._pinned,
            host_predicted_bytes=self._need.everything_bytes,
        )
