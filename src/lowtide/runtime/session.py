"""Session: a model under management, with its optimizer."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from lowtide.errors import SessionError
from lowtide.planning.budget_plans import StepSample
from lowtide.planning.plan import Plan
from lowtide.runtime.management import Management
from lowtide.runtime.session_stats import SessionStats
from lowtide.runtime.timeline import Timeline

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

    def __init__(self, management: Management) -> None:
        self._management = management
        management.be_held_by(self)
        self.model: nn.Module = management.model
        self.optimizer: torch.optim.Optimizer | None = management.optimizer

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
        return self._management.is_warming_up

    @property
    def observed(self) -> tuple[StepSample, ...]:
        """What a `WarmUp` saw in its step: the fullest moment of each group and phase. Empty for other plans."""
        return self._management.samples

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
        self._management.close()

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
        self._management.close(error)

    @property
    def _machinery(self) -> Machinery | None:
        return self._management.machinery

    def _switch(self, plan: Plan) -> None:
        self._management.switch(plan)

    def _open(self) -> Machinery:
        return self._management.opened()
