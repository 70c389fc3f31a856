"""Numbers in words, and sums that are right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stories.draw import Draw
from benchmarks.stories.numbers import draw_sums, in_words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (19, "nineteen"),
        (20, "twenty"),
        (21, "twenty-one"),
        (90, "ninety"),
        (99, "ninety-nine"),
    ],
)
def test_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_all_words_differ() -> None:
    assert len({in_words(number) for number in range(100)}) == 100


@given(seed=st.integers(0, 2**32), age=st.integers(4, 12))
def test_sums_are_right(seed: int, age: int) -> None:
    sums = {key: int(value) for key, value in draw_sums(Draw(seed), age=age, digits=True).items()}
    assert sums["have"] - sums["first"] == sums["mid"]
    assert sums["mid"] - sums["second"] == sums["left"]
    assert sums["left"] - sums["given"] == sums["after"]
    assert sums["first"] + sums["second"] == sums["spent"]
    assert sums["rows"] * sums["each"] == sums["total"] == sums["people"] * sums["portion"]
    assert sums["less"] < sums["price"]
    assert sums["older"] == age + 1
    assert min(sums.values()) >= 2


@given(seed=st.integers(0, 2**32))
def test_words_and_digits_are_the_same_numbers(seed: int) -> None:
    words, digits = (draw_sums(Draw(seed), age=9, digits=digits) for digits in (False, True))
    assert words == {key: in_words(int(value)) for key, value in digits.items()}
