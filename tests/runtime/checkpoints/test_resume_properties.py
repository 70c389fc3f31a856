"""Random models, plans and loops that are saved somewhere and go on with fresh objects under another plan: the same bits."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from tests.runtime.random_training import OPTIMIZERS, Loop, PlanSpec, Training, build, plan_specs, trainings
from tests.zoo import assert_same_tensors

pytestmark = pytest.mark.slow


@st.composite
def broken_off(draw: st.DrawFn) -> tuple[Training, PlanSpec, int, dict[str, Any]]:
    """A training, the plan under which it goes on, after how many actions it is saved, and its precision."""
    training = draw(trainings())
    other = replace(draw(plan_specs(training.model)), schedule=training.plan.schedule)
    moments = draw(st.sampled_from([None, "fp32", "8bit"]))
    has_kernels = moments is not None and training.optimizer != "rmsprop"
    numerics = {"precision": "fp32", "moments": moments} if has_kernels else {}
    return training, other, draw(st.integers(0, len(training.actions))), numerics


def start(training: Training, plan: PlanSpec, numerics: dict[str, Any]) -> tuple[Loop, lowtide.Session]:
    model = build(training.model)
    optimizer = OPTIMIZERS[training.optimizer](model)
    session = lowtide.manage(model, optimizer, plan.plan(model, None), device="cpu", **numerics)
    return Loop(model, optimizer, is_deferred=plan.schedule == "deferred"), session


@settings(max_examples=25)
@given(case=broken_off())
def test_a_run_that_is_broken_off_goes_on_with_the_same_bits(
    case: tuple[Training, PlanSpec, int, dict[str, Any]],
) -> None:
    training, other, num_before, numerics = case
    with tempfile.TemporaryDirectory() as folder:
        whole, session = start(training, training.plan, numerics)
        with session:
            for action, seed in training.actions[:num_before]:
                whole.act(action, seed)
            session.save(Path(folder))
            num_seen = len(whole.seen)
            for action, seed in training.actions[num_before:]:
                whole.act(action, seed)
            expected = {name: value.clone() for name, value in whole.model.state_dict().items()}
        resumed, session = start(training, other, numerics)
        with session:
            resumed.act("step", 5)
            resumed.seen.clear()
            lowtide.load(folder, session)
            for action, seed in training.actions[num_before:]:
                resumed.act(action, seed)
            assert len(resumed.seen) == len(whole.seen) - num_seen
            for one, another in zip(whole.seen[num_seen:], resumed.seen, strict=True):
                assert torch.equal(one, another)
            assert_same_tensors(expected, resumed.model.state_dict())
