from __future__ import annotations

import math

import pytest

from lowtide.lab.report.spread import perplexity, spread_of


def test_several_values() -> None:
    spread = spread_of([2.0, 4.0, None, 9.0])
    assert spread is not None
    assert (spread.mean, spread.least, spread.largest, spread.count) == (5.0, 2.0, 9.0, 3)
    # Squares of -3, -1 and 4 sum to 26, over two.
    assert spread.deviation == pytest.approx(math.sqrt(13))


def test_one_value_has_no_deviation() -> None:
    spread = spread_of([3.0])
    assert spread is not None
    assert (spread.mean, spread.deviation) == (3.0, None)


def test_nothing() -> None:
    assert spread_of([]) is None
    assert spread_of([None]) is None


def test_a_value_that_is_not_finite() -> None:
    spread = spread_of([1.0, math.inf])
    assert spread is not None
    assert (spread.mean, spread.deviation) == (math.inf, None)


def test_perplexity() -> None:
    assert perplexity(math.log(152.0)) == pytest.approx(152.0)
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
