"""The exact format, stochastic rounding and moments of each width."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowtide.optim import reference
from lowtide.optim.reference import (
    decode_blocks,
    encode_blocks,
    join,
    random_bits_of,
    read_moment,
    round_stochastic,
    split,
    write_moment,
)
from lowtide.optim.rules import Adam
from lowtide.optim.state import new_state
from lowtide.optim.update_types import BLOCK, Moments, Numerics, Piece, Rounding, random_bits, update_key


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


def spread(num_elements: int, seed: int = 0) -> torch.Tensor:
    """Numbers over ten orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_elements, generator=generator) * torch.randn(num_elements, generator=generator).mul(3).exp()


def by_hand(values: torch.Tensor, *, is_unsigned: bool) -> tuple[list[int], list[float]]:
    """The Note, element by element in fp64."""
    codes, scales = [], []
    for block in values.split(BLOCK) if values.numel() else ():
        scale = float(block.abs().max())
        scales.append(scale)
        for value in block.tolist():
            share = abs(value) / scale if scale else 0.0
            if is_unsigned:
                codes.append(max(round(255 * share**0.25), int(value > 0)))
            else:
                codes.append(round(127 * share**0.5) * (-1 if value < 0 else 1))
    return codes, scales


@pytest.mark.parametrize("is_unsigned", [False, True])
@pytest.mark.parametrize("num_elements", [0, 1, 127, 128, 129, 1000])
def test_codes_are_those_of_the_note(num_elements: int, is_unsigned: bool) -> None:
    values = spread(num_elements).square() if is_unsigned else spread(num_elements)
    codes, scales = encode_blocks(values, is_unsigned=is_unsigned)
    expected_codes, expected_scales = by_hand(values, is_unsigned=is_unsigned)
    assert codes.dtype is (torch.uint8 if is_unsigned else torch.int8)
    assert codes.tolist() == expected_codes
    assert scales.tolist() == expected_scales


@given(seed=st.integers(0, 10_000), exponent=st.integers(-60, 60))
def test_errors_are_within_the_bounds(seed: int, exponent: int) -> None:
    values = spread(3 * BLOCK, seed) * 2.0**exponent
    for moment, is_unsigned in ((values, False), (values.abs(), True)):
        codes, scales = encode_blocks(moment, is_unsigned=is_unsigned)
        back = decode_blocks(codes, scales).double()
        scale = scales.double().repeat_interleave(BLOCK)
        power, bound = (0.25, torch.where(codes == 1, 1 / 255, 1 / 510)) if is_unsigned else (0.5, 1 / 254)
        error = (back.abs() / scale) ** power - (moment.double().abs() / scale) ** power
        assert (error.abs() <= bound + 1e-6).all()
        assert (back * moment >= 0).all()


@given(seed=st.integers(0, 10_000))
def test_what_was_stored_once_is_stored_again_bit_for_bit(seed: int) -> None:
    for moment, is_unsigned in ((spread(500, seed), False), (spread(500, seed).square(), True)):
        codes, scales = encode_blocks(moment, is_unsigned=is_unsigned)
        again = encode_blocks(decode_blocks(codes, scales), is_unsigned=is_unsigned)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)


def test_zeros() -> None:
    codes, scales = encode_blocks(torch.zeros(200), is_unsigned=False)
    assert not codes.any()
    assert scales.tolist() == [0.0, 0.0]
    assert not decode_blocks(codes, scales).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("is_unsigned", [False, True])
def test_a_block_that_is_not_finite_reads_as_nan(bad: float, is_unsigned: bool) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    codes, scales = encode_blocks(values, is_unsigned=is_unsigned)
    back = decode_blocks(codes, scales)
    assert back.isnan().view(3, BLOCK).all(1).tolist() == [False, True, False]
    assert not back.isnan()[:BLOCK].any()
    assert not codes[BLOCK : 2 * BLOCK].any()


def test_a_small_second_moment_beside_a_large_one_is_not_zero() -> None:
    values = torch.full((BLOCK,), 1e-12)
    values[0] = 1.0
    back = decode_blocks(*encode_blocks(values, is_unsigned=True))
    assert back.min() > 0


def test_one_large_gradient_does_not_make_its_neighbours_jump() -> None:
    """Where a second moment would read as zero, the step would be lr * m / eps: a hundred million times too large."""
    weight, rule = torch.zeros(BLOCK), Adam(lr=1e-3)
    state = new_state(weight, rule, Numerics(moments=Moments.INT8))
    for step in range(1, 200):
        gradient = torch.full((BLOCK,), 1e-3)
        gradient[0] = 1e6 if step == 1 else 0.0
        piece = Piece(weight=weight, gradient=gradient, state=state.tensors, rule=rule, step=step)
        reference.update([piece], rounding=Rounding.NEAREST, moments=Moments.INT8)
    assert weight.abs().max() < 0.5


def test_training_comes_as_far_as_with_fp32_moments() -> None:
    def final_loss(moments: Moments) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        teacher = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        rule = Adam(lr=3e-3)
        parameters = list(model.parameters())
        states = [new_state(parameter.detach(), rule, Numerics(moments=moments)) for parameter in parameters]
        losses = []
        for step in range(1, 401):
            x = torch.randn(64, 16)
            loss = nn.functional.mse_loss(model(x), teacher(x).detach())
            gradients = torch.autograd.grad(loss, parameters)
            pieces = [
                Piece(
                    weight=parameter.detach().view(-1),
                    gradient=gradient.contiguous().view(-1),
                    state=state.tensors,
                    rule=rule,
                    step=step,
                )
                for parameter, gradient, state in zip(parameters, gradients, states, strict=True)
            ]
            reference.update(pieces, rounding=Rounding.NEAREST, moments=moments)
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    exact = final_loss(Moments.FP32)
    assert exact < 0.02
    assert final_loss(Moments.INT8) < 1.5 * exact
    assert final_loss(Moments.BF16) < 1.5 * exact
