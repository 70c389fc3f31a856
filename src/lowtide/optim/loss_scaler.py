"""LossScaler: keeps fp16 gradients in range, under the calls of `torch.amp.GradScaler`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import ConfigError, LossScaleError
from lowtide.optim.loss_scale import (
    DynamicScale,
    Replenish,
    ScaleSettings,
    ScaleState,
    StaticScale,
    after_step,
    first_state,
    stands_still,
    to_fp32,
)

Outputs = TypeVar("Outputs", bound=Tensor | Iterable[Any])
Reduce = Callable[[Tensor], object]
"""Given the flag, one fp32 number that is 1 where a gradient was not finite: takes its maximum over all ranks in place."""


@dataclass(slots=True)
class _Visit:
    """What one optimizer went through since the last `update`. Holds the optimizer, so that its `id` stays its own."""

    optimizer: torch.optim.Optimizer
    flag: Tensor
    overflowed: bool | None = None
    """None until the flag was read."""
    is_stepped: bool = False


class LossScaler:
    """Multiplies the loss, divides the gradients, and skips the steps in which one of them is not finite.

    The calls are those of `torch.amp.GradScaler`. Differences: weights in fp16 are allowed; the settings are honoured in
    full (floor, hysteresis); the scale is kept on the host, so that gradients on the host and on devices are divided by
    the same number without waiting for a copy; the flag is kept on the device and read once in each `step`, after
    `reduce`. A skipped step leaves weights and optimizer state as they are and makes `step` return None; whether a
    learning rate scheduler goes on is the loop's own decision, with `last_step_skipped`. With several optimizers each
    skips by its own gradients, and the scale follows all of them, as in torch.

    Args:
        settings: How the scale behaves.
        enabled: False makes each call do nothing, and `step` call the optimizer's.
        reduce: Takes the maximum of the flag over ranks, in place. Called once for each optimizer and step, also where
            it has no gradients; every rank then skips or takes the same steps.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = LossScaler(DynamicScale(initial_scale=1024.0))
        >>> scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale(), scaler.skipped_steps
        (512.0, 1)
    """

    def __init__(
        self, settings: ScaleSettings | None = None, *, enabled: bool = True, reduce: Reduce | None = None
    ) -> None:
        given: object = settings
        if given is not None and not isinstance(given, StaticScale | DynamicScale):
            raise ConfigError(
                f"settings is {given!r}; give StaticScale(scale=...) or DynamicScale(initial_scale=...)", key="settings"
            )
        self.settings: ScaleSettings = settings if settings is not None else DynamicScale()
        self.skipped_steps = 0
        """Steps of optimizers that were skipped because of gradients that were not finite, since the beginning."""
        self.last_step_skipped = False
        """Whether the last call of `step` skipped."""
        self._enabled = enabled
        self._reduce = reduce
        self._state = first_state(self.settings)
        self._device: torch.device | None = None
        """Where the first tensor that was scaled lies: there a flag is kept that no gradient gave a device to."""
        self._visits: dict[int, _Visit] = {}

    # The calls of a loop

    def scale(self, outputs: Outputs) -> Outputs:
        """A tensor, or the tensors of a list or tuple, multiplied by the scale."""
        if not self._enabled:
            return outputs
        scaled: Outputs = self._scaled(outputs)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place: to clip or look at them before `step`.

        Does not wait for the device. At most once for each step, when all its gradients are there.
        """
        if not self._enabled:
            return
        visit = self._visits.get(id(optimizer))
        if visit is not None:
            done = "stepped" if visit.is_stepped else "unscaled"
            raise LossScaleError(
                f"the gradients of {type(optimizer).__name__} were {done} already since the last update(); dividing them "
                f"by {self._state.scale:g} again would shrink them. Call unscale_ once, before step, and update after"
            )
        if self._device is None:
            raise LossScaleError(
                f"unscale_ would divide gradients by {self._state.scale:g}, and no loss was ever scaled; call "
                "scaler.scale(loss).backward() in place of loss.backward()"
            )
        self._visits[id(optimizer)] = _Visit(optimizer, self._unscaled(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` with gradients divided by the scale; None, and nothing done, where one is not finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        _refuse_closures(optimizer, args, kwargs)
        if id(optimizer) not in self._visits:
            self.unscale_(optimizer)
        visit = self._visits[id(optimizer)]
        if visit.is_stepped:
            raise LossScaleError(
                f"{type(optimizer).__name__} was stepped already since the last update(), at scale "
                f"{self._state.scale:g}; call update() after each round of steps"
            )
        self.last_step_skipped = self._overflowed(visit)
        visit.is_stepped = True
        if self.last_step_skipped:
            self.skipped_steps += 1
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale follow what was found since the last call, or set it. At the end of each round of steps.

        Raises:
            LossScaleError: Nothing was stepped, or so many steps in a row overflowed at the lowest scale that training
                stands still. The state is kept: the loop may go on after catching it, and skips further steps.
        """
        if not self._enabled:
            return
        if new_scale is None:
            if not self._visits:
                raise LossScaleError(
                    "update() was called, and no optimizer was stepped or unscaled since the last one; call "
                    "scaler.step(optimizer) before it"
                )
            # Read all of them: each is reduced over ranks, which must not depend on what this rank found.
            found = [self._overflowed(visit) for visit in self._visits.values()]
            self._state = after_step(self._state, self.settings, overflowed=any(found))
        else:
            value = to_fp32(float(new_scale))
            # Validated like a scale that is given at the start.
            StaticScale(scale=value)
            self._state = replace(self._state, scale=value, num_overflows_at_floor=0)
        self._visits.clear()
        if stands_still(self._state, self.settings):
            self._stop()

    def get_scale(self) -> float:
        """The scale; 1.0 where scaling is not enabled. Does not wait for the device."""
        return self._state.scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The scale, its counters and settings: of a dynamic scale in the form of `torch.amp.GradScaler`, and more.

        Torch's own scaler can load it. Empty where scaling is not enabled. To be called after `update`.
        """
        if not self._enabled:
            return {}
        settings = {field.name: getattr(self.settings, field.name) for field in fields(self.settings)}
        settings.pop("initial_scale", None)
        if "replenish" in settings:
            settings["replenish"] = settings["replenish"].value
        return {
            **settings,
            "scale": self._state.scale,
            "_growth_tracker": self._state.num_good_steps,
            "hysteresis_left": self._state.hysteresis_left,
            "num_overflows_at_floor": self._state.num_overflows_at_floor,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, also one of torch's scaler. As there, saved settings replace those that were given."""
        if not self._enabled:
            return
        is_dynamic = isinstance(self.settings, DynamicScale)
        if "scale" not in state_dict or is_dynamic != ("growth_factor" in state_dict):
            kind = "dynamic" if is_dynamic else "static"
            raise ConfigError(
                f"the saved state has the keys {sorted(state_dict)}, which is not that of a {kind} scale; make the scaler "
                "with the settings it was saved with (an empty state comes from one that was not enabled)",
                key="scale",
            )
        scale = float(state_dict["scale"])
        known = {field.name for field in fields(self.settings)}
        saved = {key: value for key, value in state_dict.items() if key in known}
        if "replenish" in saved:
            saved["replenish"] = Replenish(saved["replenish"])
        if isinstance(self.settings, DynamicScale):
            # A scale that torch lowered below our floor stays where it is.
            floor = min(saved.get("min_scale", self.settings.min_scale), scale)
            saved |= {"initial_scale": max(self.settings.initial_scale, scale), "min_scale": floor}
        self.settings = replace(self.settings, **saved)
        self._state = ScaleState(
            scale=to_fp32(scale),
            num_good_steps=int(state_dict.get("_growth_tracker", 0)),
            hysteresis_left=int(state_dict.get("hysteresis_left", first_state(self.settings).hysteresis_left)),
            num_overflows_at_floor=int(state_dict.get("num_overflows_at_floor", 0)),
        )
        self.skipped_steps = int(state_dict.get("skipped_steps", 0))
        self._visits.clear()

    # Inside

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            if self._device is None:
                self._device = outputs.device
            # A number of Python would leave an fp16 loss in fp16, where most scales are infinite.
            return outputs * torch.full((), self._state.scale, dtype=torch.float32, device=outputs.device)
        if isinstance(outputs, list | tuple):
            return type(outputs)(self._scaled(output) for output in outputs)
        if isinstance(outputs, Iterable):
            return map(self._scaled, outputs)
        raise ConfigError(
            f"scale() was given a {type(outputs).__name__}; give a tensor, or a list or tuple of tensors", key="outputs"
        )

    def _unscaled(self, optimizer: torch.optim.Optimizer) -> Tensor:
        flag = _unscale_gradients(optimizer, self._state.scale, device=self._device)
        if flag is not None:
            return flag
        if self._reduce is None:
            raise LossScaleError(
                f"none of the parameters of {type(optimizer).__name__} has a gradient, so nothing was checked; call "
                "backward on scaler.scale(loss) before, and zero_grad after step"
            )
        # Another rank may have gradients, and waits for this one's flag.
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def _overflowed(self, visit: _Visit) -> bool:
        if visit.overflowed is None:
            if self._reduce is not None:
                self._reduce(visit.flag)
            visit.overflowed = visit.flag.item() != 0.0
        return visit.overflowed

    def _stop(self) -> None:
        is_static = isinstance(self.settings, StaticScale)
        advice = "lower the scale, or use a DynamicScale" if is_static else "lower min_scale if it is above 1"
        raise LossScaleError(
            f"gradients were not finite in {self._state.num_overflows_at_floor} steps in a row at the lowest scale, "
            f"{self._state.scale:g} ({self.skipped_steps} steps skipped in all): the model itself overflows, and nothing is "
            f"learnt. Look for NaN in the loss and the inputs, lower the learning rate or use bf16; {advice}. Weights and "
            "optimizer state are those of the last good step"
        )


def _refuse_closures(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    is_needed = closure is not None and closure.default is inspect.Parameter.empty
    if is_needed or args or kwargs.get("closure") is not None:
        raise LossScaleError(
            f"{type(optimizer).__name__} was to be stepped with a closure, which computes gradients that nobody would "
            "divide by the scale; use an optimizer without one, or train without loss scaling (bf16 needs none)"
        )


def _unscale_gradients(optimizer: torch.optim.Optimizer, scale: float, *, device: torch.device | None) -> Tensor | None:
    """Divide the gradients in place; a flag that is 1 where one was not finite, None where there are none.

    The arithmetic is in fp32, whatever the gradients are. Waits for no device, except where gradients are on several.

    Args:
        optimizer: Its parameters' gradients.
        scale: What the loss was multiplied by.
        device: Where the flag is wanted, if there are gradients: otherwise on another device than the host, if there is
            one among theirs, so that it can be reduced over ranks there.
    """
    # The reciprocal in double, as torch does: of fp32 it could be a bit off.
    factor = to_fp32(1.0 / scale)
    flags: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (place, _), gradients in _gradients_of(optimizer).items():
            if place not in flags:
                flags[place] = torch.zeros((), dtype=torch.float32, device=place)
            inverse = torch.full((), factor, dtype=torch.float32, device=place)
            compat.unscale_in_place(gradients, flags[place], inverse)
        if not flags:
            return None
        first = min(flags, key=lambda place: (place != device, place.type == "cpu"))
        flag = flags.pop(first)
        for other in flags.values():
            # Blocking: a copy from a device that the host does not wait for may be read before it has arrived.
            flag = torch.maximum(flag, other.to(first))
        return flag


def _gradients_of(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Each gradient once, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype.is_complex:
            raise LossScaleError(
                f"a gradient of {type(optimizer).__name__} is complex, {tuple(gradient.shape)} {gradient.dtype}; complex "
                "weights cannot be scaled: train them with an optimizer of their own, without the scaler"
            )
        if gradient.layout is torch.sparse_coo:
            # Rows that were looked up twice are summed first: the sum may overflow where its terms do not.
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad.values()
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return found
