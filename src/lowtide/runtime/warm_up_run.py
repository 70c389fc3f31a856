"""WarmUpRun: observes one training step of a session, and then lets it go on under the plan that the step allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide import compat
from lowtide.planning.plan import Plan
from lowtide.planning.warm_up import MomentSample
from lowtide.runtime.observer import StepObserver


class WarmUpRun:
    """Stands around the model's call until the session has its plan, and leaves then.

    The step is over when the optimizer has stepped after a backward; an evaluation before or in the middle of it is not
    looked at. The plan is changed when the model is called the next time and nothing of the step is left: where a graph
    of it is still alive, at the call after that.

    Args:
        model: Called as a whole in each step.
        optimizer: Its step ends the observed one.
        observer: Told of the windows by the engine.
        plan_after: Makes the plan from what was seen.
        is_quiet: Whether the plan may be changed now.
        switch: Changes it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        observer: StepObserver,
        *,
        plan_after: Callable[[tuple[MomentSample, ...]], Plan],
        is_quiet: Callable[[], bool],
        switch: Callable[[Plan], None],
    ) -> None:
        self._model = model
        self._observer = observer
        self._plan_after = plan_after
        self._is_quiet = is_quiet
        self._switch = switch
        self.is_over = False
        """Whether the session has its plan."""
        self._has_stepped = False
        self._step_hook = optimizer.register_step_post_hook(self._stepped)
        # Around the windows that the session has installed.
        self._inner = compat.replace_call(model, self._call)
        self._is_installed = True

    @property
    def samples(self) -> tuple[MomentSample, ...]:
        """What was seen so far."""
        return self._observer.samples

    def remove(self) -> None:
        """Leave; the session may be over before the step was. Before anything inside is removed. May be repeated."""
        self._observer.is_watching = False
        self._step_hook.remove()
        if self._is_installed:
            compat.replace_call(self._model, self._inner)
            self._is_installed = False

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del optimizer, args, kwargs
        if self._observer.has_seen_backward and not self._has_stepped:
            self._has_stepped = True
            self._observer.stop()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # With gradients only: what is made under `torch.inference_mode` could never be trained.
        if self._has_stepped and torch.is_grad_enabled() and self._is_quiet():
            # A plan that is refused leaves the session as it is: it raises here, and at each call after that.
            plan = self._plan_after(self._observer.samples)
            self.remove()
            self._switch(plan)
            self.is_over = True
            return self._model(*args, **kwargs)
        inner = self._inner or compat.plain_call(self._model)
        if torch.is_grad_enabled() or compat.backward_number() is not None:
            return inner(*args, **kwargs)
        with self._observer.paused():
            return inner(*args, **kwargs)
