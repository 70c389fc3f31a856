"""Replanning: a prepared session goes on under a new plan when the loop is not as planned.

It stands in the model's calls, where no graph is alive, and changes the plan there: for a batch that is larger than the one
planned for; after steps that took more of the device than predicted; and where memory ran out.

Note [When memory runs out]
In a forward, everything that the call has changed is put back (random numbers, buffers such as BatchNorm's statistics), a
smaller plan is made, and the call runs again: the loop notices nothing but the time. A backward cannot run again from inside,
because its graph is used up. Its gradients are dropped, random numbers and buffers are put back as they were before the
step's first forward, and `StepLostError` asks the loop to repeat the step. The graph would keep the memory that is missing,
so the loss and what the model returned let go of it. Where updates in backward have moved some groups and not others, nothing
can be put back, and the error names them.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import EmulatedOutOfMemoryError, LowtideError, PlanError, StepLostError, TraceError
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.plan import Weights
from lowtide.runtime.assembly import SessionSetup, prove_optimizer
from lowtide.runtime.host_memory import host_need
from lowtide.runtime.step_planner import NextPlan, Shapes, StepPlanner, bucketed, elements, num_moved
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.runtime.plan_run import PlanRun
    from lowtide.runtime.session import Management

LOGGER = logging.getLogger("lowtide")
OUT_OF_MEMORY = (torch.OutOfMemoryError, EmulatedOutOfMemoryError)
_LESS = 0.9
"""What a smaller plan may take of what the one that ran out of memory was predicted to take."""
_DRIFT = 0.03
"""The share by which a step may take more than predicted, and which must be left of the budget if it does."""
_PATIENCE = 32
"""Batches in a row that fit a smaller plan before the session returns to it: a change copies all weights. Twice as many each
time, so that a loop of mixed sizes settles under the larger plan."""


class Replanning:
    """Decides when a session needs another plan, and changes it.

    Args:
        management: The session's, whose calls come through `call` from `start` to `remove`.
        planner: Makes the plans.
        planned: What the session was prepared with.
    """

    def __init__(self, management: Management, planner: StepPlanner, planned: NextPlan) -> None:
        self._management = management
        self._planner = planner
        self._current = planned
        self._known = [planned]
        self._training: NextPlan | None = None
        """The plan to return to after an evaluation that had one of its own."""
        self._limit_bytes = planner.device_bytes
        """What plans may take: less than the budget where the session took more than predicted."""
        self._lost: str | None = None
        """Why a smaller plan is due, where a graph was alive when memory ran out."""
        self._hopeless: list[Shapes] = []
        self._num_smaller, self._patience = 0, _PATIENCE
        setup = management.opened().setup
        self._is_on_cuda = setup.is_on_cuda
        self._before_step, self._before_call = _State(setup), _State(setup)
        self._shapes: Shapes = {}
        self._outputs: list[weakref.ref[Tensor]] = []
        """What the last training call returned."""
        self._is_inside = False
        self._has_stepped = True
        self._num_steps = 0
        """Under the present plan."""
        self._is_of_training = True
        """Whether the peak so far is that of training steps."""
        self._handles: list[Callable[[], None]] = []

    def start(self) -> None:
        """Take the model's calls."""
        management, optimizer = self._management, self._management.optimizer
        assert optimizer is not None, "a session that is prepared has one"
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._stepped()).remove)
        # Weakly: torch keeps what it calls, and that would keep a session that is forgotten with its model.
        backward_failed = weakref.WeakMethod(self._backward_failed)

        def tell(error: Exception, roots: Sequence[Any]) -> Callable[[], None] | None:
            listen = backward_failed()
            return None if listen is None else listen(error, roots)

        stop = weakref.finalize(self, compat.watch_failed_backwards(tell))
        stop.atexit = False
        self._handles.append(stop)
        setup = management.opened().setup
        if setup.is_on_cuda:
            torch.cuda.reset_peak_memory_stats(setup.mover.device)  # what was there before the session is not its own

    def remove(self) -> None:
        """Leave. May be repeated."""
        while self._handles:
            self._handles.pop()()

    # -- calls of the model --------------------------------------------------------------------------------------------

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the whole model; see Note [When memory runs out]."""
        is_own = compat.backward_number() is None and not compat.is_in_transform() and not compat.is_functional_call()
        if self._is_inside or not is_own or (self._is_on_cuda and torch.cuda.is_current_stream_capturing()):
            return run(*args, **kwargs)
        self._is_inside = True
        try:
            return self._call(run, args, kwargs)
        finally:
            self._is_inside = False

    def _call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_training = torch.is_grad_enabled()
        shapes = self._planner.shapes_of(args, kwargs)
        plan_run = self._management.opened()
        if is_training:
            self._before_training(plan_run, shapes)
        state = self._remember(is_training)
        peak_bytes = None if is_training else plan_run.peak.so_far()
        while True:
            if self._management.plan_run is not plan_run:
                run = self._management.model  # whose calls go through other windows now
            try:
                output = run(*args, **kwargs)
                break
            except OUT_OF_MEMORY as error:
                raised = error.with_traceback(None)  # its frames hold what the call has made
            raised.__context__ = raised.__cause__ = None
            state.restore()
            self._make_room(raised, shapes, is_training=is_training)
        if is_training:
            self._shapes = shapes
            self._outputs = [weakref.ref(tensor) for tensor in compat.tensors_in(output)]
        elif self._management.opened() is plan_run and plan_run.peak.so_far() != peak_bytes:
            self._is_of_training = False
        return output

    def _remember(self, is_training: bool) -> _State:
        """The state before the call, which is also that before the step where the call begins one."""
        begins_step = is_training and (self._has_stepped or not self._has_gradients())
        if is_training:
            self._has_stepped = False
        state = self._before_step if begins_step else self._before_call
        state.take()
        return state

    def _has_gradients(self) -> bool:
        with compat.without_torch_function():
            return any(parameter.grad is not None for parameter in self._management.model.parameters())

    def _stepped(self) -> None:
        self._has_stepped = True
        self._num_steps += 1

    # -- before a training call ----------------------------------------------------------------------------------------

    def _before_training(self, plan_run: PlanRun, shapes: Shapes) -> None:
        """Change the plan where that is due and nothing of an earlier call is left; else it waits for the next one."""
        is_larger = not _covers(self._current, shapes)
        usual = self._smallest_known(shapes) if len(self._known) > 1 and not is_larger else self._current
        self._num_smaller = 0 if usual is None or usual.plan == self._current.plan else self._num_smaller + 1
        # Reading the peak takes the time of some launches, so it is read less and less often.
        is_to_check = self._has_stepped and self._num_steps > 1 and self._num_steps & (self._num_steps - 1) == 0
        extra_bytes = self._drift(plan_run) if is_to_check else 0
        is_due = self._lost is not None or self._training is not None or extra_bytes > 0
        is_due = is_due or self._num_smaller >= self._patience
        if not (is_due or (is_larger and shapes not in self._hopeless)) or not plan_run.may_hand_over():
            return
        if self._lost is not None:
            reason, self._lost = self._lost, None
            self._change(self._smaller(shapes), reason)
        elif self._training is not None:
            training, self._training = self._training, None
            self._change(training, "training goes on after an evaluation under a plan of its own", moved=0)
        elif extra_bytes > 0:
            self._correct(extra_bytes)
        elif usual is not None and self._num_smaller >= self._patience:
            reason = f"the last {self._num_smaller} batches fit the plan for {_words(usual.shapes)}, which is faster"
            self._num_smaller, self._patience = 0, 2 * self._patience
            self._change(usual, reason)
        if not _covers(self._current, shapes) and shapes not in self._hopeless:
            self._grow(shapes)

    def _smallest_known(self, shapes: Shapes) -> NextPlan | None:
        """The plan for the smallest batch that holds one of this size."""
        fitting = [
            known for known in self._known if _covers(known, shapes) and known.reserved_bytes <= self._limit_bytes
        ]
        return min(fitting, key=lambda known: elements(known.shapes, shapes), default=None)

    def _drift(self, plan_run: PlanRun) -> int:
        """Bytes by which steps took more than predicted, where that is much and leaves little of the budget."""
        if not self._is_of_training or self._training is not None:
            return 0
        extra_bytes = plan_run.peak.so_far() - self._current.peak_bytes
        left_bytes = self._planner.device_bytes - self._current.reserved_bytes - extra_bytes
        is_much = extra_bytes > _DRIFT * self._current.peak_bytes
        return extra_bytes if is_much and left_bytes < _DRIFT * self._planner.device_bytes else 0

    def _correct(self, extra_bytes: int) -> None:
        reason = (
            f"steps took {format_bytes(self._current.peak_bytes + extra_bytes)} of the device, {format_bytes(extra_bytes)} "
            "more than predicted"
        )
        self._limit_bytes = min(self._limit_bytes, int((1 - _DRIFT) * self._planner.device_bytes) - extra_bytes)
        try:
            self._change(self._plan_for(self._current.shapes), reason)
        except (PlanError, TraceError) as error:
            LOGGER.info("%s; the plan stays, because no smaller one was found: %s", reason, error)

    def _grow(self, shapes: Shapes) -> None:
        """Go on under a plan for a batch of this size."""
        reason = f"a batch of {_words(shapes)} is larger than the one planned for, {_words(self._current.shapes)}"
        known = self._smallest_known(shapes)
        if known is not None:
            self._change(known, reason)
            return
        failed: LowtideError | None = None
        for wanted in (bucketed(shapes, self._planner.shapes), shapes):
            try:
                self._change(self._plan_for(wanted), reason)
                return
            except (PlanError, TraceError) as error:
                failed = failed or error
        self._hopeless.append(shapes)
        LOGGER.warning("%s, and no plan was found for it: %s", reason, failed)

    def _plan_for(self, shapes: Shapes) -> NextPlan:
        """The present plan where it holds a step of this size, else another one that updates each group where this one does."""
        with self._aside():
            replayed = self._planner.replayed(self._current.plan, shapes, self._limit_bytes)
            if replayed is not None and replayed.reserved_bytes <= self._limit_bytes:
                return replayed
            return self._planner.at(shapes, like=self._current.plan, limit_bytes=self._limit_bytes)

    def _smaller(self, shapes: Shapes) -> NextPlan:
        """A plan that takes less than the present one, for a call of this size at least."""
        current = self._current
        self._limit_bytes = int(_LESS * min(self._limit_bytes, current.reserved_bytes))
        with self._aside():
            return self._planner.at(
                current.shapes if _covers(current, shapes) else shapes,
                like=current.plan,
                limit_bytes=self._limit_bytes,
            )

    # -- where memory ran out ------------------------------------------------------------------------------------------

    def _make_room(self, raised: Exception, shapes: Shapes, *, is_training: bool) -> None:
        """Change to a plan that leaves more room, or raise what was raised, with a note that says why there is none."""
        plan_run = self._management.opened()
        try:
            _require_quiet(plan_run)
            if is_training:
                self._change(self._smaller(shapes), f"memory ran out in a forward ({raised})")
            else:
                self._change_for_evaluation(plan_run, f"memory ran out in a forward without gradients ({raised})")
            return
        except (PlanError, TraceError) as error:
            note = f"the session found no plan that leaves more room: {error}"
        raised.add_note(note)
        raise raised

    def _change_for_evaluation(self, plan_run: PlanRun, reason: str) -> None:
        """Stream everything, and keep optimizer state on the host, until training goes on: that leaves the most room."""
        if self._training is not None:
            raise PlanError("all weights are streamed already")
        setup, plan = plan_run.setup, plan_run.plan
        kept = {group.name: "host" for group in plan.groups if group.weights is Weights.HOST}
        streamed = make_plan(
            setup.layout, weights={"*": "streamed", **kept}, update="host", schedule=plan.schedule, prefetch_depth=0
        )
        streamed = replace(streamed, budgets=replace(plan.budgets, window_bytes=None, staging_bytes=None))
        need = host_need(setup.layout, streamed, setup.optimizer, setup.numerics, dict(setup.model.named_parameters()))
        host_bytes, pinned_bytes = plan.budgets.host_bytes, plan.budgets.pinned_bytes
        if host_bytes is not None and need.everything_bytes > host_bytes:
            raise PlanError(f"all weights and state on the host take {format_bytes(need.everything_bytes)} of it")
        if pinned_bytes is not None and need.total_bytes > pinned_bytes:
            raise PlanError(f"all weights on the host lock {format_bytes(need.total_bytes)} of it")
        training = self._current
        self._change(replace(training, plan=streamed), reason, moved=0)  # which updates nothing
        self._training = training

    def _backward_failed(self, error: Exception, roots: Sequence[Any]) -> Callable[[], None] | None:
        """What to do where a backward through the session's model ran out of memory; None for everything else."""
        if self._management.plan_run is None or compat.backward_number() is not None:
            return None
        if not isinstance(error, OUT_OF_MEMORY):
            return None
        tensors = [root for root in roots if isinstance(root, Tensor)]
        own = {id(parameter) for parameter in self._management.model.parameters()}
        if not any(id(leaf) in own for leaf in compat.leaves_of_graph(tensors)):
            return None
        return partial(self._lose_step, tensors, error)

    def _lose_step(self, roots: Sequence[Tensor], raised: Exception) -> None:
        plan_run, model = self._management.opened(), self._management.model
        moved = plan_run.tell_why_mixed()
        if moved is not None:
            raise StepLostError(f"memory ran out in a backward ({raised}): {moved}")
        returned = [tensor for tensor in (reference() for reference in self._outputs) if tensor is not None]
        for tensor in (*roots, *returned):
            with contextlib.suppress(RuntimeError):  # a view keeps its graph
                tensor.detach_()
        assert self._management.optimizer is not None
        self._management.optimizer.zero_grad()
        model.zero_grad()
        self._before_step.restore()
        self._has_stepped = True
        reason = f"memory ran out in a backward ({raised})"
        what = "a smaller plan follows at the next call before which you drop what else you hold of its graph"
        if plan_run.may_hand_over():
            try:
                self._change(self._smaller(self._shapes), reason)
            except (PlanError, TraceError) as error:
                raised.add_note(
                    "weights, optimizer, random numbers and buffers are as before the step, and the session found no smaller "
                    f"plan: {error}"
                )
                return
            what = f"the session goes on under a smaller plan ({self._current.plan.summary})"
        else:
            self._lost = reason
        raise StepLostError(
            f"{reason}: weights, optimizer, random numbers and buffers are as before the step, and its gradients are dropped; "
            f"{what}. Repeat the step with the same batch",
            has_moved=False,
        )

    # -- changes -------------------------------------------------------------------------------------------------------

    def _change(self, following: NextPlan, reason: str, *, moved: int | None = None) -> None:
        """Go on under this plan; where it is the present one, it is made for another size now.

        Args:
            following: The plan.
            reason: For the log and the statistics.
            moved: Groups that it updates elsewhere than before; counted by default.
        """
        plan_run = self._management.opened()
        setup, before, self._current = plan_run.setup, self._current, following
        if moved is None:
            moved, self._training = num_moved(before.plan, following.plan), None
            if following not in self._known:
                self._known.append(following)
        if following.plan == plan_run.plan:
            return
        if moved:
            groups = "1 group is" if moved == 1 else f"{moved} groups are"
            reason += f"; {groups} updated elsewhere than before, where the last bits may differ"
        LOGGER.log(logging.WARNING if moved else logging.INFO, "new plan: %s", reason)
        try:
            assert setup.optimizer is not None
            with self._aside():
                prove_optimizer(setup.optimizer, setup, following.plan)  # before anything is taken apart
            if self._is_on_cuda:
                torch.cuda.empty_cache()
            with _as_outside(setup):
                self._management.switch(following.plan, reason, following.peak_bytes)
        except BaseException:
            self._current = before
            raise
        self._management.opened().peak.take()
        self._num_steps, self._is_of_training = 0, True

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is made inside is the host's, and takes no random number from the loop."""
        setup = self._management.opened().setup
        with setup.on_host(), _as_outside(setup):
            yield


