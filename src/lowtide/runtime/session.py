"""Session: a model under management, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide.errors import SessionError
from lowtide.planning.check_plan import check_plan
from lowtide.planning.plan import Plan
from lowtide.planning.warm_up import MomentSample
from lowtide.runtime.collector import ObjectsAside
from lowtide.runtime.observer import StepObserver
from lowtide.runtime.plan_switch import switch_plan
from lowtide.runtime.session_stats import SessionStats
from lowtide.runtime.timeline import Timeline
from lowtide.runtime.warm_up_run import WarmUpRun

if TYPE_CHECKING:
    from lowtide.runtime.machinery import Machinery


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

    def __init__(
        self,
        machinery: Machinery,
        observer: StepObserver | None = None,
        plan_after: Callable[[tuple[MomentSample, ...]], Plan] | None = None,
        aside: ObjectsAside | None = None,
    ) -> None:
        self._aside = aside
        self._machinery: Machinery | None = machinery
        # Lives as long as the model goes through it, though nobody else holds it.
        machinery.session = self
        self.model: nn.Module = machinery.basis.model
        self.optimizer: torch.optim.Optimizer | None = machinery.basis.optimizer
        self._warm_up: WarmUpRun | None = None
        # A model without a window has nothing that a plan could place.
        if observer is not None and plan_after is not None and machinery.calls.root_window is not None:
            assert self.optimizer is not None
            self._warm_up = WarmUpRun(
                machinery.calls.root_window,
                self.optimizer,
                observer,
                plan_after=lambda samples: self._checked(plan_after(samples)),
                is_quiet=machinery.is_quiet,
                switch=self._switch,
            )

    @property
    def is_open(self) -> bool:
        """Whether the model is under management."""
        return self._machinery is not None

    @property
    def plan(self) -> Plan:
        """The plan that is being carried out."""
        return self._open().plan

    @property
    def is_warming_up(self) -> bool:
        """Whether the plan is that of the step that a `WarmUp` observes, and another will follow it."""
        return self._machinery is not None and self._warm_up is not None and not self._warm_up.is_over

    @property
    def observed(self) -> tuple[MomentSample, ...]:
        """What a `WarmUp` saw in its step: the fullest moment of each group and phase. Empty for other plans."""
        return () if self._warm_up is None else self._warm_up.samples

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients before clipping, where `max_grad_norm` was given; None before the first step."""
        return self._open().last_grad_norm

    def stats(self) -> SessionStats:
        """Bytes moved, time, residency and peaks so far. Waits for the work that is under way."""
        return self._open().reporter.stats()

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

    def close(self) -> None:
        """Give the plain model and optimizer back, each parameter where it was before. May be repeated."""
        if self._machinery is not None:
            machinery, self._machinery = self._machinery, None
            if self._warm_up is not None:
                self._warm_up.remove()
            try:
                machinery.close()
            finally:
                if self._aside is not None:
                    self._aside.bring_back()

    def __repr__(self) -> str:
        """One line; waits for nothing."""
        name = type(self.model).__name__
        if self._machinery is None:
            return f"<Session of {name}, closed>"
        warming = ", warming up" if self.is_warming_up else ""
        return f"<Session of {name}{warming}: {self._machinery.plan.summary}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, plan: Plan) -> Plan:
        """The plan, where it fits the model; refused, the session goes on as it is."""
        check_plan(plan, self._open().basis.layout)
        return plan

    def _switch(self, plan: Plan) -> None:
        self._checked(plan)
        # Without machinery where the switch fails: the model is plain then.
        machinery, self._machinery = self._open(), None
        self._machinery = switch_plan(machinery, plan)
        self._machinery.session = self

    def _open(self) -> Machinery:
        if self._machinery is None:
            raise SessionError(
                "this session is closed, and the model and the optimizer are plain again; read stats() and timeline() "
                "before close(), or inside the with block. To train on under a plan, call lowtide.manage again"
            )
        return self._machinery
