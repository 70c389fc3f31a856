"""ChunkOptimizer: runs the user's own torch optimizer on some of its parameters at a time.

The step of an elementwise or per-parameter optimizer is the same whether it is given all parameters at once or one
chunk after the other. So each chunk gets a shadow: an object of the optimizer's own class, with the same settings, over
the chunk's tensors and their entries of the optimizer's state. The kernels and the choice between a loop, foreach and
fused are torch's and the user's; but see Note [The fused step on the host].

Note [The fused step on the host]
Left to itself, torch takes a loop of eight operators over the memory for each tensor on the CPU, which the host of a GPU has
not the bandwidth for. Where the user left the choice to torch, the host of a CUDA session takes torch's own fused kernel,
one pass: the step of CPU torch with `fused=True`. An emulated device keeps torch's choice, so that a managed model on the
CPU has the bits of a plain one.
"""

from __future__ import annotations

import math
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lowtide import compat
from lowtide.errors import ConfigError, UnsupportedOptimizerError
from lowtide.planning.plan import Schedule
from lowtide.runtime.updates.norms import ClipFactor


def unwrapped(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> torch.optim.Optimizer:
    """The optimizer that updates the parameters: a wrapper's own, which the wrapper goes on calling.

    What the wrapper does beside that it does in the loop's thread, before or after the inner step, as in plain torch.

    Raises:
        UnsupportedOptimizerError: There are several inside, over other parameters than its own, or it would not call the
            managed step.
    """
    name = type(optimizer).__name__
    inner = {key: value for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)}
    inner |= {
        f"{key}[{place!r}]": each
        for key, value in vars(optimizer).items()
        if isinstance(value, list | tuple | dict)
        for place, each in (value.items() if isinstance(value, dict) else enumerate(value))
        if isinstance(each, torch.optim.Optimizer)
    }
    if not inner:
        return optimizer
    path, found = next(iter(inner.items()))
    kind = type(found).__name__
    if len({id(each) for each in inner.values()}) > 1 or not _parameters(optimizer) <= _parameters(found):
        raise UnsupportedOptimizerError(
            f"{name} steps other optimizers ({', '.join(type(each).__name__ for each in inner.values())}) beside its own "
            "parameters, and a session has one; make one optimizer with a param group for each"
        )
    if any(isinstance(value, types.MethodType) and value.__self__ is found for value in vars(optimizer).values()):
        raise UnsupportedOptimizerError(
            f"{name} has kept the step of the {kind} in it from before, as accelerate does with a GradScaler, and would go "
            f"past the session; manage the {kind} first, and make the {name} of it (accelerator.prepare) afterwards"
        )
    if schedule is Schedule.IN_BACKWARD and not _only_delegates(optimizer):
        raise UnsupportedOptimizerError(
            f"{name} does more in its step than the {kind} in it, and with the schedule 'in_backward' the weights have moved "
            f"when that begins; use the schedule 'deferred', or manage and step the {kind} (optimizer.{path}) alone"
        )
    return unwrapped(found, schedule)


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(each) for group in getattr(optimizer, "param_groups", ()) for each in group["params"]}


def _only_delegates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the wrapper is one that is known to do nothing of its own."""
    return (type(optimizer).__module__, type(optimizer).__name__) == ("accelerate.optimizer", "AcceleratedOptimizer")


_HOST = torch.device("cpu")
_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Not SGD: torch's fused one on the CPU leaves weights in bf16 and fp16 as they are."""
_FUSED_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an update needs to know of the optimizer, as it was at one instant: the update itself may run later."""

    groups: tuple[Mapping[str, Any], ...]
    """Learning rate, decay and the rest, for each param group."""
    scaler: Mapping[str, Any]
    """What a GradScaler leaves to the kernels."""
    clip: ClipFactor | None = None
    """What gradients are multiplied by on the way; None where they were clipped in place, or are not."""
    gate: torch.Tensor | None = None
    """On the device, for own kernels there: 1, or a NaN where the update is to be left out."""
    is_on_host: bool = False
    """Whether they are for an update on the host."""

    def on_host(self) -> Settings:
        """For updates on the host: torch would copy the scaler's flag there without waiting for it, and a rate that lies on
        the device would be read by the worker, in the middle of whatever the device does then. Waits for both.
        """
        return replace(self, groups=tuple(map(on_host, self.groups)), scaler=on_host(self.scaler), is_on_host=True)


class Update(NamedTuple):
    """One tensor to update, and the parameter under which its state is kept."""

    parameter: torch.Tensor
    target: torch.Tensor
    """The parameter itself, its host target, or this rank's piece of it; its `.grad` is the gradient."""
    first_element: int = 0
    """Where the target begins in the parameter's memory."""