_STATISTICS = ("running_mean", "running_var")
"""Buffers that kernels write to without a new version."""


class _State:
    """Random numbers and buffers as they were when `take` was called last.

    A buffer is copied to the host when it is first seen, as most never change; those that do change are copied on the device
    each time.
    """

    def __init__(self, setup: SessionSetup) -> None:
        self._setup = setup
        self._random: list[Tensor] = []
        self._slots = [buffers for module in setup.model.modules() if (buffers := compat.buffers_of(module))]
        self._kept: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        """By where a buffer is: the buffer, its version, and the values that it had then."""

    def take(self) -> None:
        """Remember."""
        with self._setup.on_host():
            self._random = _random_state(self._setup)
        copies: list[Tensor] = []
        changed: list[Tensor] = []
        for place, buffers in enumerate(self._slots):
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                before, version, copy = self._kept.get((place, name), (None, 0, None))
                if copy is None and name not in _STATISTICS:
                    with self._setup.on_host():
                        copy = buffer.detach().to("cpu", copy=True)
                elif before is not buffer or version != _version(buffer) or name in _STATISTICS:
                    if before is not buffer or copy is None or copy.device != buffer.device:
                        copy = torch.empty_like(buffer)
                    copies.append(copy)
                    changed.append(buffer.detach())
                assert copy is not None, "made above"
                self._kept[place, name] = buffer, _version(buffer), copy
        compat.copy_all(copies, changed)

    def restore(self) -> None:
        """Put back what has changed since."""
        with self._setup.on_host():
            _set_random_state(self._setup, self._random)
        for (place, name), (buffer, version, copy) in self._kept.items():
            self._slots[place][name] = buffer
            if _version(buffer) != version or name in _STATISTICS:
                with torch.no_grad():
                    buffer.copy_(copy)
                self._kept[place, name] = buffer, _version(buffer), copy


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _random_state(setup: SessionSetup) -> list[Tensor]:
    on_device = [torch.cuda.get_rng_state(setup.mover.device)] if setup.is_on_cuda else []
    return [torch.get_rng_state(), *on_device]


def _set_random_state(setup: SessionSetup, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if setup.is_on_cuda:
        torch.cuda.set_rng_state(states[1], setup.mover.device)


@contextlib.contextmanager
def _as_outside(setup: SessionSetup) -> Iterator[None]:
    """As between two steps, whatever the call is in: what is made under `torch.inference_mode` could never be trained."""
    with setup.on_host():
        states = _random_state(setup)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        with setup.on_host():
            _set_random_state(setup, states)


def _covers(known: NextPlan, shapes: Shapes) -> bool:
    """Whether the plan is for a call of at least this size."""
    return elements(shapes, known.shapes) <= elements(known.shapes, shapes)


def _require_quiet(plan_run: PlanRun) -> None:
    if not plan_run.may_hand_over():
        raise PlanError("a graph of an earlier forward is alive, or a tensor over weights is held")


def _words(shapes: Shapes) -> str:
    """The largest tensor, `8x1024`; the others of a batch mostly follow from it."""
    largest = max(shapes.values(), key=prod, default=())
    return "x".join(map(str, largest)) or "unknown size"
