"""ManagedOptimizer: makes the user's own optimizer object step through the session.

The object stays the user's: schedulers, scalers and param groups go on working, because they hold this very object.
Only its `step`, its `zero_grad` and what a copy of it takes along are replaced, as attributes of the instance, and put back
by `close`.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowtide import compat
from lowtide.errors import NonFiniteGradientError, SessionError, UnsupportedOptimizerError
from lowtide.optim.state import ParameterState
from lowtide.planning.plan import Schedule, Site
from lowtide.runtime.parameters.group import ManagedGroup, ManagedParameter, members_of
from lowtide.runtime.parameters.pending import AbsentState, LiveState, make_plain
from lowtide.runtime.passes.exchange import GradientAverage
from lowtide.runtime.passes.executor import Executor
from lowtide.runtime.passes.lock import HELD_INTERRUPTS
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings
from lowtide.runtime.updates.kernel_optimizer import KernelOptimizer
from lowtide.runtime.updates.norms import (
    clip_by_norm,
    clip_factor,
    norm_of,
    refuse_non_finite,
    refuse_non_finite_gradients,
)
from lowtide.runtime.updates.state import check_loaded_settings, check_loaded_state
from lowtide.runtime.updates.updater import LOOSE


class ManagedOptimizer:
    """Steps an optimizer by chunks.

    Args:
        optimizer: The user's.
        executor: Knows the groups and their condition, and runs the updates.
        max_grad_norm: Clip the gradients to this norm before each step; None leaves them.
        num_closure_calls: How often the optimizer's own step calls a closure that it is given.
        after_step: Called at the end of each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        executor: Executor,
        *,
        max_grad_norm: float | None,
        num_closure_calls: int = 1,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._num_closure_calls = num_closure_calls
        self.serve(executor, after_step)
        self._max_grad_norm = max_grad_norm
        self.last_norm: torch.Tensor | None = None
        """The norm before clipping, of the last step with `max_grad_norm`."""
        self._replaced: dict[str, object] = {}
        self._installed: dict[str, object] = {}
        self._is_installed = False
        self._handles: list[Any] = []
        self._plain_state: Any = None
        """The dictionary that was `optimizer.state` before, and will be again."""

    @property
    def runner(self) -> ChunkOptimizer:
        """Runs the updates of chunks."""
        return self._updater.optimizer

    def serve(self, executor: Executor, after_step: Callable[[], None] | None) -> None:
        """Step through these from now on: the session goes on under another plan."""
        self._executor = executor
        assert executor.updater is not None and executor.finisher is not None, "the executor was made without a runner"  # noqa: PT018
        self._finisher = executor.finisher
        self._updater = executor.updater
        self._after_step = after_step
        self._members = {id(managed.parameter): managed for managed in members_of(executor.groups)}
        """By the `id` of the parameter."""

    def install(self) -> None:
        """Take over `step` and `zero_grad`, and be asked before state is read or after it is loaded.

        Where the optimizer does not allow a part of that, it is left as it was.
        """
        self._is_installed = True
        try:
            self._take_over()
        except BaseException:
            self.remove()
            raise

    def _take_over(self) -> None:
        session = self

        # Both go on working when the session is closed: a scheduler may have put its wrapper around them by then.
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if session._is_installed:
                return session._step(closure)
            return type(optimizer).step(optimizer, closure) if closure is not None else type(optimizer).step(optimizer)

        def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if session._is_installed:
                session._zero_grad(set_to_none)
            else:
                type(optimizer).zero_grad(optimizer, set_to_none)

        def getstate(optimizer: torch.optim.Optimizer) -> Any:
            return session._whole_state() if session._is_installed else type(optimizer).__getstate__(optimizer)

        compat.copy_scheduler_mark(self._optimizer.step, step)
        for name, function in (("step", step), ("zero_grad", zero_grad), ("__getstate__", getstate)):
            if name in vars(self._optimizer):
                self._replaced[name] = vars(self._optimizer)[name]
            # Bound methods: schedulers wrap `step.__func__`.
            self._installed[name] = types.MethodType(function, self._optimizer)
            setattr(self._optimizer, name, self._installed[name])
        self._guard_state()
        # One by one: what is registered when one is refused is taken back.
        add, optimizer = self._handles.append, self._optimizer
        add(optimizer.register_state_dict_pre_hook(lambda _: self._before_state_dict()))
        add(optimizer.register_state_dict_post_hook(lambda _, state: self._fill(state)))
        add(optimizer.register_load_state_dict_pre_hook(lambda _, state: self._accept(state)))
        add(optimizer.register_load_state_dict_post_hook(lambda _: self._after_load()))

    def remove(self) -> None:
        """Give the optimizer back as it was. May be repeated."""
        self._updater.optimizer.forget_empty_state()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_installed = False
        for name in list(self._installed):
            # Where somebody wrapped it since, the wrapper reaches the plain method through it.
            if vars(self._optimizer).get(name) is self._installed[name]:
                if name in self._replaced:
                    setattr(self._optimizer, name, self._replaced[name])
                else:
                    delattr(self._optimizer, name)
            del self._installed[name]
        self._replaced.clear()
        self._give_state_back()
        if isinstance(self.runner, KernelOptimizer):
            self.runner.kept.hand_back()

    def _guard_state(self) -> None:
        """What is read in `optimizer.state` from now on is true; torch may just have replaced the dictionary."""
        self._plain_state = self._optimizer.state
        self._optimizer.state = (
            AbsentState() if isinstance(self.runner, KernelOptimizer) else LiveState(self.settle, self._plain_state)
        )

    def _give_state_back(self) -> None:
        guarded = self._optimizer.state
        if isinstance(guarded, LiveState | AbsentState):
            entries = dict(dict.items(guarded))
            self._plain_state.clear()
            self._plain_state.update(entries)
            self._optimizer.state = self._plain_state
        self._plain_state = None

    def settle(self) -> None:
        """Wait until every update has been made, and until a save under way has read what may be written to now."""
        self._executor.before_any_change()
        for group in self._executor.groups.values():
            self._executor.settle_group(group)
        self._executor.worker.check()
        self._executor.gradient_watch.check(waits=True)
        self._updater.optimizer.forget_empty_state()

    def begin_loading(self, seed: int | None) -> None:
        """All state goes, other state is put in its place; stochastic rounding goes on with this seed, unless it is None."""
        if isinstance(self.runner, KernelOptimizer):
            self.runner.begin_loading(seed)
            return
        dict.clear(self._optimizer.state)
        self._plain_state.clear()

    def end_loading(self) -> None:
        """Settings and state are other ones now."""
        self._updater.optimizer.refresh_groups()

    def put_state(self, parameter: torch.Tensor, state: ParameterState | dict[str, Any]) -> None:
        """State of a parameter as the runner keeps it, where its update runs from now on."""
        if isinstance(state, ParameterState):
            assert isinstance(self.runner, KernelOptimizer)
            self.runner.kept.put(parameter, state)
        else:
            dict.__setitem__(self._optimizer.state, parameter, state)
        managed = self._members.get(id(parameter))
        if managed is not None:
            self._updater.place_state_of(managed, self._executor.mover.device)
        else:
            self.runner.place_state(parameter, parameter.device)

    def _before_state_dict(self) -> None:
        self._refuse_spread("its state_dict()", "session.save() writes all of it")
        self.settle()

    def _refuse_spread(self, what: str, remedy: str) -> None:
        if any(managed.is_spread for managed in self._members.values()):
            raise SessionError(
                f"the state of {type(self._optimizer).__name__} is spread over the ranks, and {what} would be this rank's part of "
                f"it; {remedy}"
            )

    def _whole_state(self) -> Any:
        """For `pickle` and `deepcopy`, which look into torch's own dictionary: the session's states are not there."""
        self._refuse_spread("a copy", "copy it before the model is managed, or after session.close()")
        self.settle()
        plain: Any = type(self._optimizer).__getstate__(self._optimizer)
        if isinstance(self.runner, KernelOptimizer):
            return {**plain, "state": defaultdict(dict, self.runner.kept.in_torchs_form())}
        return self._without_session(plain) if isinstance(plain, dict) else plain

    def _without_session(self, plain: dict[str, Any]) -> dict[str, Any]:
        """What a copy may take along: with this session's `step` among its attributes it would step this optimizer."""
        ours = {handle.id for handle in self._handles}
        rest: dict[str, Any] = {}
        for name, value in plain.items():
            if name in self._installed and value is self._installed[name]:
                if name in self._replaced:
                    rest[name] = self._replaced[name]
            elif name.endswith("_hooks") and isinstance(value, dict):
                rest[name] = type(value)((number, hook) for number, hook in value.items() if number not in ours)
            else:
                rest[name] = value
        return rest

    def _fill(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return self.runner.kept.fill(state) if isinstance(self.runner, KernelOptimizer) else None

    def _accept(self, state: dict[str, Any]) -> dict[str, Any] | None:
        self._refuse_spread("what is loaded here", "lowtide.load() brings a checkpoint to all ranks")
        self.settle()
        rest = None
        if isinstance(self.runner, KernelOptimizer):
            rest = self.runner.kept.accept(state)
        else:
            check_loaded_state(self._optimizer, state)
        check_loaded_settings(self._optimizer, state)
        return rest

    def _after_load(self) -> None:
        if isinstance(self.runner, KernelOptimizer):
            self.runner.kept.load_accepted()
        self._guard_state()
        self._updater.optimizer.refresh_groups()
        self._updater.place_state(list(self._executor.groups.values()), self._executor.mover.device)

    # -- the two methods -----------------------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        result = None
        if closure is not None:
            if self._num_closure_calls != 1:
                raise UnsupportedOptimizerError(
                    f"{type(self._optimizer).__name__} calls its closure {self._num_closure_calls} times in a step, and a step by "
                    "chunks calls it once, before the updates; call backward and then step() without a closure. Nothing was "
                    "updated"
                )
            with torch.enable_grad():
                result = closure()
        phases = self._executor.recorder.phases
        with self._executor.calling("optimizer.step()"):
            went_well = False
            try:
                with HELD_INTERRUPTS:
                    phases.enter("update")
                    self._step_after(closure)
                went_well = True
            finally:
                phases.leave("update")
                HELD_INTERRUPTS.restore_handler()
                self._executor.forward.call_over(went_well)
        return result

    def _step_after(self, closure: Callable[[], Any] | None) -> None:
        executor = self._executor  # after the closure, whose forward may begin another plan
        executor.check_broken()
        average = executor.average
        try:
            executor.worker.check()
        except BaseException:
            if average is not None:
                average.leave("an update on the host that failed")
            raise
        self._check_updates_in_backward(average)
        executor.lost_step.refuse()
        if average is not None:
            average.refuse_local_sums(self._optimizer, is_own=True)
        if not compat.scaler_values(self._optimizer):
            executor.loss.check()  # a scaler judges the gradients itself, and skips the update
        try:
            self._step_of_all(closure)
        except NonFiniteGradientError:
            raise  # the other ranks, whose gradients are the same, refuse it too
        except BaseException:
            if average is not None:
                average.leave("an exception in optimizer.step()")
            raise

    def _check_updates_in_backward(self, average: GradientAverage | None) -> None:
        """All ranks refuse gradients that were not finite at the same place, also if only one of them has the piece."""
        is_in_backward = self._executor.schedule is Schedule.IN_BACKWARD
        exchange = next((each.chunk.exchange for each in self._members.values() if each.is_spread), None)
        refusal: NonFiniteGradientError | None = None
        try:
            self._executor.gradient_watch.check(waits=average is not None and is_in_backward)
        except NonFiniteGradientError as error:
            refusal = error
        if exchange is not None and is_in_backward:
            flag = torch.tensor([float(refusal is not None)], device=self._executor.mover.device)
            exchange.add_up(flag)
            if refusal is None and bool(flag):
                refusal = NonFiniteGradientError(
                    "another rank has found gradients that are NaN or infinite in its parts of the weights, and leaves them as "
                    "they were, while this one has updated its own; load the last checkpoint on all ranks. Schedule.DEFERRED "
                    "would have changed nothing"
                )
        if refusal is not None:
            raise refusal

    def _step_of_all(self, closure: Callable[[], Any] | None) -> None:
        """What each rank does, or none."""
        executor = self._executor
        before, after = compat.step_hooks(self._optimizer)
        arguments = (self._optimizer,) if closure is None else (self._optimizer, closure)
        for hook in before:
            hook(self._optimizer, arguments, {})
        self._updater.optimizer.refresh_groups()
        self._update()
        executor.residency.settle_held()
        for group in executor.groups.values():
            if group.guards_gradients:
                group.forget_backward()
                executor.residency.guard(group)
        for hook in after:
            hook(self._optimizer, arguments, {})
        compat.mark_stepped(self._optimizer)
        executor.recorder.count_update()
        if self._after_step is not None:
            self._after_step()

    def _zero_grad(self, set_to_none: bool) -> None:
        try:
            with HELD_INTERRUPTS:
                self._clear_gradients(set_to_none)
        finally:
            HELD_INTERRUPTS.restore_handler()

    def _clear_gradients(self, set_to_none: bool) -> None:
        self._executor.check_broken()
        self._executor.forget_step()
        for group in self._executor.groups.values():
            if group.guards_gradients:
                # Given up between backward and step: the weights have moved, the gradients are gone.
                group.forget_backward()
                self._executor.residency.guard(group)
        parameters = [parameter for params in self._optimizer.param_groups for parameter in params["params"]]
        if set_to_none:
            ours: list[torch.Tensor] = []
            for parameter in parameters:
                if id(parameter) in self._members:
                    ours.append(parameter)
                else:
                    parameter.grad = None
            with compat.without_torch_function():  # past what notices a look: nobody reads a value here
                for parameter in ours:
                    parameter.grad = None
                    if (spread := self._members[id(parameter)]).is_spread:
                        spread.forget_piece()
            return
        for parameter in parameters:
            managed = self._members.get(id(parameter))
            if managed is not None and managed.is_spread:
                self._zero_piece(managed)
                continue
            if parameter.grad is None:
                continue
            gradient = None if managed is None else managed.host_gradient
            if gradient is None:
                _zero(parameter)
            else:
                gradient.clear_unseen(partial(_zero, parameter))

    def _zero_piece(self, managed: ManagedParameter) -> None:
        with compat.without_torch_function():
            if managed.parameter.grad is not None:  # of a backward under no_sync
                managed.parameter.grad.zero_()
        if managed.gradient is None:
            return
        if managed.host_gradient is None:
            managed.gradient.zero_()
            return
        managed.host_gradient.settle()
        managed.host_gradient.clear_unseen(lambda: _zero(managed.leaf))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        optimizer = self._updater.optimizer
        settings = optimizer.settings()
        groups = list(self._executor.groups.values())
        parameters = [parameter for params in self._optimizer.param_groups for parameter in params["params"]]
        if isinstance(optimizer, KernelOptimizer) and self._executor.schedule is Schedule.DEFERRED:
            # All of them before the first update.
            for parameter in parameters:
                managed = self._members.get(id(parameter))
                if managed is None or not managed.is_spread:  # what is averaged is dense
                    optimizer.check_gradient(parameter, parameter.grad, None if managed is None else managed.spec.name)
        if self._max_grad_norm is not None:
            if isinstance(optimizer, KernelOptimizer):
                scale = settings.scaler.get("grad_scale")  # gradients that a scaler leaves to the kernel to unscale
                taken, others = self._norms(parameters)
                norms = {**taken, **{number: norm_of(gradient) for number, gradient in others.items()}}
                del others  # or somebody would seem to hold the gradients
                in_order = [norms[number] for number in sorted(norms)]
                clip = clip_factor(in_order, self._max_grad_norm, self._executor.mover, scale)
                settings, self.last_norm = replace(settings, clip=clip), clip.total
                if not settings.scaler:
                    refuse_non_finite(clip.total, self._max_grad_norm)
            else:
                self.last_norm = self._clip(parameters, is_judged=bool(settings.scaler))
        elif not settings.scaler:
            refuse_non_finite_gradients(
                *self._norms(parameters),
                partial(self._name, parameters),
                is_after_updates=any(group.is_consumed for group in groups),
            )
        loose = [parameter for parameter in parameters if id(parameter) not in self._members]
        self._updater.begin_step()
        advance = optimizer.prepare_advance()
        try:
            self._update_all(groups, loose, settings)
            advance()
        except BaseException:
            if self._completes(groups, loose, settings):
                advance()
            raise

    def _update_all(self, groups: Sequence[ManagedGroup], loose: Sequence[torch.Tensor], settings: Settings) -> None:
        """All that was not updated yet in this step."""
        if self._executor.schedule is Schedule.IN_BACKWARD:
            if not self._updater.has_updated(LOOSE):
                self._updater.update_here((), loose, settings)
            for group in groups:
                # Streamed weights that the model used outside of their module's call: their gradients are on the host.
                if not group.is_resident:
                    if group.guards_gradients:
                        group.forget_backward()
                        self._executor.residency.guard(group)
                    self._update_group(group, settings)
            return
        self._update_resident(groups, loose, settings)
        # The worker takes the oldest first where gradients are still on their way, and the next forward waits for this order.
        for group in sorted(groups, key=lambda group: group.place):
            self._update_group(group, settings)

    def _completes(self, groups: Sequence[ManagedGroup], loose: Sequence[torch.Tensor], settings: Settings) -> bool:
        """An exception has broken the updates off: make those that are missing, so that weights and state are of one step.

        Where none was made, weights and optimizer stay as before the step. Where the exception comes again, or has torn an
        update on the device, the step is lost, and the next `step` says which groups moved.
        """
        updater = self._updater
        names = {LOOSE: None, **{chunk.spec.name: group for group in groups for chunk in group.stored.chunks}}
        self._executor.put_in_order()
        has_moved = any(map(updater.has_updated, names)) or any(group.is_consumed for group in groups)
        if not updater.is_torn and not has_moved:
            return False
        try:
            if not updater.is_torn:
                self._update_all(groups, loose, settings)
                return True
        except BaseException:
            self._executor.put_in_order()
        moved = {id(group): group for name, group in names.items() if group is not None and updater.has_begun(name)}
        self._executor.lose_step(moved.values())
        return False

    def _clip(self, parameters: Sequence[torch.Tensor], *, is_judged: bool) -> torch.Tensor:
        assert self._max_grad_norm is not None
        try:
            if any(managed.is_spread for managed in self._members.values()):
                return self._clip_spread(parameters, is_judged=is_judged)
            return clip_by_norm(parameters, self._max_grad_norm, is_judged=is_judged)
        except NonFiniteGradientError:
            raise
        except BaseException:
            # Some of the gradients may be clipped, and others not.
            self._executor.lose_step(())
            raise

    def _clip_spread(self, parameters: Sequence[torch.Tensor], *, is_judged: bool) -> torch.Tensor:
        """`clip_by_norm`, by the norms of whole gradients; each rank scales what it has of them."""
        assert self._max_grad_norm is not None
        taken, others = self._norms(parameters)
        norms = {**taken, **{number: norm_of(gradient) for number, gradient in others.items()}}
        if not norms:
            return torch.tensor(0.0)
        device = self._executor.mover.device
        with torch.no_grad():
            total: torch.Tensor = torch.linalg.vector_norm(
                torch.stack([norms[each].to(device) for each in sorted(norms)])
            )
            if not is_judged:
                refuse_non_finite(total, self._max_grad_norm)
            factor = torch.clamp(self._max_grad_norm / (total + 1e-6), max=1.0)
            for parameter in parameters:
                with compat.without_torch_function():
                    gradient = self._gradient_of(parameter)
                if gradient is None:
                    continue
                managed = self._members.get(id(parameter))
                if managed is not None and managed.host_gradient is not None:
                    managed.host_gradient.settle()
                    managed.host_gradient.forget_norm()
                gradient.mul_(factor.to(gradient.device, gradient.dtype))
        return total

    def _norms(self, parameters: Sequence[torch.Tensor]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """By the parameters' numbers: norms that were taken when gradients passed by, and the gradients of all others."""
        taken: dict[int, torch.Tensor] = {}
        others: dict[int, torch.Tensor] = {}
        pieces: dict[int, torch.Tensor] = {}
        with compat.without_torch_function():
            # Past the guard of groups that a backward has updated: what it used up was judged there, and is gone.
            gradients = [
                parameter.grad if (known := self._members.get(id(parameter))) is None else known.leaf.grad
                for parameter in parameters
            ]
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            managed = self._members.get(id(parameters[number]))
            on_host = None if managed is None else managed.host_gradient
            if on_host is not None and gradient is on_host.tensor:
                norm = on_host.known_norm
                if norm is None:
                    on_host.settle()  # the worker takes it after the last addition
                    norm = on_host.known_norm
                if norm is not None:
                    (pieces if managed is not None and managed.is_spread else taken)[number] = norm
                    continue
            if managed is not None and managed.is_spread:
                pieces[number] = norm_of(gradient)
            else:
                others[number] = gradient.detach()
        if pieces:
            taken |= self._norms_of_wholes(pieces)
        return taken, others

    def _norms_of_wholes(self, pieces: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The norms of gradients that are spread over the ranks, from those of this rank's pieces; a collective call."""
        exchange = next(managed.chunk.exchange for managed in self._members.values() if managed.is_spread)
        assert exchange is not None
        device = self._executor.mover.device
        with torch.no_grad():
            # In double: a square of a finite norm is then finite, and a rank with nothing of a gradient adds nothing.
            squares = torch.stack([norm.to(device, torch.float64).square() for norm in pieces.values()])
            exchange.add_up(squares)
            norms = squares.sqrt()
            dtypes = [torch.float32 if norm.dtype is not torch.float64 else torch.float64 for norm in pieces.values()]
            return {number: norms[index].to(dtypes[index]) for index, number in enumerate(pieces)}

    def _gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the next update uses; asked where reads of parameters are not noticed."""
        managed = self._members.get(id(parameter))
        return parameter.grad if managed is None else managed.gradient

    def _name(self, parameters: Sequence[torch.Tensor], number: int) -> str:
        managed = self._members.get(id(parameters[number]))
        return f"parameter {number} of the optimizer" if managed is None else managed.spec.name

    def _update_resident(
        self, groups: Sequence[ManagedGroup], loose: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """All that stays on the device in one step, as plain torch takes it."""
        known = self._updater.optimizer
        members = [
            managed
            for group in groups
            if group.is_resident or group.is_spread
            for managed in group.members
            if managed.site is Site.DEVICE and known.knows(managed.parameter) and managed.has_piece
        ]
        if any(map(self._updater.has_updated, (LOOSE, *(managed.chunk.spec.name for managed in members)))):
            return  # all of them were, in one step
        for group in groups:
            if group.is_resident and any(managed.parameter.grad is not None for managed in group.members):
                group.count_update()
        for managed in members:
            if not managed.is_spread:
                make_plain(managed.parameter)  # torch's foreach kernels are for plain tensors only
        self._updater.update_here(members, loose, settings)

    def _update_group(self, group: ManagedGroup, settings: Settings) -> None:
        """A group's chunks on the host, and its streamed ones on the device."""
        executor, known = self._executor, self._updater.optimizer
        with compat.without_torch_function():
            if not any(managed.leaf.grad is not None for managed in group.members):
                return
        if group.is_spread:
            self._update_parts(group, settings)
            return
        group.adopt_foreign_data()
        is_updated = False
        for chunk in group.stored.chunks:
            with compat.without_torch_function():
                members = [
                    managed
                    for managed in group.members
                    if managed.chunk is chunk and known.knows(managed.parameter) and managed.parameter.grad is not None
                ]
            if not members or self._updater.has_updated(chunk.spec.name):
                continue
            # Before it is: a backward through older weights must be refused, wherever this breaks off.
            if not group.is_resident and not is_updated:
                is_updated = True
                group.count_update()
            if members[0].site is Site.HOST:
                for managed in members if group.is_on_host else ():
                    assert managed.host_gradient is not None
                    managed.host_gradient.use_in_place()
                self._updater.update_on_host(group, chunk, members, settings)
                executor.residency.store.drop(group.name)
                for managed in members:
                    executor.make_gradient_pending(managed)
            elif not group.is_resident:
                self._finisher.update_streamed_on_device(group, chunk, members, settings)
            elif members[0].site is Site.PAGED:
                for managed in members:
                    make_plain(managed.parameter)
                self._updater.update_here(members, (), settings)
        executor.residency.guard(group)

    def _update_parts(self, group: ManagedGroup, settings: Settings) -> None:
        """This rank's parts of a group's chunks, of which `_update_resident` has made those on the device."""
        known = self._updater.optimizer
        group.count_update()
        for chunk in group.stored.chunks:
            members = [
                managed
                for managed in group.members
                if managed.chunk is chunk and known.knows(managed.parameter) and managed.gradient is not None
            ]
            if not members:
                continue
            mine = [managed for managed in members if managed.has_piece]
            is_made = members[0].site is Site.DEVICE or self._updater.has_updated(chunk.spec.name)
            self._finisher.update_part(group, chunk, [] if is_made else mine, settings)
            for managed in mine if members[0].site is Site.HOST else ():
                self._executor.make_gradient_pending(managed)


def _zero(parameter: torch.Tensor) -> None:
    """As torch's own `zero_grad(set_to_none=False)`."""
    assert parameter.grad is not None
    if parameter.grad.grad_fn is not None:
        parameter.grad.detach_()
    else:
        parameter.grad.requires_grad_(False)
    parameter.grad.zero_()
