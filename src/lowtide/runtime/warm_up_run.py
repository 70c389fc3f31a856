"""WarmUpRun: observes one training step of a session, and then lets it go on under the plan that the step allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import compat
from lowtide.planning.budget_plans import StepSample
from lowtide.planning.plan import Plan
from lowtide.runtime.observer import StepObserver
from lowtide.runtime.window import Window


class WarmUpRun:
    """Stands before the model's calls until the session has its plan, and leaves then.

    The step is over when the optimizer has stepped after a backward; an evaluation before or in the middle of it is not
    looked at. The plan is changed when the model is called the next time and nothing of the step is left: where a graph
    of it is still alive, or somebody holds a tensor over the memory of weights, at the call after that.

    Args:
        window: Of the whole model.
        optimizer: Its step ends the observed one.
        observer: Told of the windows by the engine.
        plan_after: Makes the plan from what was seen.
        is_quiet: Whether the plan may be changed now.
        switch: Changes it.
    """

    def __init__(
        self,
        window: Window,
        optimizer: torch.optim.Optimizer,
        observer: StepObserver,
        *,
        plan_after: Callable[[tuple[StepSample, ...]], Plan],
        is_quiet: Callable[[], bool],
        switch: Callable[[Plan], None],
    ) -> None:
        self._window = window
        self._observer = observer
        self._plan_after = plan_after
        self._is_quiet = is_quiet
        self._switch = switch
        self.is_over = False
        """Whether the session has its plan."""
        self._has_stepped = False
        observer.begin()
        window.gate = self._call
        self._step_hook = optimizer.register_step_post_hook(self._stepped)

    @property
    def samples(self) -> tuple[StepSample, ...]:
        """What was seen so far."""
        return self._observer.samples

    def remove(self) -> None:
        """Leave; the session may be over before the step was. May be repeated."""
        self._observer.is_watching = False
        self._step_hook.remove()
        self._window.gate = None

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del optimizer, args, kwargs
        if self._observer.has_seen_backward and not self._has_stepped:
            self._has_stepped = True
            self._observer.stop()

    def _call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # With gradients only: what is made under `torch.inference_mode` could never be trained.
        # Nor with tensors that the model has for this call only.
        may_switch = self._has_stepped and torch.is_grad_enabled() and not compat.is_functional_call()
        if may_switch and self._is_quiet():
            # A plan that is refused leaves the session as it is: it raises here, and at each call after that.
            plan = self._plan_after(self._observer.samples)
            self.remove()
            self._switch(plan)
            self.is_over = True
            return self._window.module(*args, **kwargs)
        if torch.is_grad_enabled() or compat.backward_number() is not None:
            return run(*args, **kwargs)
        with self._observer.paused():
            return run(*args, **kwargs)