class ChunkOptimizer:
    """Wraps the user's optimizer, which `updates.proof.prove` has tried out; owns nothing.

    Args:
        optimizer: The user's.
        advances_groups: Whether it counts its steps in its param groups.
        fuses_on_host: Whether the host takes torch's fused step; see Note [The fused step on the host].
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, advances_groups: bool = False, fuses_on_host: bool = False
    ) -> None:
        self.optimizer = optimizer
        self._advances_groups = advances_groups
        self._fuses_on_host = fuses_on_host
        self._looked_at: set[int] = set()
        """`id`s of parameters without state whose entries its step makes all the same, as in plain torch."""
        self._group_of: dict[int, int] = {}
        self._read: list[list[torch.Tensor]] = []
        """The parameters of each group when that was last read."""
        self._needs_rate = all(group.get("lr") is not None for group in optimizer.param_groups)
        """Whether each group must have a learning rate: there are optimizers that take None for their own choice."""
        self.refresh_groups()

    def refresh_groups(self) -> None:
        """Read again which parameter is in which group, where the groups have changed."""
        lists = [group["params"] for group in self.optimizer.param_groups]
        # By identity: to compare tensors is to compare their values.
        if len(lists) == len(self._read) and all(map(_are_same, lists, self._read)):
            return
        self._group_of = {id(parameter): index for index, params in enumerate(lists) for parameter in params}
        self._read = [list(params) for params in lists]

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer has the parameter."""
        return id(parameter) in self._group_of

    def settings(self) -> Settings:
        """The groups' settings now, for updates that may run later.

        Raises:
            ConfigError: A learning rate is none. Found before the first update, which would stop half way.
        """
        if self._needs_rate:
            for index, group in enumerate(self.optimizer.param_groups):
                _require_rate(index, group.get("lr"))
        return self.settings_now()

    def settings_now(self) -> Settings:
        """The groups' settings, whatever they are. Tensors are copied: a scheduler may change them before the update runs."""
        groups = tuple(
            {key: _each_tensor(torch.Tensor.clone, value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        )
        return Settings(groups=groups, scaler=compat.scaler_values(self.optimizer))

    def claim_state(self, updates: Sequence[Update], settings: Settings) -> None:
        """Make the state's entries exist, in the thread that owns the dictionary."""
        del settings
        for update in updates:
            self._entries(update.parameter)  # a defaultdict: looking makes the entry

    def forget_empty_state(self) -> None:
        """Drop entries that were made for an update that keeps no state: plain torch has none there."""
        for parameter in [parameter for parameter, state in dict.items(self.optimizer.state) if not state]:
            if id(parameter) not in self._looked_at:
                del self.optimizer.state[parameter]

    def run(self, updates: Sequence[Update], settings: Settings) -> None:
        """One optimizer step on these tensors."""
        self.prepare(updates, settings)()

    def prepare(self, updates: Sequence[Update], settings: Settings) -> Callable[[], bool]:
        """What takes one step on these tensors, and says that it did; nothing is changed before it is called."""
        groups: dict[int, dict[str, Any]] = {}
        for update in updates:
            index = self._group_of[id(update.parameter)]
            group = groups.setdefault(index, {**settings.groups[index], "params": []})
            group["params"].append(update.target)
        held = {update.target: self._entries(update.parameter) for update in updates}
        state = defaultdict(dict, {target: entries for target, entries in held.items() if entries})
        if self._fuses_on_host and settings.is_on_host:
            for group in groups.values():
                gradients = [tensor.grad for tensor in group["params"] if tensor.grad is not None]
                dtypes = {tensor.dtype for tensor in [*group["params"], *gradients]}
                steps = {getattr(held[tensor].get("step"), "dtype", torch.float32) for tensor in group["params"]}
                if steps == {torch.float32} and takes_fused_step(type(self.optimizer), group, dtypes):
                    group["fused"] = True
        shadow = compat.shallow_optimizer(self.optimizer, list(groups.values()), state)
        vars(shadow).update(settings.scaler)
        return partial(self._take_step, shadow, updates, held)

    def _take_step(
        self, shadow: torch.optim.Optimizer, updates: Sequence[Update], held: Mapping[torch.Tensor, dict[str, Any]]
    ) -> bool:
        try:
            return compat.step_without_hooks(shadow)
        finally:
            for update in updates:
                left, entries = shadow.state.get(update.target), held[update.target]
                if left is not None and left is not entries:
                    entries.clear()
                    entries.update(left)
                    self._looked_at.add(id(update.parameter))

    def advance(self) -> None:
        """Count a step in the param groups, once for all chunks: each of them has begun from the same settings."""
        self.prepare_advance()()

    def prepare_advance(self) -> Callable[[], None]:
        """What counts a step in the param groups; may be repeated, and counts once."""
        if not self._advances_groups:
            return lambda: None
        before = self.settings_now().groups
        groups = [{**settings, "params": []} for settings in before]
        compat.step_without_hooks(compat.shallow_optimizer(self.optimizer, groups, {}))

        def advance() -> None:
            for live, old, new in zip(self.optimizer.param_groups, before, groups, strict=True):
                live.update({key: value for key, value in new.items() if key != "params" and value is not old.get(key)})

        return advance

    def undo_of(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """What takes the count of their next update back, if its gate leaves it out; None: torch's own step has no gate."""
        del parameters
        return None

    checks_gradients = False
    """Whether `check_gradient` may refuse one."""

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

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The parameter's state; not through a `LiveState`, which would wait for the very update that asks."""
        entries: dict[str, Any] = dict.__getitem__(self.optimizer.state, parameter)
        return entries

    def place_state(self, parameter: torch.Tensor, device: torch.device) -> None:
        """Move a parameter's state to where its update runs: it was made or loaded elsewhere."""
        state = dict.get(self.optimizer.state, parameter)
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


def takes_fused_step(
    kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], dtypes: Iterable[torch.dtype]
) -> bool:
    """Whether the host may take torch's fused step for a param group: the user has left the choice to torch, and it can.

    Args:
        kind: The optimizer's class. A subclass may do anything in its step.
        settings: Of the param group.
        dtypes: Of its weights and gradients.
    """
    is_left_to_torch = "fused" in settings and settings["fused"] is None and settings.get("foreach") is None
    is_plain = not any(settings.get(key) for key in ("capturable", "differentiable"))
    has_tensors = any(isinstance(value, torch.Tensor) for value in (settings.get("lr"), *settings.get("betas", ())))
    return (
        kind in _FUSED_ON_HOST
        and is_left_to_torch
        and is_plain
        and not has_tensors
        and _FUSED_DTYPES.issuperset(dtypes)
    )


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(map(operator.is_, these, those))


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


def on_host(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the tensors among them on the host."""
    return {key: _each_tensor(torch.Tensor.cpu, value) for key, value in settings.items()}


def _each_tensor(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The setting with its tensors changed: it may be one, or a tuple of them, as betas are."""
    if isinstance(value, tuple):
        return tuple(_each_tensor(change, part) for part in value)
    return change(value) if isinstance(value, torch.Tensor) else value
