"""Session: a model under management, with its optimizer, and what the model keeps of it.

A full collection walks through every object of the process: with torch and a model library loaded that is 0.2 to 0.3
seconds, in which nothing is launched and the device runs dry. What a session records makes one due every dozen steps.
So what exists when a session starts is set aside; collections then look at what is made since, in milliseconds.

Four objects, from the outside in: the `Session` is the user's handle. The `Management` lives as long as the model's calls go
through it, so that it is known whether anybody can still close the session, or an exception has left it behind. A `PlanRun`
has the parts that carry out one plan, and is replaced when the plan changes. Its `Executor` has the two passes.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lowtide.errors import SessionError
from lowtide.planning.budget_plans import StepSample
from lowtide.planning.placement import check_plan
from lowtide.planning.plan import Plan
from lowtide.planning.timeline import Timeline
from lowtide.runtime.checkpoints.contents import session_contents
from lowtide.runtime.checkpoints.folder import Retention, checkpoint_name
from lowtide.runtime.checkpoints.saving import Saver
from lowtide.runtime.parameters.pieces import copied, described
from lowtide.runtime.passes.lock import HELD_INTERRUPTS, refuse_wrapping, remove_all, watch_process
from lowtide.runtime.plan_run import switch_plan
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.runtime.statistics.session_stats import PlanRow, SaveRow, SessionStats
from lowtide.runtime.warm_up import WarmUpRun

if TYPE_CHECKING:
    from lowtide.runtime.plan_run import PlanRun


_FEW = 10_000
"""Python 3.12 starts with some hundreds set aside; a user who does it has torch loaded, a hundred thousand and more."""
_LOCK = threading.RLock()
"""Taken again by a finaliser, where a collection inside finds a forgotten session."""
_NUM_SESSIONS = 0
_IS_OURS = False


class ObjectsAside:
    """Collects once, and keeps what is left out of later collections until `bring_back`, or until this is forgotten."""

    def __init__(self) -> None:
        _set_aside()
        self._bring_back = weakref.finalize(self, _bring_back)
        self._bring_back.atexit = False

    def bring_back(self) -> None:
        """The session has ended; after the last one everything is collected as before. May be repeated."""
        self._bring_back()


def _set_aside() -> None:
    global _NUM_SESSIONS, _IS_OURS
    with _LOCK:
        if _NUM_SESSIONS == 0:
            # Where the user has set objects aside already, they stay so.
            _IS_OURS = gc.get_freeze_count() < _FEW
        elif _IS_OURS:
            # What was forgotten since the session before can go.
            gc.unfreeze()
        _NUM_SESSIONS += 1
    # Without the lock: a collection may find a forgotten session, which comes here to end.
    gc.collect()
    gc.freeze()


def _bring_back() -> None:
    global _NUM_SESSIONS
    with _LOCK:
        _NUM_SESSIONS -= 1
        if _NUM_SESSIONS == 0 and _IS_OURS:
            gc.unfreeze()


_MANAGED: weakref.WeakValueDictionary[int, Management] = weakref.WeakValueDictionary()
"""By the `id` of the model, of each of its parameters, and of the optimizer, all of which a management keeps alive."""


class PlanChanger(Protocol):
    """Changes the plan in calls of the model, where the loop is not as planned."""

    def start(self) -> None:
        """The model's calls come through `call` from now on."""

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the whole model."""

    def remove(self) -> None:
        """Leave. May be repeated."""


class Management:
    """One model under management, from `manage` to `close`. Its plan run is another after a change of plan.

    Args:
        plan_run: Carries out the plan.
        observer: With `plan_after`, watches the first step, which decides the plan of the others.
        plan_after: Makes that plan.
        aside: Told when the session ends.
    """

    def __init__(
        self,
        plan_run: PlanRun,
        observer: StepObserver | None = None,
        plan_after: Callable[[tuple[StepSample, ...]], Plan] | None = None,
        aside: ObjectsAside | None = None,
    ) -> None:
        self.plan_run: PlanRun | None = plan_run
        """None after the end."""
        # Lives as long as the model goes through it, though nobody holds the session.
        plan_run.belong_to(self)
        self.model: nn.Module = plan_run.setup.model
        self.optimizer: torch.optim.Optimizer | None = plan_run.setup.optimizer
        self._aside = aside
        self._session: weakref.ref[object] | None = None
        self._was_lost = False
        """Whether the session was let go of after the model had been called: one that was never held is meant to be so."""
        self._warm_up: WarmUpRun | None = None
        self._changer: PlanChanger | None = None
        self.plans: list[PlanRow] = []
        """Those that were made after the first."""
        self._saver: Saver | None = None
        """None before the first save."""
        self._steps_before = 0
        # A model without a window has nothing that a plan could place.
        if observer is not None and plan_after is not None and plan_run.calls.root_window is not None:
            assert self.optimizer is not None
            self._warm_up = WarmUpRun(
                plan_run.calls.root_window,
                self.optimizer,
                observer,
                plan_after=lambda samples: self._checked(plan_after(samples)),
                is_quiet=plan_run.may_hand_over,
                switch=self.switch,
            )
        # Also of a session that is forgotten with its model.
        self._unhook = weakref.finalize(self, remove_all, watch_process(weakref.ref(self)))
        self._unhook.atexit = False
        for managed in _what_is_managed(self.model, self.optimizer):
            _MANAGED[id(managed)] = self

    # -- asked by the session ------------------------------------------------------------------------------------------

    @property
    def is_warming_up(self) -> bool:
        """Whether the first step has not decided the plan yet."""
        return self.plan_run is not None and self._warm_up is not None and not self._warm_up.is_over

    @property
    def samples(self) -> tuple[StepSample, ...]:
        """What was observed in that step."""
        return () if self._warm_up is None else self._warm_up.samples

    def be_held_by(self, session: object) -> None:
        """The session is what the user holds."""
        management = weakref.ref(self)

        def gone(_: object) -> None:
            living = management()
            if living is not None and living.plan_run is not None:
                living._was_lost = living.plan_run.was_called

        self._session = weakref.ref(session, gone)

    def opened(self) -> PlanRun:
        """The plan run.

        Raises:
            SessionError: The session is closed.
        """
        if self.plan_run is None:
            raise SessionError(
                "this session is closed, and the model and the optimizer are plain again; read stats() and timeline() "
                "before close(), or inside the with block. To train on under a plan, call lowtide.manage again"
            )
        return self.plan_run

    @property
    def num_steps(self) -> int:
        """Steps of the run: those before the checkpoint that was loaded, and those since."""
        return self._steps_before + self.opened().num_updates

    def count_from(self, step: int) -> None:
        """The run has come to this step."""
        self._steps_before = step - self.opened().num_updates

    def save(
        self,
        folder: Path,
        step: int | None,
        state: Mapping[str, object] | None,
        retention: Retention,
        tokenizer: str | Path | None,
        allowance: str | int | None,
    ) -> Path:
        """Begin a checkpoint, or write it."""
        plan_run = self.opened()
        number = self.num_steps if step is None else step
        with plan_run.together("save a checkpoint") as facts, plan_run.between_steps("session.save"):
            plan_run.refuse_gradients("session.save")
            if plan_run.is_spread:
                facts["checkpoint"] = {"folder": str(folder), "step": number}
                return self._save_spread(plan_run, folder, number, state, retention, tokenizer, allowance)
            contents = session_contents(plan_run, state, tokenizer=tokenizer)
            facts["checkpoint"] = {"folder": str(folder), "step": number}
            if not plan_run.is_first:
                return folder / checkpoint_name(number)  # rank 0 writes it for all
            self._saver = self._saver or Saver()
            return self._saver.save(plan_run, folder, contents, step=number, retention=retention, allowance=allowance)

    def _save_spread(
        self,
        plan_run: PlanRun,
        folder: Path,
        step: int,
        state: Mapping[str, object] | None,
        retention: Retention,
        tokenizer: str | Path | None,
        allowance: str | int | None,
    ) -> Path:
        """Rank 0 writes what all of them send, chunk by chunk."""
        if allowance is not None:
            warnings.warn(
                f"allowance={allowance!r} has no effect where weights are spread over ranks: the save is over when this returns",
                stacklevel=4,
            )
        forms = {id(managed.parameter): values for managed, values in plan_run.spread_values(described)}
        contents = session_contents(plan_run, state, tokenizer=tokenizer, spread=forms)
        assert plan_run.setup.ranks is not None
        plan_run.setup.ranks.exchange(None)  # nobody sends anything if a rank has failed by now
        values = ((contents.names[id(managed.parameter)], each) for managed, each in plan_run.spread_values(copied))
        if plan_run.is_first:
            self._saver = self._saver or Saver()
            return self._saver.save_spread(folder, contents, values, step=step, retention=retention)
        for _ in values:
            pass  # rank 0 takes them
        return folder / checkpoint_name(step)

    def wait_for_save(self) -> None:
        """Wait until the save under way is over; raises what went wrong with it."""
        if self._saver is not None:
            self._saver.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._saver is not None and self._saver.is_saving

    @property
    def saves(self) -> tuple[SaveRow, ...]:
        """Those that are over."""
        return () if self._saver is None else self._saver.rows

    def adapt(self, changer: PlanChanger) -> None:
        """Let the model's calls go through it until the end."""
        self._changer = changer
        self.opened().calls.go_through(changer.call)
        changer.start()

    def switch(
        self, plan: Plan, reason: str = "the warm-up step was observed", predicted_peak_bytes: int | None = None
    ) -> None:
        """Go on under another plan. Refused, the session goes on as it is; broken off, the model is plain."""
        self._checked(plan)
        plan_run = self.opened()
        num_steps = plan_run.reporter.num_steps
        if self._saver is not None:
            # The weights change places, and the new plan's books know nothing of its staging.
            self._saver.finish()
        try:
            with HELD_INTERRUPTS:
                self.plan_run = switch_plan(plan_run, plan)
                if self._changer is not None:
                    self.plan_run.calls.go_through(self._changer.call)
                self.plans.append(PlanRow(step=num_steps, reason=reason, predicted_peak_bytes=predicted_peak_bytes))
        finally:
            HELD_INTERRUPTS.restore_handler()
            if self.plan_run is plan_run and plan_run.is_closed:
                self.plan_run = None

    def close(self, raised: BaseException | None = None) -> None:
        """Give the plain model and optimizer back. May be repeated, also where an exception broke it off.

        Args:
            raised: The exception that ends the session, if one does.
        """
        plan_run = self.plan_run
        # In a forked child it is the parent's, whose `with` block may end here as well.
        if plan_run is None or not plan_run.process.is_this:
            return
        if self._saver is not None:
            self._saver.finish()  # where an interrupt comes at once
        try:
            with HELD_INTERRUPTS:
                self._unhook()
                for watcher in (self._warm_up, self._changer):
                    if watcher is not None:
                        watcher.remove()
                plan_run.close(raised)
        finally:
            HELD_INTERRUPTS.restore_handler()
            if plan_run.is_closed:
                if self._aside is not None:
                    self._aside.bring_back()
                self.plan_run = None
                if self._saver is not None:
                    self._saver.close(raised or sys.exception())

    # -- told by the process -------------------------------------------------------------------------------------------

    def module_registered(self, module: nn.Module, submodule: nn.Module) -> None:
        """Refuse a parallel wrapper around the managed model."""
        if self.plan_run is not None:
            refuse_wrapping(module, submodule, self.plan_run.managed_ids)

    def other_optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step without the gradients that the session has dropped, or with those of this rank alone."""
        if self.plan_run is not None:
            self.plan_run.refuse_step_of(optimizer)

    # -- asked by the next session -------------------------------------------------------------------------------------

    def was_left(self) -> bool:
        """Whether an exception has left the session: its last call raised, or those that held it are gone."""
        if self.plan_run is None:
            return False
        if self._session is None or self._session() is None:
            is_lost = self._was_lost
        else:
            is_lost = self.plan_run.was_called and _is_in_tracebacks_only(self._session)
        return is_lost or self.plan_run.has_raised()

    def close_left(self) -> None:
        """Close a session that was left; a warning says which weights moved, where some did and others did not."""
        mixed = None if self.plan_run is None else self.plan_run.tell_why_mixed()
        self.close()
        if mixed is not None:
            warnings.warn(f"the model's session before this one is closed: {mixed}", stacklevel=5)

    def _checked(self, plan: Plan) -> Plan:
        check_plan(plan, self.opened().setup.layout)
        return plan


def refuse_managed(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse a model or an optimizer that a session has. One that an exception has left is closed instead.

    Raises:
        SessionError: The session is alive: somebody holds it, and its last call went well.
    """
    for managed in _what_is_managed(model, optimizer):
        management = _MANAGED.get(id(managed))
        if management is None or management.plan_run is None:
            continue
        management.plan_run.process.require()
        if management.was_left():
            management.close_left()
            continue
        if managed is optimizer:
            what = "this optimizer is under management already, with another model; make one for each model, or"
        elif managed is model:
            what = "this model is under management already;"
        else:
            what = "a part of this model is under management already, as a model of its own or of a larger one;"
        raise SessionError(f"{what} close that session first")


