from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.report.axis import Axis, axis_over, tick_text


def test_the_range_asks_for_a_logarithm() -> None:
    assert axis_over([0.56, 21.2]).is_log
    assert not axis_over([3.4, 21.2]).is_log
    assert not axis_over([0.0, 21.2]).is_log
    assert not axis_over([5.0]).is_log


def test_places() -> None:
    linear = Axis(low=0.0, high=20.0, is_log=False)
    assert [linear.place(value) for value in (0.0, 5.0, 20.0)] == [0.0, 0.25, 1.0]
    log = Axis(low=1.0, high=100.0, is_log=True)
    assert [log.place(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 0.5, 1.0])


def test_ticks_are_round() -> None:
    assert Axis(low=0.0, high=23.7, is_log=False).ticks(6) == (0.0, 5.0, 10.0, 15.0, 20.0)
    assert Axis(low=0.41, high=28.0, is_log=True).ticks(8) == (0.5, 1, 2, 5, 10, 20)
    assert [tick_text(tick) for tick in Axis(low=0.0, high=0.6, is_log=False).ticks(6)] == [
        "0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6",
    ]  # fmt: skip


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8))
def test_all_values_are_within(values: list[float]) -> None:
    axis = axis_over(values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert all(axis.low - 1e-9 <= tick <= axis.high * (1 + 1e-9) for tick in axis.ticks())
    assert len(axis.ticks()) <= 10
