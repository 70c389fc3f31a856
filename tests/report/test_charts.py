from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.report.charts import StepCurve, axis_over, cut_name


def test_the_range_asks_for_a_logarithm() -> None:
    assert axis_over([0.56, 21.2]).is_log
    assert not axis_over([3.4, 21.2]).is_log
    assert not axis_over([0.0, 21.2]).is_log
    assert not axis_over([5.0]).is_log


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8))
def test_all_values_are_within(values: list[float]) -> None:
    axis = axis_over(values)
    assert all(axis.low <= value <= axis.high for value in values)
    assert axis.low > 0 or not axis.is_log


def test_long_names_lose_their_middle() -> None:
    assert cut_name("short") == "short"
    assert len(cut_name("x" * 100)) == 40
    assert cut_name("fused_memory_budget_05", limit=15) == "fused_m…dget_05"


def test_a_step_without_bytes_has_a_scale() -> None:
    assert StepCurve(name="a", words="", points=(0.0, 0.0), spans=(("x", 0.0, 1.0),), predicted=None).top == 1.0
