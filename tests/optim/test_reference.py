"""Every rule and option against torch.optim and `lowtide.optim.Adafactor` themselves, and what they add."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.optim import Adafactor as AdafactorOptimizer
from lowtide.optim import Lion, reference
from lowtide.optim.reference import BAND_ELEMENTS, join, round_stochastic
from lowtide.optim.rules import Adafactor, Adam, require_rule
from lowtide.optim.rules import Lion as LionRule
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import Moments, Numerics, Piece, Rounding, update_key
from tests.models.live_bytes import LiveBytes
from tests.optim.matrix_cases import RULE, Item, gradient_for, items, pieces, value_of
from tests.optim.matrix_cases import piece_of as matrix_piece_of

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adam-decoupled": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.01),
    "adam-betas": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.3, 0.95), eps=1e-4),
    "adam-no-momentum": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.0, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True, weight_decay=0.5),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "lion-maximize": lambda p: Lion(p, lr=1e-3, betas=(0.95, 0.98), maximize=True),
}
SHAPE = (37, 29)


def gradients(num_steps: int, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * (0.1 + step % 7) for step in range(num_steps)]


def piece_of(weight: Tensor, gradient: Tensor, state: ParameterState, rule: Any, **more: Any) -> Piece:
    state.step += 1
    return Piece(
        weight=weight.view(-1),
        gradient=gradient.view(-1),
        state=state.tensors,
        rule=rule,
        step=state.step,
        remainder=state.remainder,
        master=state.master,
        **more,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_equal_torch(name: str) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(SHAPE))
    ours = theirs.detach().clone()
    optimizer = OPTIMIZERS[name]([theirs])
    group = optimizer.param_groups[0]
    if "foreach" in group:
        group["foreach"] = False
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
    state = new_state(ours, require_rule(optimizer, group), Numerics())
    for gradient in gradients(200):
        theirs.grad = gradient.clone()
        piece = piece_of(ours, gradient, state, require_rule(optimizer, group))
        optimizer.step()
        reference.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)
        scheduler.step()
        assert torch.equal(piece.gradient, gradient.view(-1))
    if isinstance(group["lr"], Tensor):
        # torch computes with it in fp32, and with numbers in fp64.
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(ours, theirs.detach())
    for key in state.tensors:
        torch.testing.assert_close(state.tensors[key].view(SHAPE), optimizer.state[theirs][key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw-amsgrad", "sgd-nesterov", "lion"])
@pytest.mark.parametrize("moments", list(Moments))
def test_exact_weights_are_the_master_bit_for_bit(name: str, moments: Moments) -> None:
    masters = {}
    for rounding in (Rounding.EXACT, Rounding.MASTER):
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
        optimizer = OPTIMIZERS[name]([torch.nn.Parameter(weight)])
        rule = require_rule(optimizer, optimizer.param_groups[0])
        state = new_state(weight, rule, Numerics(rounding=rounding, moments=moments))
        for gradient in gradients(50):
            reference.update([piece_of(weight, gradient.bfloat16(), state, rule)], rounding=rounding, moments=moments)
        if rounding is Rounding.EXACT:
            assert state.remainder is not None
            masters[rounding] = join(weight.view(-1), state.remainder)
        else:
            assert state.master is not None
            masters[rounding] = state.master
            assert torch.equal(weight.view(-1), state.master.bfloat16())
    assert torch.equal(masters[Rounding.EXACT].view(torch.int32), masters[Rounding.MASTER].view(torch.int32))


def test_exact_updates_equal_fp32_ones_where_nearest_ones_stand_still() -> None:
    rule = Adam(lr=1e-5)
    ends = {}
    for rounding, dtype in (
        (Rounding.NEAREST, torch.float32),
        (Rounding.EXACT, torch.bfloat16),
        (Rounding.NEAREST, torch.bfloat16),
    ):
        weight = torch.ones(256, dtype=dtype)
        state = new_state(weight, rule, Numerics(rounding=rounding))
        for _ in range(100):
            piece = piece_of(weight, torch.ones(256), state, rule)
            reference.update([piece], rounding=rounding, moments=Moments.FP32)
        ends[rounding, dtype] = weight if state.remainder is None else join(weight, state.remainder)
    assert torch.equal(ends[Rounding.EXACT, torch.bfloat16], ends[Rounding.NEAREST, torch.float32])
    assert torch.equal(ends[Rounding.NEAREST, torch.bfloat16], torch.ones(256, dtype=torch.bfloat16))


def test_stochastic_weights_are_the_rounding_of_the_fp32_result() -> None:
    rule = Adam(lr=1e-2)
    weight = torch.randn(300).bfloat16()
    in_fp32 = weight.float()
    gradient = torch.randn(300)
    key = update_key(3, 1, 1)
    numerics = Numerics(rounding=Rounding.STOCHASTIC)
    for target in (in_fp32, weight):
        piece = piece_of(target, gradient, new_state(target, rule, numerics), rule, key=key, first_element=128)
        reference.update([piece], rounding=Rounding.STOCHASTIC, moments=Moments.FP32)
    assert torch.equal(weight, round_stochastic(in_fp32, key, 128))


@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize("rounding", list(Rounding))
def test_slices_give_what_the_whole_gives(rounding: Rounding, moments: Moments) -> None:
    rule, numerics = Adam(lr=1e-2), Numerics(rounding=rounding, moments=moments)
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, parts = start.clone(), start.clone()
    whole_state, parts_state = new_state(whole, rule, numerics), new_state(parts, rule, numerics)
    for step, gradient in enumerate(gradients(5, (1000,)), start=1):
        key = update_key(0, 0, step)
        piece = piece_of(whole, gradient, whole_state, rule, key=key)
        reference.update([piece], rounding=rounding, moments=moments)
        full = piece_of(parts, gradient, parts_state, rule)
        slices = []
        for first, last in ((0, 384), (384, 1000)):
            blocks = slice(first // 128, -(-last // 128))
            slices.append(
                Piece(
                    weight=full.weight[first:last],
                    gradient=full.gradient[first:last],
                    state={k: v[blocks if k.endswith("scale") else slice(first, last)] for k, v in full.state.items()},
                    rule=rule,
                    step=step,
                    remainder=None if full.remainder is None else full.remainder[first:last],
                    master=None if full.master is None else full.master[first:last],
                    key=key,
                    first_element=first,
                )
            )
        reference.update(slices, rounding=rounding, moments=moments)
    assert torch.equal(whole, parts)
    for name, tensor in whole_state.tensors.items():
        assert torch.equal(tensor, parts_state.tensors[name])


@pytest.mark.parametrize("factor", [0.125, torch.tensor([0.125])])
def test_gradients_are_multiplied_in_fp32(factor: float | Tensor) -> None:
    rule = Adam(lr=1e-2)
    ends = []
    for gradient, by in ((torch.full((64,), 60000.0).half(), factor), (torch.full((64,), 7500.0), 1.0)):
        weight = torch.ones(64)
        piece = piece_of(weight, gradient, new_state(weight, rule, Numerics()), rule)
        reference.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32, gradient_factor=by)
        ends.append((weight, piece.state["exp_avg_sq"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "lion"])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_nan_gradient_is_seen_in_the_weight(name: str, rounding: Rounding) -> None:
    weight = torch.ones(256).bfloat16()
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(weight)])
    rule = require_rule(optimizer, optimizer.param_groups[0])
    gradient = torch.ones(256)
    gradient[7] = torch.nan
    state = new_state(weight, rule, Numerics(rounding=rounding))
    reference.update([piece_of(weight, gradient, state, rule)], rounding=rounding, moments=Moments.FP32)
    assert weight.isnan().nonzero().view(-1).tolist() == [7]


def test_lion_takes_no_step_at_zero() -> None:
    weight = torch.ones(4)
    rule = LionRule(lr=0.1)
    piece = piece_of(weight, torch.tensor([0.0, 1.0, -1.0, 0.0]), new_state(weight, rule, Numerics()), rule)
    reference.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)
    torch.testing.assert_close(weight, torch.tensor([1.0, 0.9, 1.1, 1.0]))


MANY_BANDS = (700, 900)


def follow(rule: Callable[[], Adafactor], item: Item, num_steps: int, after: Callable[[], None] = lambda: None) -> None:
    for step in range(1, num_steps + 1):
        piece = matrix_piece_of(item, gradient_for(item[0], step), step, rule())
        before = piece.gradient.clone()
        reference.update_matrices([piece], rounding=Rounding.NEAREST)
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
def test_exact_matrices_are_the_master_bit_for_bit(shape: tuple[int, ...]) -> None:
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
            reference.update_matrices([matrix_piece_of(item, gradient, step)], rounding=rounding)
        ends.append(value_of(item).view(torch.int32))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_exact_adafactor_equals_fp32_where_nearest_stands_still() -> None:
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
            reference.update_matrices([matrix_piece_of(item, torch.ones(16, 16), step, rule)], rounding=rounding)
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
        piece = matrix_piece_of(item, gradient_for(weight, 1), 1, key=key)
        reference.update_matrices([piece], rounding=Rounding.STOCHASTIC)
    assert torch.equal(low[0].view(-1), round_stochastic(weight.view(-1), key))


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """200 runs of 10 steps, each too small for a bf16 weight to notice: their mean goes where fp32 goes."""
    rule = Adafactor(lr=1e-4)
    gradients = [gradient_for(torch.empty(16, 16), step) for step in range(1, 11)]

    def run(dtype: torch.dtype, seed: int) -> Tensor:
        weight = torch.full((16, 16), 0.75, dtype=dtype)
        item = (weight, new_state(weight, rule, Numerics(rounding=Rounding.STOCHASTIC)))
        for step, gradient in enumerate(gradients, start=1):
            piece = matrix_piece_of(item, gradient, step, rule, key=update_key(seed, 0, step))
            reference.update_matrices([piece], rounding=Rounding.STOCHASTIC)
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
def test_gradients_of_matrices_are_multiplied_in_fp32(factor: float | Tensor, shape: tuple[int, ...]) -> None:
    ends = []
    for gradient, by in ((torch.full(shape, 60000.0).half(), factor), (torch.full(shape, 7500.0), 1.0)):
        (item,) = items(torch.float32, Rounding.NEAREST, shapes=[shape])
        reference.update_matrices([matrix_piece_of(item, gradient, 1)], rounding=Rounding.NEAREST, gradient_factor=by)
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
    reference.update_matrices(made, rounding=rounding)
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
                reference.update_matrices(
                    [matrix_piece_of(item, gradient_for(item[0], step), step)], rounding=Rounding.NEAREST
                )
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
    piece = matrix_piece_of(item, gradient_for(item[0], 1).to(dtype), 1)
    with LiveBytes(ignore_bytes=4 * (num_rows + 1024)) as live:
        reference.update_matrices([piece], rounding=rounding)
    assert 4 * BAND_ELEMENTS < live.peak_bytes <= bands * 4 * BAND_ELEMENTS
