"""Plans that make themselves: what `manage` does with a `StaticPartition` or a `WarmUp` in place of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.memory.capacity import device_capacity_bytes, host_capacity_bytes, resolve_budget
from lowtide.memory.layout import Layout
from lowtide.optim.update_types import Numerics
from lowtide.planning.budget_plans import StaticPartition, StepSample, WarmUp, partition, plan_after, warm_up_plan
from lowtide.planning.plan import Plan
from lowtide.runtime.state_size import state_bytes_per_parameter_byte
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
        """For the observed step."""
        return warm_up_plan(self.layout, self.config, self.device_bytes, host_bytes=self.host_bytes)

    def after(self, samples: Iterable[StepSample]) -> Plan:
        """For all further steps."""
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
