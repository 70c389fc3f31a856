from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide.optim import reference
from lowtide.optim.eight_bit import decode_blocks, encode_blocks
from lowtide.optim.parameter_state import new_state
from lowtide.optim.update_types import BLOCK, Adam, Moments, Numerics, Piece, Rounding


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
