"""Optimizer state that visits: in one place at a time, whatever the order in which copies happen."""

from __future__ import annotations

import torch

from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.optim.rules import Adam
from lowtide.optim.state import ParameterState
from lowtide.optim.update_types import Moments, Numerics, Rounding
from lowtide.runtime.statistics.recording import Recorder
from lowtide.runtime.updates.paged_state import Pages

NUMERICS = Numerics(rounding=Rounding.EXACT, moments=Moments.INT8)


def pages_and_state(**mover: object) -> tuple[Pages, ParameterState]:
    emulated = EmulatedMover(**mover)  # type: ignore[arg-type]  # its own options
    pages = Pages(emulated, Recorder(emulated), lambda memory: None)
    weight = torch.ones(300, dtype=torch.bfloat16)
    return pages, pages.new(weight, Adam(lr=1e-3), NUMERICS)


def change(visitor: ParameterState, value: int) -> None:
    for tensor in visitor.all_tensors():
        tensor.fill_(value)


def values(state: ParameterState) -> set[float]:
    return {float(tensor.float().unique()) for tensor in state.all_tensors()}


def test_a_visit_and_the_next_one_before_it_is_home() -> None:
    pages, state = pages_and_state()
    for number in range(1, 5):
        visitor = pages.take(state)
        assert values(visitor) == {number - 1.0}, "the copy in must come after the one out"
        change(visitor, number)
        pages.give_back(state)
        if number % 2:
            pages.prefetch([state])
    pages.settle()
    assert values(state) == {4.0}
    pages.close()


def test_one_that_was_brought_for_nothing_leaves_unchanged() -> None:
    pages, state = pages_and_state()
    visitor = pages.take(state)
    change(visitor, 7)
    pages.give_back(state)
    pages.prefetch([state])
    pages.dismiss()
    assert values(pages.take(state)) == {7.0}
    pages.close()


def test_loaded_state_is_adopted() -> None:
    pages, state = pages_and_state()
    change(state, 3)
    before = [tensor.data_ptr() for tensor in state.all_tensors()]
    pages.adopt(state)
    assert values(state) == {3.0}
    assert before != [tensor.data_ptr() for tensor in state.all_tensors()]
    pages.close()
