"""ChunkOptimizer: runs the user's own torch optimizer on some of its parameters at a time.

The step of an elementwise or per-parameter optimizer is the same whether it is given all parameters at once or one
chunk after the other. So each chunk gets a shadow: an object of the optimizer's own class, with the same settings, over
the chunk's tensors and their entries of the optimizer's state. The kernels and the choice between a loop, foreach and
fused are torch's and the user's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide import compat
from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.runtime.clip_factor import ClipFactor

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an update needs to know of the optimizer, at one moment: the update itself may run later."""

    groups: tuple[Mapping[str, Any], ...]
    """Of each param group: learning rate, decay, and the rest."""
    scaler: Mapping[str, Any]
    """What a GradScaler leaves to the kernels."""
    clip: ClipFactor | None = None
    """What gradients are multiplied by on the way; None where they were clipped in place, or are not."""
    gate: torch.Tensor | None = None
    """On the device, for own kernels there: 1, or a NaN where the update is to be left out."""

    def on_host(self) -> Settings:
        """For updates on the host: torch would copy the scaler's flag there without waiting for it, and a rate that lies on
        the device would be read by the worker, in the middle of whatever the device does then. Waits for both.
        """
        return replace(self, groups=tuple(map(_on_host, self.groups)), scaler=_on_host(self.scaler))


@dataclass(frozen=True, slots=True)
class Update:
    """One tensor to update, and the parameter under which its state is kept."""

    parameter: torch.Tensor
    target: torch.Tensor
    """The parameter itself, or its twin on the host; its `.grad` is the gradient."""


class ChunkOptimizer:
    """Wraps the user's optimizer; owns nothing.

    Args:
        optimizer: The user's.
        devices: Where steps will run: each param group is tried out there on a tiny tensor.

    Raises:
        UnsupportedOptimizerError: The optimizer looks across parameters, needs a closure, or keeps counters in its
            param groups, which a step by chunks would advance several times.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, devices: Sequence[torch.device] = (_HOST,)) -> None:
        self.optimizer = optimizer
        self._group_of: dict[int, int] = {}
        self._needs_rate = all(group.get("lr") is not None for group in optimizer.param_groups)
        """Whether each group must have a learning rate: there are optimizers that take None for their own choice."""
        self.refresh_groups()
        for device in devices:
            _refuse_what_looks_across(optimizer, device)

    def refresh_groups(self) -> None:
        """Read again which parameter is in which group."""
        self._group_of = {
            id(parameter): index
            for index, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer has the parameter."""
        return id(parameter) in self._group_of

    def settings(self) -> Settings:
        """The groups' settings now. Tensors are copied: a scheduler may change them before the update runs.

        Raises:
            ConfigError: A learning rate is none. Found before the first update, which would stop half way.
        """
        if self._needs_rate:
            for index, group in enumerate(self.optimizer.param_groups):
                _require_rate(index, group.get("lr"))
        groups = tuple(
            {key: _each_tensor(torch.Tensor.clone, value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        )
        return Settings(groups=groups, scaler=compat.scaler_values(self.optimizer))

    def claim_state(self, updates: Sequence[Update], settings: Settings) -> None:
        """Make the state's entries exist, in the thread that owns the dictionary."""
        del settings
        for update in updates:
            self.optimizer.state[update.parameter]  # a defaultdict: looking makes the entry

    def forget_empty_state(self) -> None:
        """Drop entries that were made for an update that keeps no state: plain torch has none there."""
        for parameter in [parameter for parameter, state in self.optimizer.state.items() if state == {}]:
            del self.optimizer.state[parameter]

    def run(self, updates: Sequence[Update], settings: Settings) -> None:
        """One optimizer step on these tensors."""
        groups: dict[int, dict[str, Any]] = {}
        for update in updates:
            index = self._group_of[id(update.parameter)]
            group = groups.setdefault(index, {**settings.groups[index], "params": []})
            group["params"].append(update.target)
        state = {update.target: self.optimizer.state[update.parameter] for update in updates}
        shadow = compat.shallow_optimizer(self.optimizer, list(groups.values()), state)
        vars(shadow).update(settings.scaler)
        compat.step_without_hooks(shadow)

    def undo_of(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """What takes the count of their next update back, if its gate leaves it out; None: torch's own step has no gate."""
        del parameters
        return None

    def check_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None, name: str | None = None) -> None:
        """Refuse a gradient that the update cannot take, before anything is updated; torch's own says so itself."""

    def needs_values(self, updates: Sequence[Update]) -> bool:
        """Whether weights are read when state is claimed, and not only by the update."""
        del updates
        return False

    def prefetch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Their updates on the device are near; torch's own state is where it belongs."""

    def dismiss(self) -> None:
        """A backward is over; nothing that was prefetched is needed."""

    def place_state(self, parameter: torch.Tensor, device: torch.device) -> None:
        """Move a parameter's state to where its update runs: it was made or loaded elsewhere."""
        state = self.optimizer.state.get(parameter)
        if not state:
            return
        group = self.optimizer.param_groups[self._group_of[id(parameter)]]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.device == device:
                continue
            # torch keeps the step count on the host, unless the kernel reads it there.
            if key == "step" and not (group.get("capturable") or group.get("fused")):
                continue
            state[key] = value.to(device)


def _require_rate(index: int, rate: object) -> None:
    if isinstance(rate, torch.Tensor):
        # One on the device is not looked into, which would wait for it.
        if rate.device != _HOST or bool(rate.isfinite().all()):
            return
    elif isinstance(rate, int | float) and math.isfinite(rate):
        return
    raise ConfigError(
        f"lr of param group {index} is {rate!r}; set a finite number before the next step (a scheduler or a loaded state may "
        "have put this there). Nothing was updated",
        key="lr",
    )


def _on_host(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _each_tensor(torch.Tensor.cpu, value) for key, value in settings.items()}


def _each_tensor(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The setting with its tensors changed: it may be one, or a tuple of them, as betas are."""
    if isinstance(value, tuple):
        return tuple(_each_tensor(change, part) for part in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def _refuse_what_looks_across(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            f"{name} takes its step over all parameters at once and calls a closure several times, so no chunk can be "
            "updated by itself; use an elementwise optimizer such as AdamW, or train this model without Lowtide"
        )
    for index, group in enumerate(optimizer.param_groups):
        probe = torch.zeros(2, 2, device=device)
        probe.grad = torch.zeros(2, 2, device=device)
        before = {key: value for key, value in group.items() if key != "params"}
        if isinstance(before.get("lr"), torch.Tensor):
            before["lr"] = before["lr"].detach().to(device, copy=True)
        after = {**before, "params": [probe]}
        try:
            compat.step_without_hooks(compat.shallow_optimizer(optimizer, [after], {probe: {}}))
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{name} could not take a step on one parameter alone on {device} (param group {index}): "
                f"{type(error).__name__}: {error}; Lowtide updates chunk by chunk, which needs an elementwise or "
                "per-parameter optimizer"
            ) from error
        changed = sorted(key for key in before if after[key] is not before[key] and not _same(after[key], before[key]))
        changed += sorted(set(after) - set(before) - {"params"})
        if changed:
            raise UnsupportedOptimizerError(
                f"{name} changes {', '.join(changed)} of its param group {index} in each step; a step by chunks would "
                "change it once for every chunk, so Lowtide refuses it"
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
