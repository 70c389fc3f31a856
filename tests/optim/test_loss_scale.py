"""The scale's own rules, against a model that keeps the whole history and looks at it anew after each step."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.optim.loss_scale import (
    LARGEST_FP32,
    DynamicScale,
    Replenish,
    ScaleState,
    StaticScale,
    after_step,
    first_state,
    stands_still,
)

SETTINGS = st.builds(
    DynamicScale,
    initial_scale=st.sampled_from([4.0, 16.0, 2.0**16]),
    growth_factor=st.sampled_from([1.5, 2.0, 3.0]),
    backoff_factor=st.sampled_from([0.25, 0.5, 0.7]),
    growth_interval=st.integers(1, 4),
    min_scale=st.sampled_from([0.5, 1.0, 4.0]),
    hysteresis=st.integers(1, 3),
    replenish=st.sampled_from(Replenish),
    patience=st.sampled_from([None, 1, 3]),
)


def run(settings: DynamicScale | StaticScale, history: list[bool]) -> ScaleState:
    state = first_state(settings)
    for overflowed in history:
        state = after_step(state, settings, overflowed=overflowed)
    return state


def brute_force(settings: DynamicScale, history: list[bool]) -> tuple[float, list[float]]:
    """The scale after a history, by counting backwards in it at each step."""
    scale = settings.initial_scale
    scales = [scale]
    last_growth = -1
    for index, overflowed in enumerate(history):
        since = history[last_growth + 1 : index + 1]
        if settings.replenish is Replenish.AFTER_GOOD_STEP and False in since:
            since = since[len(since) - since[::-1].index(False) :]
        if overflowed:
            if sum(since) >= settings.hysteresis:
                scale = max(scale * settings.backoff_factor, settings.min_scale)
        else:
            run_length = 0
            for earlier in reversed(history[last_growth + 1 : index + 1]):
                if earlier:
                    break
                run_length += 1
            if run_length == settings.growth_interval:
                scale *= settings.growth_factor
                last_growth = index
        # A scale is an fp32 number.
        scale = torch.tensor(scale, dtype=torch.float32).item()
        scales.append(scale)
    return scale, scales


@given(settings=SETTINGS, history=st.lists(st.booleans(), max_size=40))
def test_the_scale_is_that_of_the_history(settings: DynamicScale, history: list[bool]) -> None:
    expected, scales = brute_force(settings, history)
    state = run(settings, history)
    assert state.scale == expected
    assert settings.min_scale <= state.scale <= LARGEST_FP32
    num_at_floor = 0
    for overflowed, before in zip(reversed(history), reversed(scales[:-1]), strict=True):
        if not (overflowed and before <= settings.min_scale):
            break
        num_at_floor += 1
    assert state.num_overflows_at_floor == num_at_floor
    assert stands_still(state, settings) == (settings.patience is not None and num_at_floor >= settings.patience)


@given(
    growth_factor=st.floats(1.01, 1e6),
    backoff_factor=st.floats(0.01, 0.99),
    growth_interval=st.integers(1, 4),
    history=st.lists(st.booleans(), max_size=60),
)
def test_without_floor_and_hysteresis_it_is_torchs(
    growth_factor: float, backoff_factor: float, growth_interval: int, history: list[bool]
) -> None:
    settings = DynamicScale(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=2.0**-126,
        patience=None,
    )
    state = first_state(settings)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for overflowed in history:
        if state.scale * backoff_factor < settings.min_scale:
            break  # torch has no floor
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(overflowed)), growth_factor, backoff_factor, growth_interval
        )
        state = after_step(state, settings, overflowed=overflowed)
        assert (state.scale, state.num_good_steps) == (scale.item(), tracker.item())


def test_one_overflow_is_tolerated_and_forgotten_with_growth() -> None:
    settings = DynamicScale(initial_scale=8.0, hysteresis=2, growth_interval=3)
    good, bad = False, True
    assert run(settings, [bad]).scale == 8.0
    assert run(settings, [bad, good, bad]).scale == 4.0
    assert run(settings, [bad, good, bad, bad]).scale == 2.0, "once it acts, each overflow lowers"
    assert run(settings, [bad, good, good, good]).scale == 16.0
    assert run(settings, [bad, good, good, good, bad]).scale == 16.0, "tolerated again"


def test_good_steps_forget_where_that_is_asked_for() -> None:
    settings = DynamicScale(initial_scale=8.0, hysteresis=2, replenish=Replenish.AFTER_GOOD_STEP)
    assert run(settings, [True, False, True, False, True]).scale == 8.0
    assert run(settings, [True, False, True, True]).scale == 4.0


def test_a_static_scale_stays() -> None:
    settings = StaticScale(scale=64.0, patience=2)
    assert run(settings, [False] * 10 + [True] * 5).scale == 64.0
    assert not stands_still(run(settings, [True, False, True]), settings)
    assert stands_still(run(settings, [False, True, True]), settings)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (StaticScale, {"scale": 0.0}, "scale is 0.0; give a positive number that fp32 can hold"),
        (StaticScale, {"scale": float("nan")}, "scale is nan"),
        (StaticScale, {"patience": 0}, "patience is 0; give a whole number of steps, 1 or more"),
        (DynamicScale, {"initial_scale": -1.0}, "initial_scale is -1.0"),
        (DynamicScale, {"initial_scale": 1e39}, "initial_scale is 1e[+]39"),
        (DynamicScale, {"initial_scale": 1.0, "min_scale": 2.0}, "min_scale is 2, above initial_scale, 1"),
        (DynamicScale, {"growth_factor": 1.0}, "growth_factor is 1.0; give a number above 1"),
        (DynamicScale, {"backoff_factor": 1.0}, "backoff_factor is 1.0; give a number between 0 and 1"),
        (DynamicScale, {"backoff_factor": 0.0}, "backoff_factor is 0.0"),
        (DynamicScale, {"growth_interval": 0}, "growth_interval is 0; give a whole number of steps, 1 or more"),
        (DynamicScale, {"hysteresis": 0}, "hysteresis is 0; give a whole number of steps, 1 or more"),
        (DynamicScale, {"replenish": "never"}, "replenish is 'never'; give a member of Replenish"),
    ],
)
def test_settings_are_validated(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)


@pytest.mark.parametrize("value", ["2", True, None, math.nan, math.inf, [2]], ids=repr)
@pytest.mark.parametrize(
    ("kind", "key", "advice"),
    [
        (StaticScale, "scale", "give a positive number that fp32 can hold"),
        (StaticScale, "patience", "give a whole number of steps, 1 or more, or None for any number"),
        (DynamicScale, "initial_scale", "give a positive number that fp32 can hold"),
        (DynamicScale, "min_scale", "give a positive number that fp32 can hold"),
        (DynamicScale, "growth_factor", "give a number above 1"),
        (DynamicScale, "backoff_factor", "give a number between 0 and 1"),
        (DynamicScale, "growth_interval", "give a whole number of steps, 1 or more"),
        (DynamicScale, "hysteresis", "give a whole number of steps, 1 or more"),
        (DynamicScale, "patience", "give a whole number of steps, 1 or more, or None for any number"),
        (DynamicScale, "replenish", "give a member of Replenish"),
    ],
)
def test_settings_of_other_types(kind: Any, key: str, advice: str, value: object) -> None:
    if key == "patience" and value is None:
        assert kind(patience=None).patience is None
        return
    with pytest.raises(ConfigError, match=re.escape(f"{key} is {value!r}; {advice}")):
        kind(**{key: value})


def test_steps_are_whole_and_numbers_of_numpy_are_numbers() -> None:
    with pytest.raises(ConfigError, match="growth_interval is 2.5; give a whole number of steps, 1 or more"):
        DynamicScale(growth_interval=2.5)  # type: ignore[arg-type]  # on purpose
    settings = DynamicScale(initial_scale=np.float32(8.0), growth_interval=np.int64(1), hysteresis=np.int32(2))  # type: ignore[arg-type]  # a number
    assert after_step(first_state(settings), settings, overflowed=False).scale == 16.0