def _what_is_managed(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[object]:
    return [model, *model.parameters(), *([] if optimizer is None else [optimizer])]


def _is_in_tracebacks_only(held: weakref.ref[object]) -> bool:
    """Whether nobody has the session but frames that have ended and an exception's traceback keeps.

    The session comes as a weak reference and goes to no Python function: how many owners an argument has on its way
    depends on who runs Python's frames (torch's compiler does, once it was used in the process).
    """
    session, probe = held(), object()
    # The collector does not see frames that are running.
    ended = [owner for owner in gc.get_referrers(session) if isinstance(owner, types.FrameType)]
    # Up to Python 3.12 looking into a frame leaves a dictionary with it, which owns the session too; a debugger, say, may
    # have looked before.
    insides = [frame.f_locals for frame in ended]
    owners = {id(owner) for owner in gc.get_referrers(session)}
    num_known = 0
    for inside in insides:
        num_names = sum([value is session for value in inside.values()])
        num_known += (2 if id(inside) in owners else 1) * num_names
    # The probe has the one owner that the session has here.
    return sys.getrefcount(session) - sys.getrefcount(probe) <= num_known


class Session:
    """What `manage` gives back. The model and the optimizer are the user's own objects.

    Example:
        >>> import lowtide
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with lowtide.manage(model, optimizer, lowtide.make_plan(model)) as session:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> session.is_open
        False
    """

    def __init__(self, management: Management) -> None:
        self._management = management
        management.be_held_by(self)
        self.model: nn.Module = management.model
        self.optimizer: torch.optim.Optimizer | None = management.optimizer

    @property
    def is_open(self) -> bool:
        """Whether the model is under management."""
        return self._plan_run is not None

    @property
    def plan(self) -> Plan:
        """The plan that is being carried out."""
        return self._open().plan

    @property
    def is_warming_up(self) -> bool:
        """Whether the plan is that of the step that a `WarmUp` observes, and another will follow it."""
        return self._management.is_warming_up

    @property
    def observed(self) -> tuple[StepSample, ...]:
        """What a `WarmUp` saw in its step: the fullest instant of each group and phase. Empty for other plans."""
        return self._management.samples

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients before clipping, where `max_grad_norm` was given; None before the first step."""
        return self._open().last_grad_norm

    def stats(self) -> SessionStats:
        """Bytes moved, time, residency and peaks so far. Waits for the work that is under way, but not for a save."""
        stats = self._open().reporter.stats()
        return replace(stats, plans=tuple(self._management.plans), saves=self._management.saves)

    def take_device_peak(self) -> int:
        """The most that the device held, in bytes of tensors, since this was last called; a new peak begins.

        On CUDA that is `torch.cuda.max_memory_allocated()` and a reset of torch's own peaks.

        Raises:
            SessionError: A warm-up step is being observed, whose peaks this would take away.
        """
        if self.is_warming_up:
            raise SessionError(
                "the warm-up step is observed until it is over, and its peaks are the plan's: ask after it"
            )
        return self._open().peak.take()

    def timeline(self) -> Timeline:
        """What each lane did in the last steps, and which chunks were on the device."""
        return self._open().reporter.timeline()

    def settle(self) -> None:
        """Wait until every update is made and every copy is done."""
        self._open().settle()

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, parameters that are spread over ranks are whole on each of them, to be read or changed; between two steps.

        All ranks enter it together. The whole model is on the device then, which must have room for it. What is changed must be
        changed alike on all ranks. Without ranks it changes nothing.

        Raises:
            BudgetError: The device's budget has not the bytes.
        """
        return self._open().gathered()

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards and backwards inside keep their gradients to this rank, and the next backward outside averages the sums.

        For accumulation over several backwards, as `no_sync` of DistributedDataParallel. Without ranks it changes nothing.

        Raises:
            SessionError: The schedule is `in_backward`, where each backward updates the weights.
        """
        return self._open().no_sync()

    @property
    def num_steps(self) -> int:
        """Steps that the optimizer has taken in this training run, also before the checkpoint that was loaded."""
        return self._management.num_steps

    def save(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        state: Mapping[str, object] | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        tokenizer: str | Path | None = None,
        allowance: str | int | None = None,
    ) -> Path:
        """Write a checkpoint from which `lowtide.load` goes on with the same bits. Between two steps.

        With an `allowance` training goes on while it is written: it has the values of this moment, because whatever changes
        them waits until they were read. An error reaches the next call of this, of `wait_for_save` or of `close`.

        A process that is killed meanwhile leaves the former checkpoints as they were, and so does a full disk.

        Args:
            folder: Of the run; each checkpoint is a folder in it.
            step: The number of the checkpoint; by default `num_steps`.
            state: What else belongs to the run, by names of yours: objects with `state_dict` and `load_state_dict` (schedulers,
                scalers, data loaders), generators of torch, and plain values.
            keep: How many of the newest checkpoints stay.
            keep_every: Those of steps that are a multiple of this stay for ever.
            tokenizer: A folder whose tokenizer files are saved along: the checkpoint of a Hugging Face model is a folder that
                `from_pretrained` loads.
            allowance: Host memory that a save beside training may take, such as "4GiB", or "auto" for a quarter of what is
                free; it counts towards the host's budget. With as much as the checkpoint has, training never waits for the
                disk. None: this returns when the checkpoint is whole.

        Returns:
            The checkpoint's own folder; with an `allowance`, where it will be.

        Raises:
            SessionError: A backward has left gradients whose `step()` has not come, or one is under way.
            ConfigError: Something in `state` has no plain form. The message names it.
            CheckpointError: The checkpoint could not be written, or the one before could not: then this one was not begun.
            BudgetError: The host's budget has not the allowance.
        """
        retention = Retention(keep=keep, keep_every=keep_every)
        return self._management.save(Path(folder), step, state, retention, tokenizer, allowance)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._management.is_saving

    def wait_for_save(self) -> None:
        """Wait until the save that is under way is over.

        Raises:
            CheckpointError: It failed. Training and the checkpoints from before are as they were.
        """
        self._management.wait_for_save()

    def close(self) -> None:
        """Give the plain model and optimizer back, each parameter where it was before. May be repeated."""
        self._management.close()

    def __repr__(self) -> str:
        """One line; waits for nothing."""
        name = type(self.model).__name__
        if self._plan_run is None:
            return f"<Session of {name}, closed>"
        warming = ", warming up" if self.is_warming_up else ""
        return f"<Session of {name}{warming}: {self._plan_run.plan.summary}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._management.close(error)

    @property
    def _plan_run(self) -> PlanRun | None:
        return self._management.plan_run

    def _values(self) -> dict[str, torch.Tensor]:
        """By name, the memory in which each parameter's value is."""
        return self._open().values()

    def _forget_originals(self) -> None:
        """All ranks have begun."""
        self._open().forget_originals()

    def _count_from(self, step: int) -> None:
        """A checkpoint of this step was loaded."""
        self._management.count_from(step)

    def _switch(self, plan: Plan) -> None:
        self._management.switch(plan)

    def _adapt(self, make: Callable[[Management], PlanChanger]) -> None:
        """Let what is made change the plan where the loop is not as planned."""
        self._management.adapt(make(self._management))

    def _open(self) -> PlanRun:
        return self._management.opened()
