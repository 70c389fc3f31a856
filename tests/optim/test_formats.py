from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.optim.formats import (
    join,
    random_bits_of,
    read_moment,
    round_stochastic,
    split,
    update_key,
    write_moment,
)
from lowtide.optim.update_types import Moments, random_bits


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def all_bf16() -> torch.Tensor:
    return torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=500)
def test_every_bit_pattern_comes_back(bits: int) -> None:
    master = from_bits(bits)
    weight, remainder = split(master)
    if master.isnan():
        assert weight.isnan().all()
        assert join(weight, remainder).isnan().all()
    else:
        assert torch.equal(join(weight, remainder).view(torch.int32), master.view(torch.int32))


def test_every_upper_half_with_the_lower_halves_that_matter() -> None:
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (upper + lower).to(torch.int32).view(torch.float32)
        weight, remainder = split(master)
        numbers = ~master.isnan()
        assert torch.equal(weight.isnan(), master.isnan())
        assert torch.equal(join(weight, remainder).view(torch.int32)[numbers], master.view(torch.int32)[numbers])
        if lower != 0x8000:
            nearest = master.bfloat16()
            assert torch.equal(weight[numbers].view(torch.int16), nearest[numbers].view(torch.int16))


def test_halves_go_up_so_that_the_remainder_fits() -> None:
    weight, remainder = split(from_bits(0x3F808000, 0xBF808000))
    assert weight.view(torch.int16).tolist() == [0x3F81, 0xBF81 - 0x10000]
    assert remainder.tolist() == [-0x8000, -0x8000]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_nan_has_one_form(bits: int) -> None:
    weight, remainder = split(from_bits(bits))
    assert weight.view(torch.int16).tolist() == [0x7FC0]
    assert remainder.tolist() == [0]
    assert round_stochastic(from_bits(bits).repeat(100), key=5).view(torch.int16).tolist() == [0x7FC0] * 100


def test_infinity_and_the_largest_number() -> None:
    weight, remainder = split(from_bits(0x7F800000, 0xFF800000, 0x7F7FFFFF))
    assert weight.tolist() == [torch.inf, -torch.inf, torch.inf]
    assert remainder.tolist() == [0, 0, -1]


def test_random_bits_are_those_of_the_definition() -> None:
    for key, first in ((0, 0), (1, 128), (0xFFFFFFFF, 2**32 - 3), (12345, 2**33)):
        expected = [random_bits(key, first + index) for index in range(300)]
        assert random_bits_of(key, first, 300).tolist() == expected


def test_random_bits_are_even_and_do_not_follow_each_other() -> None:
    drawn = torch.stack([random_bits_of(update_key(7, 3, step), 0, 1 << 14) for step in range(16)]).double()
    mean, deviation = 65535 / 2, 65536 / 12**0.5
    assert abs(drawn.mean() - mean) < 5 * deviation / drawn.numel() ** 0.5
    assert abs(drawn.std() - deviation) < 0.01 * deviation
    centred = (drawn - mean) / deviation
    bound = 5 / (1 << 14) ** 0.5
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < bound
    assert (centred[1:] * centred[:-1]).mean(dim=1).abs().max() < bound


def test_keys_differ() -> None:
    keys = {update_key(seed, index, step) for seed in range(3) for index in range(100) for step in range(100)}
    # 30,000 keys of 32 bits: a tenth of a collision is to be expected.
    assert len(keys) >= 30_000 - 3
    assert all(0 <= key < 2**32 for key in keys)


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.0 - 2**-8 * 1.7, 1e-40, 6.1e-5])
def test_stochastic_rounding_is_right_in_the_mean(value: float) -> None:
    num_draws = 1 << 18
    exact = torch.full((num_draws,), value)
    rounded = round_stochastic(exact, key=update_key(0, 1, 1)).double()
    low, high = rounded.min(), rounded.max()
    step = float(high - low)
    assert low <= exact[0].double() <= high
    assert rounded.unique().numel() == 2
    # Five standard deviations of the mean of draws that are one of two values.
    assert abs(float(rounded.mean()) - float(exact[0].double())) < 5 * 0.5 * step / num_draws**0.5


def test_stochastic_rounding_of_small_steps_goes_on_where_nearest_stands_still() -> None:
    weight = torch.ones(4096, dtype=torch.bfloat16)
    nearest = weight.clone()
    for step in range(200):
        weight = round_stochastic(weight.float() + 1e-4, key=update_key(0, 0, step))
        nearest = (nearest.float() + 1e-4).bfloat16()
    assert nearest.float().mean() == 1.0
    assert abs(weight.float().mean() - 1.02) < 1e-3


def test_stochastic_rounding_keeps_what_needs_none() -> None:
    values = all_bf16()
    rounded = round_stochastic(values.float(), key=99)
    numbers = ~values.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), values[numbers].view(torch.int16))
    assert rounded[~numbers].isnan().all()


@given(cut=st.integers(0, 8), key=st.integers(0, 2**32 - 1))
def test_stochastic_rounding_does_not_depend_on_slices(cut: int, key: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    at = min(cut * 128, 1000)
    whole = round_stochastic(values, key, 256)
    parts = [round_stochastic(values[:at], key, 256), round_stochastic(values[at:], key, 256 + at)]
    assert torch.equal(torch.cat(parts), whole)


def test_moments_in_bf16_are_the_nearest() -> None:
    state = {"exp_avg": torch.zeros(3, dtype=torch.bfloat16)}
    write_moment("exp_avg", torch.tensor([1.0, 1.0 + 2**-8, 3.3]), state, Moments.BF16)
    assert read_moment("exp_avg", state, Moments.BF16).tolist() == [1.0, 1.0, 3.296875]


def test_moments_in_fp32_are_themselves() -> None:
    state = {"exp_avg": torch.randn(3)}
    assert read_moment("exp_avg", state, Moments.FP32) is state["exp_avg"]
