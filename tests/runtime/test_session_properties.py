"""Random models, plans and loops: the same bits as plain torch, and never a byte over the budget."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings

from lowtide.errors import LowtideError, PlanError
from tests.runtime.random_training import Loop, Training, promptly, trainings
from tests.zoo import assert_same_tensors

pytestmark = pytest.mark.slow


def assert_same_loops(plain: Loop, managed: Loop) -> None:
    assert len(plain.seen) == len(managed.seen)
    for index, (one, other) in enumerate(zip(plain.seen, managed.seen, strict=True)):
        assert one.isfinite().all()
        assert torch.equal(one, other), f"thing {index} that the loop saw: {one} against {other}"
    assert_same_tensors(plain.model.state_dict(), managed.model.state_dict())
    for one, other in zip(plain.model.parameters(), managed.model.parameters(), strict=True):
        state, managed_state = plain.optimizer.state.get(one, {}), managed.optimizer.state.get(other, {})
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert_same_tensors(tensors, {key: managed_state[key] for key in tensors})


@settings(max_examples=50)
@given(training=trainings())
def test_the_same_bits_as_plain_torch(training: Training) -> None:
    assert_same_loops(training.plainly(), training.managed()[0])


# Half a step that a refused budget leaves behind is told of; the test is about bytes.
@pytest.mark.filterwarnings("ignore:.*these have taken the step:RuntimeWarning")
@settings(max_examples=12)
@given(training=trainings())
def test_never_over_the_budget(training: Training) -> None:
    with pytest.MonkeyPatch.context() as patch:
        promptly(patch)
        free, needed = training.managed()
        budget_bytes = needed
        try:
            tight, found = training.managed(needed)
        except PlanError as error:
            # The plan's windows alone want more than this loop took: parts of the model are never called.
            budget_bytes = error.needed_bytes or 0
            tight, found = training.managed(budget_bytes)
        assert found == needed <= budget_bytes
        assert_same_loops(free, tight)
        with pytest.raises(LowtideError, match="budget|out of memory"):
            training.managed(needed - 1)
    gc.collect()
