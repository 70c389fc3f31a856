"""Plans that make themselves: a `StaticPartition` at once, a `WarmUp` from one observed training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import compat
from lowtide.errors import ConfigError
from lowtide.memory.chunk import Layout
from lowtide.memory.tier import device_capacity_bytes, host_capacity_bytes, resolve_budget
from lowtide.optim.update_types import Numerics
from lowtide.planning.budget_plans import StaticPartition, StepSample, WarmUp, partition, plan_after, warm_up_plan
from lowtide.planning.plan import Plan
from lowtide.runtime.host_memory import state_bytes_per_parameter_byte
from lowtide.runtime.passes.forward import Window
from lowtide.runtime.statistics.observer import StepObserver
from lowtide.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpPlans:
    """Makes both plans of a `WarmUp` for one model on one machine."""

    layout: Layout
    config: WarmUp
    device_bytes: int
    host_bytes: int
    state_bytes_per_parameter_byte: float

    @classmethod
    def on(
        cls,
        layout: Layout,
        config: WarmUp,
        optimizer: torch.optim.Optimizer | None,
        numerics: Numerics | None,
        device: torch.device,
    ) -> WarmUpPlans:
        """For this machine.

        Raises:
            ConfigError: There is no optimizer, so that no step will ever be observed; or the device has no size.
        """
        if optimizer is None:
            raise ConfigError(
                "a WarmUp plans from a training step, and there is no optimizer to take one; give the optimizer, or a "
                "StaticPartition or a plan made by make_plan"
            )
        return cls(
            layout=layout,
            config=config,
            device_bytes=device_size(config.device_memory, device),
            host_bytes=resolve_budget(config.host_memory, host_capacity_bytes(), what="host_memory"),
            state_bytes_per_parameter_byte=state_bytes_per_parameter_byte(optimizer, numerics),
        )

    def first(self) -> Plan:
        """The plan for the observed step."""
        return warm_up_plan(self.layout, self.config, self.device_bytes, host_bytes=self.host_bytes)

    def after(self, samples: Iterable[StepSample]) -> Plan:
        """The plan for all further steps, from the samples of the observed one."""
        return plan_after(
            self.layout,
            samples,
            self.config,
            self.device_bytes,
            state_bytes_per_parameter_byte=self.state_bytes_per_parameter_byte,
            host_bytes=self.host_bytes,
        )


def partition_plan(
    layout: Layout,
    config: StaticPartition,
    optimizer: torch.optim.Optimizer | None,
    numerics: Numerics | None,
    device: torch.device,
) -> Plan:
    """The plan of a static partition for this machine."""
    return partition(
        layout,
        device_size(config.device_memory, device),
        config,
        state_bytes_per_parameter_byte=state_bytes_per_parameter_byte(optimizer, numerics),
    )


def device_size(device_memory: str | int | None, device: torch.device) -> int:
    """Bytes of the device: those given, or the card's.

    Raises:
        ConfigError: None are given, and the device is emulated.
        BudgetError: The card has fewer.
    """
    if device.type == "cuda":
        return resolve_budget(device_memory, device_capacity_bytes(device), what="device_memory")
    if device_memory is None:
        raise ConfigError(
            "an emulated device has no size of its own to take a share of; give device_memory, such as "
            "device_memory='64MiB'",
            key="device_memory",
        )
    return parse_bytes(device_memory)


class WarmUpRun:
    """Stands before the model's calls until the session has its plan, and leaves then.

    The step is over when the optimizer has stepped after a backward; an evaluation before or in the middle of it is not
    looked at. The plan is changed when the model is called the next time and nothing of the step is left: where a graph
    of it is still alive, or somebody holds a tensor over the memory of weights, at the call after that.

    Args:
        window: Of the whole model.
        optimizer: Its step ends the observed one.
        observer: Told of the windows by the executor.
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
        """Whether the session has its plan, or will get none."""
        self._has_stepped = False
        observer.begin()
        window.go_through(self._call)
        self._step_hook = optimizer.register_step_post_hook(self._stepped)

    @property
    def samples(self) -> tuple[StepSample, ...]:
        """What was seen so far."""
        return self._observer.samples

    def remove(self) -> None:
        """Leave; the session may be over before the step was. May be repeated."""
        self.is_over = True
        self._observer.give_up()
        self._step_hook.remove()
        self._window.go_through(None)

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
            try:
                self._switch(plan)
            finally:
                # Also where it breaks off: the model is plain then, or an interrupt comes after the switch.
                self.remove()
            return self._window.module(*args, **kwargs)
        if torch.is_grad_enabled() or compat.backward_number() is not None:
            return run(*args, **kwargs)
        with self._observer.paused():
            return run(*args, **kwargs)
