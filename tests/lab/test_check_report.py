"""The report of a check: what counts as the same, what as within the tolerance, and what it says in JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.lab.check_report import CheckReport, TensorDifference, compare_tensors
from lowtide.lab.recipe import Recipe
from lowtide.runtime.session_stats import CacheRow, PhaseSeconds, SessionStats

STATS = SessionStats(
    num_steps=2, moved=(), exposed_copy_s=0.0, seconds=PhaseSeconds(), chunks=(), cache=CacheRow(), tiers=()
)


def report(
    plain: tuple[float, ...] = (2.0, 1.0),
    managed: tuple[float, ...] = (2.0, 1.0),
    *,
    weights: tuple[TensorDifference, ...] = (),
    tolerance: float = 0.0,
) -> CheckReport:
    return CheckReport(
        recipe=Recipe(model="gpt-tiny", tolerance=tolerance),
        device="cpu",
        plain_losses=plain,
        managed_losses=managed,
        differing_weights=weights,
        stats=STATS,
    )


def test_identical_runs_pass() -> None:
    found = report()
    assert found.is_identical
    assert found.passed
    assert found.first_difference is None
    assert (found.max_loss_difference, found.max_weight_difference) == (0.0, 0.0)


def test_a_difference_in_a_loss() -> None:
    found = report(managed=(2.0, 1.25))
    assert not found.passed
    assert found.first_differing_step == 1
    assert found.first_difference == "the loss of step 2: 1.0 against 1.25"
    assert found.max_loss_difference == 0.25
    assert report(managed=(2.0, 1.25), tolerance=0.25).passed
    assert not report(managed=(2.0, 1.25), tolerance=0.2).passed


def test_a_difference_in_a_weight() -> None:
    weights = (TensorDifference(name="a", max_difference=1e-3), TensorDifference(name="b", max_difference=1e-2))
    found = report(weights=weights)
    assert not found.passed
    assert found.first_difference == "'a' after the last step, by 0.001"
    assert found.max_weight_difference == 1e-2
    assert report(weights=weights, tolerance=1e-2).passed
    assert not report(weights=weights, tolerance=5e-3).passed


def test_other_bits_of_the_same_value_fail_a_check_for_identity() -> None:
    zeros = (TensorDifference(name="a", max_difference=0.0),)
    assert not report(weights=zeros).passed
    assert report(weights=zeros, tolerance=1e-30).passed


def test_a_loss_that_is_not_a_number_never_passes() -> None:
    found = report(managed=(2.0, math.nan), tolerance=1e9)
    assert not found.passed
    assert found.max_loss_difference == math.inf
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["managed_losses"] == [2.0, "nan"]
    assert record["max_loss_difference"] == "inf"


def test_the_record_is_whole() -> None:
    weights = (TensorDifference(name="a", max_difference=0.5),)
    record = json.loads(json.dumps(report(weights=weights, tolerance=0.5).to_dict(), allow_nan=False))
    assert record["schema"] == "lowtide.check/1"
    assert (record["passed"], record["identical"], record["tolerance"]) == (True, False, 0.5)
    assert record["differing_weights"] == [{"name": "a", "max_difference": 0.5}]
    assert record["plain_losses"] == record["managed_losses"] == [2.0, 1.0]
    assert record["recipe"]["model"] == "gpt-tiny"
    assert SessionStats.from_dict(record["stats"]) == STATS


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.zeros(2), torch.tensor([math.nan, 1.0])
    assert compare_tensors({"a": nan, "n": torch.tensor(3)}, {"a": nan.clone(), "n": torch.tensor(3)}) == ()
    assert compare_tensors({"a": zero}, {"a": -zero}) == (TensorDifference(name="a", max_difference=0.0),)
    assert compare_tensors({"a": nan}, {"a": torch.tensor([math.nan, 3.0])})[0].max_difference == 2.0
    assert compare_tensors({"a": nan}, {"a": torch.tensor([0.0, 1.0])})[0].max_difference == math.inf
    infinite = torch.tensor([math.inf])
    assert compare_tensors({"a": infinite}, {"a": torch.tensor([1.0])})[0].max_difference == math.inf


@pytest.mark.parametrize("other", [{"b": torch.zeros(2)}, {"a": torch.zeros(3)}, {"a": torch.zeros(2).double()}, {}])
def test_other_names_shapes_and_dtypes_differ_without_bound(other: dict[str, torch.Tensor]) -> None:
    found = compare_tensors({"a": torch.zeros(2)}, other)
    assert found[0] == TensorDifference(name="a", max_difference=math.inf)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.integers(0, 7), st.floats(-1, 1, width=32))
def test_the_largest_difference_is_found(values: list[float], index: int, change: float) -> None:
    first = torch.tensor(values)
    second = first.clone()
    second[index % len(values)] += change
    expected = (first.double() - second.double()).abs().max().item()
    found = compare_tensors({"a": first}, {"a": second})
    assert [tensor.max_difference for tensor in found] == ([expected] if expected or found else [])
    assert bool(found) or torch.equal(first, second)
