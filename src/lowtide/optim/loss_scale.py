"""The scale of a loss: its settings, and how it goes up and down from step to step. Plain data, no tensors.

fp16 has no numbers between 0 and 6e-8, so small gradients vanish. The loss is multiplied by a scale, which multiplies
every gradient, and the gradients are divided by it in fp32 before they are used. Too large a scale makes gradients
infinite; such a step is skipped. A dynamic scale is lowered after skipped steps and raised after many good ones.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass, replace
from numbers import Integral, Real

from lowtide.errors import ConfigError

LARGEST_FP32 = 3.4028234663852886e38
SMALLEST_FP32 = 2.0**-126
"""The smallest normal number: the reciprocal of a scale below the inverse of the largest would be infinite."""


class Replenish(enum.Enum):
    """When the overflows that were tolerated are forgotten, so that as many are tolerated again."""

    WITH_GROWTH = "with_growth"
    """When the scale is raised. Megatron, and DeepSpeed by default."""
    AFTER_GOOD_STEP = "after_good_step"
    """After each step without an overflow: only overflows in a row count. DeepSpeed's `consecutive_hysteresis`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticScale:
    """Always the same scale. A step that overflows is skipped, and the next one has the same scale."""

    scale: float = 2.0**12
    patience: int | None = 50
    """How many steps in a row may overflow before an error says that training stands still; None for any number."""

    def __post_init__(self) -> None:
        _require_scale("scale", self.scale)
        _require_patience(self.patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScale:
    """A scale that finds its own level. The defaults are those of `torch.amp.GradScaler`, with a floor.

    Example:
        >>> state = first_state(DynamicScale(initial_scale=8.0, hysteresis=2))
        >>> state = after_step(state, DynamicScale(initial_scale=8.0, hysteresis=2), overflowed=True)
        >>> state.scale, state.hysteresis_left
        (8.0, 1)
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps in a row without an overflow; above 1."""
    backoff_factor: float = 0.5
    """What it is multiplied by after an overflow that is not tolerated; between 0 and 1."""
    growth_interval: int = 2000
    """Steps without an overflow after which the scale is raised."""
    min_scale: float = 1.0
    """The floor: the scale is never lowered below it."""
    hysteresis: int = 1
    """The overflow that lowers the scale: 1 for each, 2 tolerates one and acts on the second. Once it acts, each
    further overflow lowers the scale, until `replenish` says that as many are tolerated again. A tolerated overflow
    skips its step and begins the count of good steps anew, like any other."""
    replenish: Replenish = Replenish.WITH_GROWTH
    patience: int | None = 50
    """How many steps in a row may overflow at the floor before an error says that training stands still; None for any
    number."""

    def __post_init__(self) -> None:
        _require_scale("initial_scale", self.initial_scale)
        _require_scale("min_scale", self.min_scale)
        _require_patience(self.patience)
        if self.min_scale > self.initial_scale:
            raise ConfigError(
                f"min_scale is {self.min_scale:g}, above initial_scale, {self.initial_scale:g}; the scale starts at or "
                "above its floor",
                key="min_scale",
            )
        if not (_is_number(self.growth_factor) and 1.0 < self.growth_factor < math.inf):
            raise ConfigError(f"growth_factor is {self.growth_factor!r}; give a number above 1", key="growth_factor")
        if not (_is_number(self.backoff_factor) and 0.0 < self.backoff_factor < 1.0):
            raise ConfigError(
                f"backoff_factor is {self.backoff_factor!r}; give a number between 0 and 1", key="backoff_factor"
            )
        for key in ("growth_interval", "hysteresis"):
            if not _is_count(getattr(self, key)):
                raise ConfigError(f"{key} is {getattr(self, key)!r}; give a whole number of steps, 1 or more", key=key)
        if not isinstance(self.replenish, Replenish):
            raise ConfigError(f"replenish is {self.replenish!r}; give a member of Replenish", key="replenish")


ScaleSettings = StaticScale | DynamicScale


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """Where the scale stands between two steps."""

    scale: float
    num_good_steps: int = 0
    """Since the last overflow or growth."""
    hysteresis_left: int = 1
    """The overflow that will lower the scale, counted from now: 1 for the next."""
    num_overflows_at_floor: int = 0
    """In a row, with a scale that could not be lowered."""


def first_state(settings: ScaleSettings) -> ScaleState:
    """The state before the first step."""
    if isinstance(settings, StaticScale):
        return ScaleState(scale=to_fp32(settings.scale))
    return ScaleState(scale=to_fp32(settings.initial_scale), hysteresis_left=settings.hysteresis)


def after_step(state: ScaleState, settings: ScaleSettings, *, overflowed: bool) -> ScaleState:
    """The state after a step. Never raises: see `stands_still`."""
    if isinstance(settings, StaticScale):
        num_overflows = state.num_overflows_at_floor + 1 if overflowed else 0
        return replace(state, num_overflows_at_floor=num_overflows)
    return _after_overflow(state, settings) if overflowed else _after_good_step(state, settings)


def stands_still(state: ScaleState, settings: ScaleSettings) -> bool:
    """Whether so many steps in a row overflowed, with a scale that cannot be lowered, that nothing is learnt."""
    return settings.patience is not None and state.num_overflows_at_floor >= settings.patience


def to_fp32(value: float) -> float:
    """The nearest fp32 number: the scale is one, on every device and in every file."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _after_overflow(state: ScaleState, settings: DynamicScale) -> ScaleState:
    # The floor may have been raised above the scale by loaded or replaced settings; never raise the scale here.
    was_at_floor = state.scale <= settings.min_scale
    acts = state.hysteresis_left <= 1
    lowered = max(to_fp32(state.scale * settings.backoff_factor), min(settings.min_scale, state.scale))
    return ScaleState(
        scale=lowered if acts else state.scale,
        hysteresis_left=1 if acts else state.hysteresis_left - 1,
        num_overflows_at_floor=state.num_overflows_at_floor + 1 if was_at_floor else 0,
    )


def _after_good_step(state: ScaleState, settings: DynamicScale) -> ScaleState:
    grows = state.num_good_steps + 1 >= settings.growth_interval
    forgets = grows or settings.replenish is Replenish.AFTER_GOOD_STEP
    raised = state.scale * settings.growth_factor
    # At the end of fp32's range the scale stays, as in torch.
    can_rise = grows and raised <= LARGEST_FP32
    return ScaleState(
        scale=to_fp32(raised) if can_rise else state.scale,
        num_good_steps=0 if grows else state.num_good_steps + 1,
        hysteresis_left=settings.hysteresis if forgets else state.hysteresis_left,
    )


def _require_scale(key: str, scale: float) -> None:
    if not (_is_number(scale) and SMALLEST_FP32 <= scale <= LARGEST_FP32):
        raise ConfigError(f"{key} is {scale!r}; give a positive number that fp32 can hold", key=key)


def _require_patience(patience: int | None) -> None:
    if patience is not None and not _is_count(patience):
        raise ConfigError(
            f"patience is {patience!r}; give a whole number of steps, 1 or more, or None for any number", key="patience"
        )


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1
