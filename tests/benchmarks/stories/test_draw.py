"""Draws: the same on every machine, with the shares that are promised."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stories.draw import Draw, Ranked

NUM_DRAWS = 20_000


def test_a_seed_gives_these_numbers_in_every_python() -> None:
    # The first values of the Mersenne twister, as the standard library's documentation promises them for good.
    draw = Draw(42)
    assert [draw.uniform() for _ in range(3)] == [0.6394267984578837, 0.025010755222666936, 0.27502931836911926]
    assert [Draw(seed).between(1, 1000) for seed in range(5)] == [845, 135, 957, 238, 237]


def test_shares_fall_with_the_place() -> None:
    draw, choices = Draw(0), Ranked("abcd", flatness=1.0)
    weights = {letter: 1 / (place + 1.0) for place, letter in enumerate("abcd", start=1)}
    found = Counter(draw.ranked(choices) for _ in range(NUM_DRAWS))
    for letter, weight in weights.items():
        assert found[letter] / NUM_DRAWS == pytest.approx(weight / sum(weights.values()), abs=0.015)


def test_the_ends_of_a_draw_are_the_first_and_the_last_item() -> None:
    choices = Ranked("abcd", flatness=1.0)
    assert choices.at(0.0) == "a"
    assert choices.at(1.0 - 2**-53) == "d"


def test_equal_shares() -> None:
    draw = Draw(1)
    numbers = Counter(draw.between(3, 6) for _ in range(NUM_DRAWS))
    letters = Counter(draw.one_of("xyz") for _ in range(NUM_DRAWS))
    assert set(numbers) == {3, 4, 5, 6}
    assert set(letters) == set("xyz")
    assert max(numbers.values()) - min(numbers.values()) < 0.03 * NUM_DRAWS
    assert sum(draw.chance(0.2) for _ in range(NUM_DRAWS)) / NUM_DRAWS == pytest.approx(0.2, abs=0.01)


@given(seed=st.integers(0, 2**40), count=st.integers(0, 8))
def test_several_are_different_and_a_shuffle_loses_nothing(seed: int, count: int) -> None:
    draw = Draw(seed)
    found = draw.several(Ranked(range(8), flatness=2.0), count)
    assert len(found) == len(set(found)) == count
    assert sorted(draw.shuffled(range(count))) == list(range(count))


def test_a_shuffle_gives_every_order() -> None:
    draw = Draw(3)
    assert len({tuple(draw.shuffled("abc")) for _ in range(200)}) == 6
