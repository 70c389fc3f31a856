"""The parts of a session under one plan, put together and taken apart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.errors import BudgetError, SessionError
from lowtide.memory.store import Books
from lowtide.memory.tier import DeviceLimit
from lowtide.optim.state import ParameterState
from lowtide.planning.placement import by_first_use, check_plan
from lowtide.planning.plan import Plan, Schedule, Site
from lowtide.runtime.assembly import (
    ModelCalls,
    SessionSetup,
    install_optimizer,
    make_executor,
    make_runner,
    needs_managed_step,
    prove_optimizer,
    spread_chunks,
)
from lowtide.runtime.hand_over import (
    HandOver,
    bring_state,
    bring_state_to_parameters,
    count_state,
    forget_device_memory,
    return_rest,
    settle_for_good,
)
from lowtide.runtime.host_memory import HostNeed, HostPool, Tiers, charged_tiers, host_need
from lowtide.runtime.parameters.binding import Binder, Fill, copy_values, move_part, place_gradient, unbind
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter, chunks_in
from lowtide.runtime.parameters.pending import Changes, ReadingSave
from lowtide.runtime.parameters.pieces import Values, copied, cut, cut_state, whole_values
from lowtide.runtime.passes.device_switch import DeviceSwitch
from lowtide.runtime.passes.executor import Executor, host_gradients
from lowtide.runtime.passes.lock import Process
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.statistics.reporting import DevicePeak, Reporter
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer, KernelStates
from lowtide.runtime.updates.managed_optimizer import ManagedOptimizer
from lowtide.runtime.updates.proof import Proof
from lowtide.runtime.updates.worker import HostWorker

BROKEN_OFF = (
    "the change to another plan broke off: the session is closed, and the model and the optimizer are plain, as after the last "
    "step. To go on under a plan, call lowtide.manage again"
)


class PlanRun:
    """Everything that a session owns. Built in one go, taken apart by `close`, or by `hand_over` for another plan.

    Args:
        setup: What the session is about.
        fill: Where each parameter's values come from.
        observer: Watches the device's memory at each opening and closing of a window.
        handed_over: By the plan run before, where the session goes on under another plan; its tracker is stopped.
    """

    def __init__(
        self,
        setup: SessionSetup,
        plan: Plan,
        *,
        fill: Fill,
        observer: StepObserver | None = None,
        handed_over: HandOver | None = None,
    ) -> None:
        self.setup = setup
        self.plan = plan
        self._management: object = None
        self.limit: DeviceLimit | None = None
        """What the allocator may reserve; set when the model has left the device, if it was there."""
        self._has_begun = handed_over is not None
        """Whether all ranks have begun, so that what no rank has as a whole must be gathered."""
        self.is_closed = False
        """Whether `close` has given everything back."""
        self._handed_over = handed_over
        self._observer = observer
        self._counting: list[torch.utils.hooks.RemovableHandle] = []
        self._clock_origin_s = time.perf_counter() if handed_over is None else handed_over.clock_origin_s
        self._original = (
            {id(parameter): parameter.device for parameter in setup.model.parameters() if not parameter.is_meta}
            if handed_over is None
            else handed_over.original
        )
        self._proof = Proof() if setup.optimizer is None else prove_optimizer(setup.optimizer, setup, plan)
        named = dict(setup.model.named_parameters())
        self._parts = spread_chunks(setup, plan)
        mine = {name: parts.mine for name, parts in self._parts.items()}
        need = host_need(setup.layout, plan, setup.optimizer, setup.numerics, named, mine)
        self._recorder = Recorder(setup.mover) if handed_over is None else handed_over.recorder
        self._worker = HostWorker()
        self._groups: dict[str, ManagedGroup] = {}
        self.moved_along: list[tuple[nn.Module, str, torch.device]] = (
            [] if handed_over is None else handed_over.moved_along
        )
        """Buffers and unmanaged parameters, and where they were before: `close` takes them back."""
        self._tiers, self._pool = self._take_host(need)
        self._books: Books = setup.tracked if setup.tracked is not None else self._tiers.device
        if setup.devices is not None:
            self._books = setup.devices.books(self._books)
        self._switch: DeviceSwitch | None = None
        self._managed: ManagedOptimizer | None = None
        with contextlib.ExitStack() as undo:
            # Where anything below is refused, the model is as it was.
            undo.callback(self._worker.close)
            undo.callback(self._pool.close)
            if handed_over is None:
                undo.callback(bring_state_to_parameters, setup.optimizer)
            self._bind(fill, undo)
            if setup.devices is not None:
                self._switch = DeviceSwitch(setup.devices, setup.model, self._groups.values(), setup.mark_device_buffer)
                undo.callback(self._release_devices)
            self._executor = self._make_executor()
            undo.callback(self._executor.stop)
            self._executor.start()
            self.calls = ModelCalls(setup, plan, self._executor, self._switch)
            undo.callback(self._release_optimizer)
            self._managed = self._install_optimizer()
            undo.callback(self.calls.remove)
            self.calls.enter(self._tiers)
            undo.pop_all()

    # -- asked by the session ------------------------------------------------------------------------------------------

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The norm before clipping."""
        return None if self._managed is None else self._managed.last_norm

    @cached_property
    def peak(self) -> DevicePeak:
        """The most that the device held."""
        before_bytes = None if self._handed_over is None else self._handed_over.peak_bytes
        return DevicePeak(self.setup, before_bytes, None if self._observer is None else self._observer.gauge)

    @cached_property
    def reporter(self) -> Reporter:
        """What happened so far, as plain data."""
        return Reporter(
            setup=self.setup,
            plan=self.plan,
            groups=self._groups,
            recorder=self._recorder,
            pool=self._pool,
            store=self._executor.residency.store,
            tiers=self._tiers,
            need=self._tiers.need,
            peak=self.peak,
            applied=self.calls.applied,
            switch=self._switch,
        )

    def keep(self) -> None:
        """The session has begun: what was kept to undo `manage` can go."""
        if self._managed is not None and isinstance(self._managed.runner, KernelOptimizer):
            self._managed.runner.kept.keep()

    def settle(self) -> None:
        """Wait until every update is made and every copy is done."""
        self._executor.settle()

    def is_quiet(self) -> bool:
        """Whether the last step went well and nothing of it is left."""
        if self._executor.lost_step.reason is not None or not self._executor.is_idle():
            return False
        self.settle()
        return self._executor.is_quiet()

    def may_hand_over(self) -> bool:
        """Whether it is quiet, and nobody holds memory of weights, which would show the old ones under another plan."""
        return self.is_quiet() and not any(group.is_held() for group in self._groups.values())

    def managed_ids(self) -> set[int]:
        """The `id` of each of the model's modules, and of the parameters that it had when it was managed."""
        return {*self._original, *map(id, self.setup.model.modules())}

    def refuse_step_of(self, other: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer that is not the session's, where the last backward dropped its gradients, or left those of
        this rank alone.
        """
        self._executor.backward.refuse_dropped(other)
        if self._executor.average is not None:
            self._executor.average.refuse_local_sums(other, is_own=False)

    @property
    def was_called(self) -> bool:
        """Whether the model has been called."""
        return self._executor.forward.was_called

    @property
    def process(self) -> Process:
        """The one that manages the model."""
        return self._executor.process

    def has_raised(self) -> bool:
        """Whether the last call of the model, backward or step raised, and none has gone well since."""
        return self._executor.has_raised()

    def tell_why_mixed(self) -> str | None:
        """Which weights a backward has moved that broke off; None where all weights are those of one step. Told once."""
        return self._executor.tell_why_mixed()

    def belong_to(self, management: object) -> None:
        """Keep the management alive for as long as the model goes through this."""
        self._management = management

    def follow(self, before: PlanRun) -> None:
        """The session goes on here, under another plan."""
        self.limit, self._management = before.limit, before._management

    def be_over(self) -> None:
        """Everything was given back."""
        self.is_closed = True

    def limit_device(self, limit: DeviceLimit) -> None:
        """What the allocator may reserve from now on, until `close`; the model has left the device, if it was there."""
        self.limit = limit

    # -- saved and loaded ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def between_steps(self, what: str, *, discards_step: bool = False) -> Iterator[None]:
        """A call of this thread that looks at all weights or changes them; everything is settled when it begins.

        Args:
            what: The call, for messages.
            discards_step: What went wrong with the last step is of no interest: everything is about to be replaced.

        Raises:
            SessionError: A forward or a backward is under way.
        """
        executor = self._executor
        executor.process.require()
        with executor.calling(what):
            executor.mend()
            if executor.is_in_step():
                raise SessionError(
                    f"{what} was called inside of a forward or a backward, where weights are on their way; call it between "
                    "two steps"
                )
            executor.before_any_change()
            if discards_step:
                self._discard_step()
            self.settle()
            if (kept := self.kept_states) is not None:
                kept.settle()
            for group in self._groups.values():
                group.adopt_foreign_data()
            yield

    def _discard_step(self) -> None:
        # A failed update, and a gradient that was not finite, are forgotten once they are told of.
        for _ in range(len(chunks_in(self._groups.values())) + 1):
            with contextlib.suppress(Exception):  # whatever an update of the user's optimizer raises
                self.settle()
                break
        self._executor.lost_step.be_told()
        self._executor.forget_step()

    def lose_load(self, reason: str) -> None:
        """A checkpoint was loaded in part: neither a step nor a save, until the gradients are cleared or it is loaded again."""
        self._executor.lost_step.lose_to_load(reason)

    def refuse_gradients(self, what: str) -> None:
        """Refuse a call between a backward and the `step()` that uses its gradients, or after a step that broke off.

        Raises:
            SessionError: The message says what to do before.
        """
        executor = self._executor
        if executor.lost_step.reason is not None:
            raise SessionError(f"{what} was called after what broke off: {executor.lost_step.reason}")
        optimizer = self.setup.optimizer
        if optimizer is None or not executor.recorder.has_backward:
            return
        is_taken = any(group.guards_gradients for group in self._groups.values())
        with compat.without_torch_function():
            held = sum(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
            held += sum(managed.gradient is not None for managed in self._spread_members().values())
        if held or is_taken:
            found = "weights that moved in it" if is_taken else f"{held} gradients"
            raise SessionError(
                f"{what} was called between a backward and its step(), with {found}, which are no part of a checkpoint; call "
                "it after optimizer.step(), or give the step up with optimizer.zero_grad()"
            )

    @property
    def num_updates(self) -> int:
        """Steps that the optimizer has taken in this session."""
        return self._recorder.num_updates

    @property
    def kept_states(self) -> KernelStates | None:
        """The optimizer's state as our own kernels keep it; None where it is with the optimizer."""
        runner = None if self._managed is None else self._managed.runner
        return runner.kept if isinstance(runner, KernelOptimizer) else None

    def homes(self) -> dict[int, torch.Tensor]:
        """By the `id` of each managed parameter, the memory in which its value is. All must be settled."""
        return {
            id(managed.parameter): managed.home if managed.foreign is None else managed.foreign
            for group in self._groups.values()
            for managed in group.members
        }

    def values(self) -> dict[str, torch.Tensor]:
        """By name, the memory in which each of the model's parameters has its value."""
        self.settle()
        homes = self.homes()
        return {name: homes.get(id(parameter), parameter) for name, parameter in self.setup.model.named_parameters()}

    def together(self, what: str) -> contextlib.AbstractContextManager[dict[str, Mapping[str, object]]]:
        """All ranks do the same in here, or all of them fail; the body fills in what must be the same."""
        ranks = self.setup.ranks
        return contextlib.nullcontext({}) if ranks is None else ranks.agreeing(what)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, or the only process."""
        return self.setup.ranks is None or self.setup.ranks.rank == 0

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards in here keep their gradients to this rank."""
        average = self._executor.average
        if average is not None and self.plan.schedule is Schedule.IN_BACKWARD:
            raise SessionError(
                "no_sync() keeps gradients for a later backward, and the schedule 'in_backward' uses them up in each; use the "
                "schedule 'deferred'"
            )
        return contextlib.nullcontext() if average is None else average.skipped()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All groups that are spread over the ranks are whole on this one; what is written to them is kept."""
        groups = [group for group in self._groups.values() if group.is_spread]
        residency = self._executor.residency
        room = sum(chunk.spec.nbytes for chunk in chunks_in(groups))
        with self.between_steps("session.gathered"), residency.store.with_room_for(room):
            opened: list[ManagedGroup] = []
            try:
                for group in groups:
                    residency.open(group)
                    opened.append(group)
                yield
                for group in opened:
                    group.take_foreign_data()
                    for chunk in group.stored.chunks:
                        residency.keep_write(group, chunk)
            finally:
                for group in opened:
                    residency.close(group)

    @property
    def host_tiers(self) -> Tiers:
        """The budgets of the host's memory."""
        return self._tiers

    def changes(self) -> dict[int, Changes]:
        """By the `id` of each managed parameter, how far its changes are known beforehand. All must be settled."""
        hides_state = self.kept_states is not None
        found: dict[int, Changes] = {}
        for group in self._groups.values():
            place = group.place if self.plan.schedule is Schedule.DEFERRED else -group.place
            for managed in group.members:
                is_free = managed.foreign is None and not managed.is_home_held()
                found[id(managed.parameter)] = Changes(
                    home=managed.home,
                    place=place,
                    # Models use resident weights as they are, without anybody noticing.
                    announces_weight=is_free and not group.is_resident,
                    announces_state=self._managed is not None,
                    hides_state=hides_state,
                )
        return found

    def begin_save(self, reading: ReadingSave) -> None:
        """The save reads from now on: whoever changes something that it has not read waits for that."""
        self._executor.begin_save(reading)

    def end_save(self) -> None:
        """It has read everything."""
        self._executor.saves.end()

    def begin_loading(self, seed: int | None) -> None:
        """Gradients and the optimizer's state go; other state is put in its place, and weights are written."""
        optimizer = self.setup.optimizer
        if optimizer is None:
            return
        optimizer.zero_grad()
        if self._managed is not None:
            self._managed.begin_loading(seed)
        else:
            optimizer.state.clear()

    def put_state(
        self, parameter: torch.Tensor, state: ParameterState | dict[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """State of one of the optimizer's parameters, which goes to where its update runs; `settings` are its group's."""
        assert self.setup.optimizer is not None
        if self._managed is not None:
            spread = self._spread_members().get(id(parameter))
            if spread is None:
                self._managed.put_state(parameter, state)
            elif spread.piece is not None:
                self._managed.put_state(parameter, cut_state(state, spread.piece))
            return
        assert not isinstance(state, ParameterState)
        bring_state(state, parameter, settings)
        self.setup.optimizer.state[parameter] = state

    def write_weight(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Put a value into one of the model's tensors, or this rank's piece of it into what it has of a parameter."""
        spread = self._spread_members().get(id(tensor))
        if spread is None:
            tensor.copy_(value)
            return
        if spread.piece is not None:
            spread.leaf.copy_(cut(value.to(spread.spec.dtype), spread.piece))
        self._executor.residency.store.parts_change(spread.chunk, on_host=spread.site is Site.HOST)

    def spread_values(
        self, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[ManagedParameter, Values]]:
        """Each parameter that is spread over ranks with its state, whole, on the first of those that share the weights; a
        collective call. The tensors come as `change` makes them.
        """
        kept, optimizer = self.kept_states, self.setup.optimizer

        def values_of(managed: ManagedParameter) -> Values:
            state = None if kept is None else kept.by_parameter.get(id(managed.parameter))
            entries = None if optimizer is None or kept is not None else dict.get(optimizer.state, managed.parameter)
            return Values(weight=managed.leaf, state=state or entries or None).changed(change)

        return whole_values(self._groups.values(), values_of, is_for_all=False)

    @property
    def is_spread(self) -> bool:
        """Whether weights are spread over ranks."""
        return bool(self._parts)

    def _spread_members(self) -> dict[int, ManagedParameter]:
        return {
            id(managed.parameter): managed
            for group in self._groups.values()
            if group.is_spread
            for managed in group.members
        }

    def end_loading(self) -> None:
        """All of it is there."""
        if self._managed is not None:
            self._managed.end_loading()
        if self.setup.tracked is not None and self.setup.optimizer is not None:
            runner = None if self._managed is None else self._managed.runner
            count_state(self._groups.values(), runner, self.setup.optimizer, self.setup.tracked)
        self.settle()

    # -- taking apart --------------------------------------------------------------------------------------------------

    def close(self, raised: BaseException | None = None) -> None:
        """Take everything apart; model and optimizer are plain afterwards, whatever condition the session was in.

        May be repeated where an exception broke it off: each part can be given back twice.

        Args:
            raised: The exception that ends the session, if one does.
        """
        error = settle_for_good(self._executor, self._worker)
        if self.limit is not None:
            # Before weights go back to a device that they came from.
            self.limit.lift()
        self.calls.remove()
        self._executor.stop()
        try:
            self._release_optimizer()
        except Exception:
            try:
                self._release_optimizer()  # goes on where it broke off
            except Exception as failed:
                # What cannot be given back must not keep the rest.
                error = error or failed
        if self.setup.tracked is not None:
            # Before the parameters get memory of their own: that is no longer the session's.
            self.setup.tracked.stop()
        self._release_devices()
        try:
            self._give_back_spread(is_lost=(raised or error) is not None)
        except Exception as failed:
            error = error or failed
        for group in self._groups.values():
            if group.is_spread:
                continue
            group.forget_backward()
            group.point_to_host()
            unbind(group.members, self._original)
        return_rest(self.moved_along)
        bring_state_to_parameters(self.setup.optimizer)
        self._pool.close()
        if self.setup.ranks is not None and self._has_begun:
            self.setup.ranks.close()  # else the others are told first
        self.is_closed = True
        if error is None:
            self._executor.lost_step.tell(raised)
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame, which would hold the model until the collector comes

    def hand_over(self) -> HandOver:
        """Take everything apart but the wrapped optimizer, for another plan; `may_hand_over` must hold.

        Parameters and their gradients are on the host afterwards, buffers and what is not managed stay where they are.
        """
        self._worker.close()
        self.calls.remove()
        self._executor.stop()
        self._stop_counting()  # the next plan run does
        peak_bytes = self.reporter.device_peak_bytes()
        host = torch.device("cpu")
        with self.setup.on_host():
            for group in self._groups.values():
                unbind(group.members, dict.fromkeys(map(id, (managed.parameter for managed in group.members)), host))
        if self.setup.tracked is not None:
            # What the next plan run makes is counted by itself.
            self.setup.tracked.stop()
        self._release_devices()
        forget_device_memory(self._groups.values(), self._books)
        self._pool.close()
        return HandOver(
            original=self._original,
            moved_along=self.moved_along,
            recorder=self._recorder,
            clock_origin_s=self._clock_origin_s,
            managed=self._managed,
            num_fetches={chunk.spec.name: chunk.num_fetches for chunk in chunks_in(self._groups.values())},
            peak_bytes=peak_bytes,
        )

    def _give_back_spread(self, *, is_lost: bool) -> None:
        """Bring what is spread over the ranks together again, group by group; a collective call.

        If an exception ends the session on this rank, the others are elsewhere, and nothing can be brought: parameters are left
        on meta, so that nobody takes a part for the whole.
        """
        groups = [group for group in self._groups.values() if group.is_spread]
        ranks = self.setup.ranks
        if not groups or ranks is None:
            return
        members = [managed for group in groups for managed in group.members]
        values: dict[int, torch.Tensor] = {}
        if not self._has_begun:
            for managed in members:
                managed.make_whole(managed.original)
            return
        try:
            if is_lost or ranks.has_left:
                ranks.leave("an exception that ended the session")
                return
            store = self._executor.residency.store
            store.stop_prefetching()
            with self.setup.on_host():
                for group in groups:
                    group.forget_backward()
                    self._executor.residency.open(group)
                    for managed in group.members:
                        device = self._original.get(id(managed.parameter), managed.leaf.device)
                        values[id(managed.parameter)] = managed.device_view.to(device, copy=True)
                    self._executor.residency.close(group)
                    store.drop(group.name)
                store.drop_all()
                self._gather_state(groups)
        except BaseException:
            ranks.leave("an exception while the session gave the model back")
            raise
        finally:
            for managed in members:
                managed.make_whole(values.get(id(managed.parameter)))

    def forget_originals(self) -> None:
        """The session has begun on all ranks: whole weights from before, of which each keeps a part, can go."""
        self._has_begun = True
        for group in self._groups.values():
            for managed in group.members:
                managed.keep_original(None)

    def _gather_state(self, groups: Sequence[ManagedGroup]) -> None:
        """The optimizer has the state of whole parameters again."""
        optimizer = self.setup.optimizer
        if optimizer is None:
            return

        def values_of(managed: ManagedParameter) -> Values:
            return Values(state=dict.get(optimizer.state, managed.parameter) or None).changed(copied)

        for managed, values in whole_values(groups, values_of, is_for_all=True):
            if values.state is not None:
                optimizer.state[managed.parameter] = values.state

    def _release_devices(self) -> None:
        if self.setup.devices is not None:
            self.setup.devices.stop()
        if self._switch is not None:
            self._switch.release()

    def _release_optimizer(self) -> None:
        if self._managed is not None:
            self._managed.remove()
        self._stop_counting()

    def _stop_counting(self) -> None:
        for handle in self._counting:
            handle.remove()

    # -- putting together ----------------------------------------------------------------------------------------------

    def _take_host(self, need: HostNeed) -> tuple[Tiers, HostPool]:
        tiers = charged_tiers(self.plan.budgets, need)
        try:
            return tiers, self._make_pool(tiers)
        except (BudgetError, RuntimeError):
            if tiers.need == need:
                raise
        # The driver or the machine gives less than the books: what is of use and not needed must not end the plan.
        tiers = charged_tiers(self.plan.budgets, need.without_room())
        return tiers, self._make_pool(tiers)

    def _make_pool(self, tiers: Tiers) -> HostPool:
        # An emulated device's host memory must not be born on the device.
        with self.setup.on_host():
            pool = HostPool(
                self.setup.mover,
                self._worker,
                tiers.need.total_bytes,
                (tiers.host, tiers.pinned),
                cached_buffers=self.plan.cached_buffers,
                defragment_every=self.plan.defragment_every,
                on_move=lambda key, flat: move_part(self._groups, key, flat),
                may_move=self._may_move,
                poison=self.setup.poison,
            )
        self.setup.mark_host_memory(pool.buffer)
        return pool

    def _bind(self, fill: Fill, undo: contextlib.ExitStack) -> None:
        """Make the groups, in the order of the plan; gradients that are there already go where it wants them."""
        layout = self.setup.layout
        binder = Binder(
            self.setup.model,
            layout,
            self.plan,
            self.setup.mover,
            self._pool,
            self._books,
            has_optimizer=self.setup.optimizer is not None,
            on_device_buffer=self.setup.mark_device_buffer,
            on_host_memory=self.setup.mark_host_memory,
            parts=self._parts,
        )
        undo.callback(unbind, binder.members, self._original)
        groups = {group.name: group for group in layout.groups}
        for group in self.plan.groups:
            self._groups[group.name] = binder.bind(groups[group.name], group, fill)
        for place, name in enumerate(by_first_use(layout)):
            self._groups[name].note_place(place)
        for managed in binder.members:
            place_gradient(managed, is_copied=self._handed_over is not None)

    def _make_executor(self) -> Executor:
        setup, handed_over = self.setup, self._handed_over
        runner = None
        if setup.optimizer is not None and self._steps_by_chunks():
            installed = None if handed_over is None else handed_over.managed
            runner = make_runner(setup, self._groups.values(), self._recorder, proof=self._proof, installed=installed)
        executor = make_executor(
            setup,
            self.plan,
            self._groups.values(),
            runner,
            self._pool,
            self._worker,
            self._recorder,
            books=self._books,
            clock_origin_s=self._clock_origin_s,
            observer=self._observer,
            switch=self._switch,
        )
        if setup.tracked is not None:
            setup.tracked.count_steps(executor.part_of_step)
        if setup.devices is not None:
            setup.devices.start(executor.part_of_step)
        if handed_over is not None:
            for chunk in chunks_in(self._groups.values()):
                chunk.count_on_from(handed_over.num_fetches[chunk.spec.name])
        return executor

    def _steps_by_chunks(self) -> bool:
        """Whether the optimizer steps through the session: torch's own step would not do, or was replaced already."""
        is_installed = self._handed_over is not None and self._handed_over.managed is not None
        return is_installed or needs_managed_step(self.setup, self.plan)

    def _install_optimizer(self) -> ManagedOptimizer | None:
        optimizer = self.setup.optimizer
        if optimizer is None:
            return None
        if not self._steps_by_chunks():
            # Nothing to manage: torch's own step runs. State that was loaded before may lie elsewhere.
            bring_state_to_parameters(optimizer)
            before, after = lambda *_: self._before_plain_step(), lambda *_: self._after_plain_step()
            self._counting.append(optimizer.register_step_pre_hook(before))
            self._counting.append(optimizer.register_step_post_hook(after))
            return None
        managed = install_optimizer(
            self.setup,
            self._executor,
            proof=self._proof,
            after_step=self._pool.tick if self.plan.defragment_every else None,
            installed=None if self._handed_over is None else self._handed_over.managed,
        )
        if self._handed_over is not None and self.setup.tracked is not None:
            count_state(self._groups.values(), managed.runner, optimizer, self.setup.tracked)
        return managed

    def _before_plain_step(self) -> None:
        if self._executor.average is not None and self.setup.optimizer is not None:
            self._executor.average.refuse_local_sums(self.setup.optimizer, is_own=True)
        self._recorder.phases.enter("update")

    def _after_plain_step(self) -> None:
        self._recorder.phases.leave("update")
        self._recorder.count_update()

    def _may_move(self) -> bool:
        """Whether nothing points into the host's memory but what `move_part` knows. Waits for updates, if that helps."""
        if not self._groups or self._executor.saves.reading is not None or not self.is_quiet():
            return False
        for group in self._groups.values():
            group.adopt_foreign_data()
        return not any(
            (not group.is_resident and group.is_held())
            or any(gradient.is_home_held() for gradient in host_gradients(group))
            for group in self._groups.values()
        )


def switch_plan(plan_run: PlanRun, plan: Plan) -> PlanRun:
    """Take the plan run apart and put the session together anew for the plan; the plan run must be quiet.

    Weights, gradients and optimizer state are carried over exactly, the optimizer stays wrapped, and steps, copies
    and fetches are counted on. The host holds the weights a second time while this runs. A plan that is for another model
    leaves the plan run as it is; where anything else breaks off, the model and the optimizer are plain, and a note at the
    exception says so.
    """
    setup = plan_run.setup
    check_plan(plan, setup.layout)
    handed_over: HandOver | None = None
    successor: PlanRun | None = None
    plan_run.settle()
    try:
        handed_over = plan_run.hand_over()
        successor = PlanRun(setup, plan, fill=copy_values, handed_over=handed_over)
        successor.follow(plan_run)
        if setup.tracked is not None:
            setup.tracked.start()
        elif setup.is_on_cuda:
            # What filled the new buffers must be done before a copy on another stream takes their place.
            torch.cuda.synchronize(setup.mover.device)
        return successor
    except BaseException as error:
        error.add_note(BROKEN_OFF)
        if successor is not None:
            successor.close()
        elif handed_over is None:
            plan_run.close()  # goes on where taking it apart broke off
        else:
            if handed_over.managed is not None:
                handed_over.managed.remove()
            return_rest(handed_over.moved_along)
            bring_state_to_parameters(setup.optimizer)
        plan_run.be_over()
        raise
