"""The device kernel: its table everywhere, and its numbers against the reference on a GPU."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from lowtide import compat
from lowtide.errors import BadPieceError
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.device.table import COLUMNS, NUM_FLOATS, TILE, floats_of, rows_of, variant_of
from lowtide.optim.reference import join
from lowtide.optim.rules import Adam, ElementwiseRule, Lion, Sgd, require_rule
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import Moments, Numerics, Piece, Rounding, update_key
from tests.optim.test_reference import OPTIMIZERS, SHAPE, gradients, piece_of

RULES: list[ElementwiseRule] = [
    Adam(lr=1e-2, weight_decay=0.1),
    Adam(lr=1e-2, weight_decay=0.1, is_decoupled=False, amsgrad=True, maximize=True),
    Adam(lr=1e-2, beta1=0.0),
    Sgd(lr=0.1, weight_decay=0.1),
    Sgd(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    Sgd(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    Lion(lr=0.01, weight_decay=0.1),
]
FORMATS = [
    (torch.float32, Rounding.NEAREST),
    *((torch.bfloat16, rounding) for rounding in Rounding),
    (torch.float16, Rounding.NEAREST),
    (torch.float16, Rounding.MASTER),
]
SIZES = (2 * TILE + 160, 0, 5, 128, 300)

Item = tuple[torch.Tensor, ParameterState]


def items(rule: ElementwiseRule, dtype: torch.dtype, numerics: Numerics, device: str) -> list[Item]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator).to(device, dtype) for size in SIZES]
    return [(weight, new_state(weight, rule, numerics)) for weight in weights]


def pieces(parts: list[Item], rule: ElementwiseRule, step: int, dtype: torch.dtype = torch.float32) -> list[Piece]:
    generator = torch.Generator().manual_seed(step)
    return [
        Piece(
            weight=weight,
            gradient=torch.randn(weight.numel(), generator=generator).to(weight.device, dtype),
            state=state.tensors,
            rule=rule,
            step=step,
            remainder=state.remainder,
            master=state.master,
            key=update_key(0, index, step),
            first_element=128 * index,
        )
        for index, (weight, state) in enumerate(parts)
    ]


def value_of(item: Item) -> torch.Tensor:
    weight, state = item
    if state.remainder is not None:
        return join(weight, state.remainder)
    return weight.float() if state.master is None else state.master


def test_tiles_are_counted_through_all_pieces() -> None:
    parts = items(RULES[0], torch.bfloat16, Numerics(), "cpu")
    made = pieces(parts, RULES[0], step=3)
    integers, num_tiles = rows_of(made)
    assert num_tiles == 6
    assert [dict(zip(COLUMNS, row, strict=True))["end_tile"] for row in integers] == [3, 3, 4, 5, 6]
    row = dict(zip(COLUMNS, integers[0], strict=True))
    assert row["weight"] == made[0].weight.data_ptr()
    assert row["kept"] == parts[0][1].remainder.data_ptr()  # type: ignore[union-attr]
    assert row["state_1"] == made[0].state["exp_avg_sq"].data_ptr()
    assert row["state_2"] == row["scale_0"] == 0
    numbers = floats_of(RULES[0], 3, 0.5)
    assert len(numbers) == NUM_FLOATS and numbers[0] == 0.5  # noqa: PT018


def test_rates_and_steps_are_no_part_of_a_kernel() -> None:
    parts = items(RULES[0], torch.bfloat16, Numerics(), "cpu")
    first = pieces(parts, RULES[0], step=1)[3]
    later = pieces(parts, Adam(lr=3.0, beta1=0.5, eps=1.0), step=50)[3]
    assert variant_of(first, Rounding.EXACT, Moments.FP32) == variant_of(later, Rounding.EXACT, Moments.FP32)
    assert floats_of(first.rule, first.step, 1.0) != floats_of(later.rule, later.step, 1.0)


def test_sizes_and_addresses_that_are_not_aligned_have_a_kernel_of_their_own() -> None:
    parts = items(RULES[3], torch.float32, Numerics(), "cpu")
    made = pieces(parts, RULES[3], step=1)
    assert [variant_of(p, Rounding.NEAREST, Moments.FP32).is_aligned for p in made] == [True, True, False, True, False]
    shifted = copy.copy(made[3])
    shifted.weight, shifted.gradient = made[4].weight[1:129], made[4].gradient[1:129]
    assert not variant_of(shifted, Rounding.NEAREST, Moments.FP32).is_aligned


def test_on_the_host_it_is_the_reference() -> None:
    numerics = Numerics(moments=Moments.INT8)
    ours, theirs = (items(RULES[0], torch.bfloat16, numerics, "cpu") for _ in range(2))
    device_kernel.update(pieces(ours, RULES[0], 1), rounding=Rounding.EXACT, moments=Moments.INT8)
    reference.update(pieces(theirs, RULES[0], 1), rounding=Rounding.EXACT, moments=Moments.INT8)
    assert all(torch.equal(value_of(a), value_of(b)) for a, b in zip(ours, theirs, strict=True))
    device_kernel.update([], rounding=Rounding.EXACT, moments=Moments.FP32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remainder": None}, "the remainder of piece 0 is missing; its format needs 128 elements"),
        ({"gradient": torch.zeros(127)}, r"the gradient of piece 0 is torch.float32 of shape \(127,\)"),
        ({"gradient": torch.zeros(256)[::2]}, "must be flat and dense"),
        ({"gradient": torch.zeros(128, dtype=torch.float64)}, "a gradient of torch.float64"),
        ({"state": {"exp_avg": torch.zeros(128)}}, "the exp_avg_sq of piece 0 is missing"),
        ({"first_element": 64}, "begins at element 64; cut at multiples of 128"),
        ({"step": 0}, "at step 0"),
        ({"gradient": torch.zeros(128, device="meta")}, "on meta, and the update on cpu"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    piece = pieces(items(RULES[0], torch.bfloat16, Numerics(), "cpu"), RULES[0], step=1)[3]
    piece.first_element = 0
    for name, value in change.items():
        setattr(piece, name, value)
    with pytest.raises(BadPieceError, match=message):
        device_kernel.update([piece], rounding=Rounding.EXACT, moments=Moments.FP32)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_steps_go_where_torch_goes(name: str, place: str) -> None:
    theirs = torch.nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(place))
    ours = theirs.detach().clone()
    optimizer = OPTIMIZERS[name]([theirs])
    group = optimizer.param_groups[0]
    if "foreach" in group:
        group["foreach"] = False
    state = new_state(ours, require_rule(optimizer, group), Numerics())
    for gradient in gradients(200):
        theirs.grad = gradient.to(place)
        optimizer.step()
        piece = piece_of(ours, theirs.grad.clone(), state, require_rule(optimizer, group))
        device_kernel.update([piece], rounding=Rounding.NEAREST, moments=Moments.FP32)
    is_far = (ours - theirs.detach()).abs() > 1e-5 * (1 + theirs.detach().abs())
    # Where Lion's momentum is zero but for rounding, its sign is either: that element has gone another way.
    assert int(is_far.sum()) <= (2 if name.startswith("lion") else 0)
    for key, value in state.tensors.items():
        torch.testing.assert_close(value.view(SHAPE), optimizer.state[theirs][key], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{RULES.index(rule)}")
def test_one_step_equals_the_reference(
    rule: ElementwiseRule, dtype: torch.dtype, rounding: Rounding, moments: Moments
) -> None:
    assert compat.has_triton()
    theirs = items(rule, dtype, Numerics(rounding=rounding, moments=moments), "cuda")
    is_low = dtype is not torch.float32 and rounding in (Rounding.NEAREST, Rounding.STOCHASTIC)
    for step, gradient_dtype in itertools.product((1, 2), (torch.float32, torch.bfloat16, torch.float16)):
        # From the same numbers each time: a code or a 16-bit weight that falls to the other side is no error.
        ours = copy.deepcopy(theirs)
        factor = 0.5 if step == 1 else torch.tensor([0.5], device="cuda")
        for update, parts in ((device_kernel.update, ours), (reference.update, theirs)):
            made = pieces(parts, rule, step, gradient_dtype)
            update(made, rounding=rounding, moments=moments, gradient_factor=factor)
        for (weight, state), (their_weight, their_state) in zip(ours, theirs, strict=True):
            tolerance = {"rtol": 2**-7 if is_low else 1e-6, "atol": 3e-7}
            torch.testing.assert_close(value_of((weight, state)), value_of((their_weight, their_state)), **tolerance)
            for name, tensor in state.tensors.items():
                expected = their_state.tensors[name]
                if tensor.dtype in (torch.int8, torch.uint8):
                    assert not ((tensor.int() - expected.int()).abs() > 1).any()
                    assert (tensor != expected).sum() <= 20
                elif tensor.dtype is torch.bfloat16:
                    torch.testing.assert_close(tensor, expected, rtol=2**-7, atol=1e-6)
                else:
                    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=3e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{RULES.index(rule)}")
def test_exact_weights_are_the_master_bit_for_bit(rule: ElementwiseRule, moments: Moments) -> None:
    ends = []
    for rounding in (Rounding.EXACT, Rounding.MASTER):
        parts = items(rule, torch.bfloat16, Numerics(rounding=rounding, moments=moments), "cuda")
        for step in range(1, 31):
            device_kernel.update(pieces(parts, rule, step, torch.bfloat16), rounding=rounding, moments=moments)
        ends.append([value_of(item) for item in parts])
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*ends, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_gradients_show_in_the_same_weights_as_in_the_reference(rounding: Rounding, bad: float) -> None:
    for rule, moments in itertools.product(RULES, Moments):
        ends = []
        for update in (device_kernel.update, reference.update):
            parts = items(rule, torch.bfloat16, Numerics(rounding=rounding, moments=moments), "cuda")
            for step in (1, 2):
                made = pieces(parts, rule, step)
                made[0].gradient[17] = bad
                update(made, rounding=rounding, moments=moments)
            ends.append([weight.isfinite() for weight, _ in parts])
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), (rule, moments)
