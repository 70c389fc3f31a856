"""Adafactor's reference against `lowtide.optim.Adafactor` itself, and what it adds: rounding, and small temporaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.optim import Adafactor as AdafactorOptimizer
from lowtide.optim import matrix_reference
from lowtide.optim.formats import round_stochastic, update_key
from lowtide.optim.matrix_reference import BAND_ELEMENTS
from lowtide.optim.matrix_rules import Adafactor
from lowtide.optim.parameter_state import new_state
from lowtide.optim.rules import require_rule
from lowtide.optim.update_types import Numerics, Rounding
from tests.models.live_bytes import LiveBytes
from tests.optim.matrix_cases import RULE, Item, gradient_for, items, piece_of, pieces, value_of

MANY_BANDS = (700, 900)


def follow(rule: Callable[[], Adafactor], item: Item, num_steps: int, after: Callable[[], None] = lambda: None) -> None:
    for step in range(1, num_steps + 1):
        piece = piece_of(item, gradient_for(item[0], step), step, rule())
        before = piece.gradient.clone()
        matrix_reference.update([piece], rounding=Rounding.NEAREST)
        assert torch.equal(piece.gradient, before)
        after()


@pytest.mark.parametrize("shape", [(37, 29), (1, 40), (), (53,), (4, 3, 2, 5), MANY_BANDS], ids=str)
@pytest.mark.parametrize("settings", [{}, {"eps": 1e-3, "decay_rate": -0.5, "max_beta2": 0.9, "clip_threshold": 0.5}])
def test_200_steps_equal_the_optimizer(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = nn.Parameter(torch.randn(shape))
    ours = theirs.detach().clone()
    unclipped = ours.clone()
    optimizer = AdafactorOptimizer([theirs], lr=1e-2, weight_decay=0.1, **settings)
    group = optimizer.param_groups[0]
    # From zero: the first step moves the moment, and nothing else.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 50, 1.0))

    def rule() -> Adafactor:
        found = require_rule(optimizer, group)
        assert isinstance(found, Adafactor)
        return found

    rules: list[Adafactor] = []
    for step in range(1, 201):
        rules.append(rule())
        theirs.grad = gradient_for(theirs, step)
        optimizer.step()
        scheduler.step()
    assert rules[0].lr == 0.0
    item, other = ((weight, new_state(weight, rules[0], Numerics())) for weight in (ours, unclipped))
    left = iter(rules)
    follow(lambda: next(left), item, 200)
    torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6, atol=2e-6)
    for name, tensor in item[1].tensors.items():
        torch.testing.assert_close(tensor.view_as(optimizer.state[theirs][name]), optimizer.state[theirs][name])
    # Clipping was at work, and its absence would have been seen.
    left = iter(rules)
    follow(lambda: replace(next(left), clip_threshold=1e9), other, 200)
    assert not torch.allclose(unclipped, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(37, 29), (53,), MANY_BANDS], ids=str)
def test_exact_weights_are_the_master_bit_for_bit(shape: tuple[int, ...]) -> None:
    ends: list[Tensor] = []
    for dtype, rounding in (
        (torch.bfloat16, Rounding.EXACT),
        (torch.bfloat16, Rounding.MASTER),
        (torch.float32, Rounding.NEAREST),
    ):
        (item,) = items(torch.bfloat16, rounding, shapes=[shape])
        item = (item[0].to(dtype), item[1])
        for step in range(1, 31):
            gradient = gradient_for(item[0], step).bfloat16()
            matrix_reference.update([piece_of(item, gradient, step)], rounding=rounding)
        ends.append(value_of(item).view(torch.int32))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_exact_updates_equal_fp32_ones_where_nearest_ones_stand_still() -> None:
    rule = Adafactor(lr=1e-5)
    ends: dict[tuple[Rounding, torch.dtype], Tensor] = {}
    for rounding, dtype in (
        (Rounding.NEAREST, torch.float32),
        (Rounding.EXACT, torch.bfloat16),
        (Rounding.NEAREST, torch.bfloat16),
    ):
        weight = torch.ones(16, 16, dtype=dtype)
        item = (weight, new_state(weight, rule, Numerics(rounding=rounding)))
        for step in range(1, 101):
            matrix_reference.update([piece_of(item, torch.ones(16, 16), step, rule)], rounding=rounding)
        ends[rounding, dtype] = value_of(item)
    assert torch.equal(ends[Rounding.EXACT, torch.bfloat16], ends[Rounding.NEAREST, torch.float32])
    torch.testing.assert_close(ends[Rounding.EXACT, torch.bfloat16], torch.full((256,), 1 - 100 * 1e-5))
    assert torch.equal(ends[Rounding.NEAREST, torch.bfloat16], torch.ones(256))


@pytest.mark.parametrize("shape", [(37, 29), (53,), MANY_BANDS], ids=str)
def test_stochastic_rounding_is_that_of_the_fp32_result(shape: tuple[int, ...]) -> None:
    (low,) = items(torch.bfloat16, Rounding.STOCHASTIC, shapes=[shape])
    weight = low[0].float()
    full = (weight, new_state(weight, RULE, Numerics()))
    key = update_key(3, 1, 1)
    for item in (low, full):
        piece = piece_of(item, gradient_for(weight, 1), 1, key=key)
        matrix_reference.update([piece], rounding=Rounding.STOCHASTIC)
    assert torch.equal(low[0].view(-1), round_stochastic(weight.view(-1), key))


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """200 runs of 10 steps, each too small for a bf16 weight to notice: their mean goes where fp32 goes."""
    rule = Adafactor(lr=1e-4)
    gradients = [gradient_for(torch.empty(16, 16), step) for step in range(1, 11)]

    def run(dtype: torch.dtype, seed: int) -> Tensor:
        weight = torch.full((16, 16), 0.75, dtype=dtype)
        item = (weight, new_state(weight, rule, Numerics(rounding=Rounding.STOCHASTIC)))
        for step, gradient in enumerate(gradients, start=1):
            piece = piece_of(item, gradient, step, rule, key=update_key(seed, 0, step))
            matrix_reference.update([piece], rounding=Rounding.STOCHASTIC)
        return weight.float()

    exact = run(torch.float32, 0)
    runs = torch.stack([run(torch.bfloat16, seed) for seed in range(200)])
    # A rounding is off by less than 2**-8 between 0.5 and 1; over 256 elements the means of 200 runs vary by far less.
    error = runs.mean(dim=0) - exact
    spread = runs.std(dim=0).clamp(min=1e-6) / 200**0.5
    assert (error / spread).abs().mean() < 1.2
    assert abs(float(error.mean())) < 4 * float(spread.mean()) / 16
    assert float((exact - 0.75).abs().mean()) > 10 * float(error.mean().abs())


@pytest.mark.parametrize("factor", [0.125, torch.tensor([0.125])])
@pytest.mark.parametrize("shape", [(8, 8), (64,)], ids=str)
def test_gradients_are_multiplied_in_fp32(factor: float | Tensor, shape: tuple[int, ...]) -> None:
    ends = []
    for gradient, by in ((torch.full(shape, 60000.0).half(), factor), (torch.full(shape, 7500.0), 1.0)):
        (item,) = items(torch.float32, Rounding.NEAREST, shapes=[shape])
        matrix_reference.update([piece_of(item, gradient, 1)], rounding=Rounding.NEAREST, gradient_factor=by)
        ends.append((item[0], item[1].tensors["row"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert float(ends[0][1].view(-1)[0]) == pytest.approx(7500.0**2 * (8 if len(shape) == 2 else 1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_bad_gradient_is_seen_in_all_of_its_weight_and_in_no_other(rounding: Rounding, bad: float) -> None:
    parts = items(torch.bfloat16, rounding, shapes=[(9, 9), (9, 9), (9,)])
    made = pieces(parts, 1)
    made[0].gradient[7] = bad
    matrix_reference.update(made, rounding=rounding)
    assert parts[0][0].isnan().all()
    assert all(weight.isfinite().all() for weight, _ in parts[1:])


@pytest.mark.parametrize("shape", [(700, 1900), (300000,), (3, 400001), (40000, 7)], ids=str)
def test_the_number_of_threads_changes_no_bit(shape: tuple[int, ...]) -> None:
    before = torch.get_num_threads()
    ends = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            (item,) = items(torch.float32, Rounding.NEAREST, shapes=[shape])
            for step in (1, 2):
                matrix_reference.update([piece_of(item, gradient_for(item[0], step), step)], rounding=Rounding.NEAREST)
            ends.append([item[0], *item[1].tensors.values()])
    finally:
        torch.set_num_threads(before)
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


@pytest.mark.parametrize(
    ("dtype", "rounding", "bands"),
    [
        (torch.float32, Rounding.NEAREST, 2),  # direction, and the outer product in it
        (torch.bfloat16, Rounding.NEAREST, 2),  # then direction and master
        (torch.bfloat16, Rounding.EXACT, 5.5),
        (torch.bfloat16, Rounding.STOCHASTIC, 8),  # two of int64 for the random bits
    ],
)
@pytest.mark.parametrize("num_rows", [1024, 4096])
def test_temporaries_are_bands_however_large_the_matrix(
    num_rows: int, dtype: torch.dtype, rounding: Rounding, bands: float
) -> None:
    (item,) = items(dtype, rounding, shapes=[(num_rows, 1024)])
    piece = piece_of(item, gradient_for(item[0], 1).to(dtype), 1)
    with LiveBytes(ignore_bytes=4 * (num_rows + 1024)) as live:
        matrix_reference.update([piece], rounding=rounding)
    assert 4 * BAND_ELEMENTS < live.peak_bytes <= bands * 4 * BAND_ELEMENTS
