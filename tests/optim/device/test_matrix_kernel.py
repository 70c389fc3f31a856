"""The kernels for whole parameters: their tables everywhere, and their numbers on a GPU or in Triton's interpreter.

Without a GPU, but with Triton: TRITON_INTERPRET=1 python -m pytest tests/optim/device/test_matrix_kernel.py
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide import compat
from lowtide.errors import BadPieceError
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.device.table import (
    COLUMNS,
    MATRIX_COLUMNS,
    MATRIX_FLOATS,
    WORKSPACE_BYTES,
    batches_of,
    matrix_variant_of,
)
from lowtide.optim.rules import Adafactor
from lowtide.optim.update_types import MatrixPiece, Rounding
from tests.optim.matrix_cases import FORMATS, RULE, SHAPES, gradient_for, items, piece_of, pieces, value_of
from tests.waiting import no_waiting

has_interpreter = compat.has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
on_each_place = pytest.mark.parametrize(
    "place",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param(
            "cpu", marks=pytest.mark.skipif(not has_interpreter, reason="needs Triton and TRITON_INTERPRET=1")
        ),
    ],
)

# On the host


def test_a_row_begins_as_that_of_an_elementwise_kernel() -> None:
    assert MATRIX_COLUMNS[: len(COLUMNS)] == COLUMNS


def test_tiles_sums_and_statistics_are_counted_through_a_batch() -> None:
    parts = items(torch.bfloat16, Rounding.EXACT, shapes=[(70, 264), (0, 8), (3, 8)])
    (batch,) = batches_of(pieces(parts, 3), Rounding.EXACT, 0.5)
    first, second = (dict(zip(MATRIX_COLUMNS, row, strict=True)) for row in batch.integers)
    made = pieces(parts, 3)
    assert first["weight"] == parts[0][0].data_ptr()
    assert first["kept"] == parts[0][1].remainder.data_ptr()  # type: ignore[union-attr]
    assert (first["state_0"], first["state_1"]) == tuple(tensor.data_ptr() for tensor in made[0].state.values())
    assert (first["rows"], first["columns"], first["size"]) == (70, 264, 70 * 264)
    # Two tiles down and two across: sums of rows in each tile across, of columns in each tile down.
    assert (first["end_tile"], second["end_tile"], batch.num_tiles) == (4, 5, 5)
    assert first["column_sums"] - first["row_sums"] == 2 * 70
    assert first["totals"] - first["column_sums"] == 2 * 264
    assert (first["norms"] - first["totals"], second["row_sums"] - first["norms"]) == (2, 4)
    assert first["row_sums"] == 2  # after a step size for each piece
    assert batch.num_partials == second["norms"] + 1
    assert (first["end_statistic"], second["end_statistic"], batch.num_statistics) == (2 + 5, 7 + 2, 9)
    numbers = dict(zip(MATRIX_FLOATS, batch.floats[0], strict=True))
    assert numbers == {
        "factor": 0.5,
        "lr": RULE.lr,
        "decay": pytest.approx(0.999),
        "amount": pytest.approx(3**-0.8),
        "eps": 1e-30,
        "clip_threshold": 1.0,
        "num_elements": 70 * 264,
    }


def test_vectors_lie_in_rows_and_have_launches_of_their_own() -> None:
    parts = items(torch.float32, Rounding.NEAREST, shapes=[(64, 64), (300,), ()])
    batches = list(batches_of(pieces(parts, 1), Rounding.NEAREST, 1.0))
    assert [(batch.variant.is_vector, len(batch.integers)) for batch in batches] == [(False, 1), (True, 2)]
    row = dict(zip(MATRIX_COLUMNS, batches[1].integers[0], strict=True))
    assert (row["rows"], row["columns"], row["size"], row["end_tile"], row["state_1"]) == (2, 256, 300, 1, 0)
    assert batches[1].num_statistics == 0
    assert batches[1].num_partials == 2 * 2


def test_rates_and_steps_are_no_part_of_a_kernel() -> None:
    (item,) = items(torch.bfloat16, Rounding.EXACT, shapes=[(8, 8)])
    first, later = (piece_of(item, gradient_for(item[0], 1), step, rule) for step, rule in ((1, RULE), (50, FAST)))
    assert matrix_variant_of(first, Rounding.EXACT) == matrix_variant_of(later, Rounding.EXACT)


FAST = Adafactor(lr=3.0, eps=1.0, clip_threshold=0.25, decay_rate=-0.5)


def test_rows_and_addresses_that_are_not_aligned_have_kernels_of_their_own() -> None:
    parts = items(torch.bfloat16, Rounding.NEAREST, shapes=[(5, 8), (8, 5), (16,), (15,)])
    made = pieces(parts, 1, torch.bfloat16)
    assert [matrix_variant_of(piece, Rounding.NEAREST).is_aligned for piece in made] == [True, False, True, False]
    shifted = replace(made[0], weight=torch.zeros(41, dtype=torch.bfloat16)[1:])
    assert not matrix_variant_of(shifted, Rounding.NEAREST).is_aligned


def test_the_workspace_of_a_batch_is_bounded() -> None:
    # With a fiftieth of its 42 MiB in fp32 each: nine fit.
    shape = (2048, 5400)
    weight = torch.empty(1, dtype=torch.bfloat16).expand(shape)
    state = {"row": torch.empty(2048), "col": torch.empty(5400)}
    flat = weight.as_strided((2048 * 5400,), (0,))
    piece = MatrixPiece(
        weight=flat, gradient=flat, state=state, rule=RULE, step=1, shape=shape, stride=(5400, 1), key=0
    )
    batches = list(batches_of([piece] * 20, Rounding.NEAREST, 1.0))
    assert [len(batch.integers) for batch in batches] == [9, 9, 2]
    assert all(4 * batch.num_partials <= WORKSPACE_BYTES for batch in batches)
    assert 4 * batches[0].num_partials / 9 < 4 * 2048 * 5400 / 45
    # One that needs more by itself is alone: a sum for each row.
    huge = replace(
        piece, weight=torch.empty(8, dtype=torch.bfloat16).expand(1 << 22, 8).reshape(-1), shape=(1 << 22, 8)
    )
    assert [len(batch.integers) for batch in batches_of([piece, huge, piece], Rounding.NEAREST, 1.0)] == [1, 1, 1]


def test_on_the_host_it_is_the_reference() -> None:
    ours, theirs = (items(torch.bfloat16, Rounding.EXACT) for _ in range(2))
    device_kernel.update_matrices(pieces(ours, 1), rounding=Rounding.EXACT, gradient_factor=0.5)
    reference.update_matrices(pieces(theirs, 1), rounding=Rounding.EXACT, gradient_factor=0.5)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(value_of(one), value_of(other))
    device_kernel.update_matrices([], rounding=Rounding.EXACT)


@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (9, 12)], ids=str)
def test_memory_in_another_order_changes_nothing(
    shape: tuple[int, ...], dtype: torch.dtype, rounding: Rounding
) -> None:
    (plain,), (other,) = (items(dtype, rounding, shapes=[shape]) for _ in range(2))
    swapped = torch.empty_strided(shape, torch.empty(shape).transpose(1, -1).contiguous().transpose(1, -1).stride())
    if len(shape) == 2:
        swapped = swapped.new_empty_strided(shape, (1, shape[0]))
    weight = swapped.to(dtype).copy_(other[0])
    assert not weight.is_contiguous()
    other = (weight, other[1])
    if other[1].master is not None:
        other[1].master.copy_(weight.as_strided((weight.numel(),), (1,)))
    for step in (1, 2):
        for item in (plain, other):
            device_kernel.update_matrices([piece_of(item, gradient_for(item[0], step), step, key=7)], rounding=rounding)
    assert torch.equal(plain[0], weight)
    for name, tensor in plain[1].tensors.items():
        assert torch.equal(tensor, other[1].tensors[name])
    values = value_of(other).as_strided(shape, weight.stride())
    assert torch.equal(values, value_of(plain).view(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remainder": None}, "the remainder of piece 0 is missing; its format needs 40 elements"),
        ({"gradient": torch.zeros(39)}, r"the gradient of piece 0 is torch.float32 of shape \(39,\)"),
        ({"gradient": torch.zeros(40, dtype=torch.float64)}, "a gradient of torch.float64"),
        ({"gradient": torch.zeros(40, device="meta")}, "on meta, and the update on cpu"),
        ({"state": {"row": torch.zeros(5)}}, "the col of piece 0 is missing; its format needs 8 elements"),
        ({"state": {"row": torch.zeros(5).bfloat16(), "col": torch.zeros(8)}}, "the row of piece 0 is torch.bfloat16"),
        ({"shape": (5, 9)}, r"has 40 of the 45 elements of its shape \(5, 9\); Adafactor looks at whole"),
        ({"first_element": 8}, "begins at element 8 .*do not cut them"),
        ({"step": 0}, "at step 0"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    (item,) = items(torch.bfloat16, Rounding.EXACT, shapes=[(5, 8)])
    before = item[0].clone()
    piece = replace(piece_of(item, gradient_for(item[0], 1), 1), **change)
    with pytest.raises(BadPieceError, match=message):
        device_kernel.update_matrices([piece], rounding=Rounding.EXACT)
    assert torch.equal(item[0], before)


# On the device


def launch(made: list[MatrixPiece], rounding: Rounding, factor: float | torch.Tensor = 1.0) -> None:
    device_kernel.launch_matrices(made, rounding=rounding, gradient_factor=factor)


@on_each_place
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
def test_one_step_equals_the_reference(
    dtype: torch.dtype, rounding: Rounding, gradient_dtype: torch.dtype, place: str
) -> None:
    theirs = items(dtype, rounding, place)
    is_low = dtype is not torch.float32 and rounding in (Rounding.NEAREST, Rounding.STOCHASTIC)
    for step in (1, 2):
        # From the same numbers each time: a 16-bit weight that falls to the other side is no error.
        ours = copy.deepcopy(theirs)
        factor = 0.5 if step == 1 else torch.tensor([0.5], device=place)
        launch(pieces(ours, step, gradient_dtype), rounding, factor)
        reference.update_matrices(pieces(theirs, step, gradient_dtype), rounding=rounding, gradient_factor=factor)
        num_different = 0
        for one, other in zip(ours, theirs, strict=True):
            value, expected = value_of(one), value_of(other)
            torch.testing.assert_close(value, expected, rtol=2**-7 if is_low else 1e-6, atol=3e-7)
            num_different += int((value != expected).sum())
            for name, tensor in one[1].tensors.items():
                torch.testing.assert_close(tensor, other[1].tensors[name], rtol=2e-6, atol=1e-30)
        if is_low:
            assert num_different <= 20


@on_each_place
def test_exact_weights_are_the_master_bit_for_bit(place: str) -> None:
    num_steps = 30 if place == "cuda" else 3
    ends = []
    for rounding in (Rounding.EXACT, Rounding.MASTER):
        parts = items(torch.bfloat16, rounding, place)
        for step in range(1, num_steps + 1):
            launch(pieces(parts, step, torch.bfloat16), rounding)
        ends.append([value_of(item) for item in parts])
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*ends, strict=True))


@on_each_place
def test_how_pieces_are_put_together_changes_no_bit(place: str) -> None:
    together, alone = (items(torch.bfloat16, Rounding.STOCHASTIC, place) for _ in range(2))
    launch(pieces(together, 1), Rounding.STOCHASTIC)
    for piece in pieces(alone, 1):
        if piece.weight.numel():
            launch([piece], Rounding.STOCHASTIC)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(together, alone, strict=True))


@on_each_place
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_is_seen_in_all_of_its_weight_and_in_no_other(place: str, bad: float) -> None:
    for rounding in Rounding:
        parts = items(torch.bfloat16, rounding, place, shapes=[(9, 9), (9, 9), (9,), (9,)])
        made = pieces(parts, 1)
        for piece in (made[0], made[2]):
            piece.gradient[7] = bad
        launch(made, rounding)
        assert [bool(weight.isnan().all()) for weight, _ in parts] == [True, False, True, False]
        assert all(parts[index][0].isfinite().all() for index in (1, 3))


@on_each_place
def test_a_weight_that_was_saved_for_a_backward_is_known_to_have_changed(place: str) -> None:
    weight = torch.ones(8, 8, device=place, requires_grad=True)
    loss = weight.square().sum()
    ((_, state),) = items(torch.float32, Rounding.NEAREST, place, shapes=[(8, 8)])
    launch([piece_of((weight.detach(), state), torch.ones(8, 8, device=place), 1)], Rounding.NEAREST)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 5400), (50304, 512), (512, 50304), (3, 200001), (4099, 4097)], ids=str)
@pytest.mark.parametrize("rounding", [Rounding.EXACT, Rounding.STOCHASTIC])
def test_large_matrices_and_their_temporaries(shape: tuple[int, int], rounding: Rounding) -> None:
    theirs = items(torch.bfloat16, rounding, "cuda", shapes=[shape])
    ours = copy.deepcopy(theirs)
    for step in (1, 2):
        made = pieces(ours, step, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        device_kernel.update_matrices(made, rounding=rounding)
        down, across = -(-shape[0] // 64), -(-shape[1] // 256)
        partial_bytes = 4 * (1 + shape[0] * across + shape[1] * down + down + down * across)
        # The two tables, and what the allocator rounds up: it does not split off less than 1 MiB of a large block.
        assert torch.cuda.max_memory_allocated() - before <= partial_bytes + (1 << 20) + 4096
        reference.update_matrices(pieces(theirs, step, torch.bfloat16), rounding=rounding)
        if rounding is Rounding.STOCHASTIC:
            # Where the last bit of a sum decides, one rounds up and the other down: one unit in a step. Steps begin alike,
            # since among millions of elements some differ in two steps running.
            torch.testing.assert_close(value_of(ours[0]), value_of(theirs[0]), rtol=2**-7, atol=1e-6)
            theirs[0][0].copy_(ours[0][0])
    torch.testing.assert_close(value_of(ours[0]), value_of(theirs[0]), rtol=2e-6, atol=1e-6)
    # The same bits each time.
    again = copy.deepcopy(ours)
    for parts in (ours, again):
        device_kernel.update_matrices(pieces(parts, 3, torch.bfloat16), rounding=rounding)
    assert torch.equal(value_of(ours[0]), value_of(again[0]))


@pytest.mark.gpu
def test_nothing_is_waited_for() -> None:
    parts = items(torch.bfloat16, Rounding.EXACT, "cuda")
    made, factor = pieces(parts, 1), torch.ones(1, device="cuda")
    device_kernel.update_matrices(made, rounding=Rounding.EXACT, gradient_factor=factor)  # compiled
    with no_waiting():
        device_kernel.update_matrices(made, rounding=Rounding.EXACT, gradient_factor=factor)


@on_each_place
def test_200_steps_go_where_the_reference_goes(place: str) -> None:
    num_steps = 200 if place == "cuda" else 4
    paths: dict[Callable[..., None], list[torch.Tensor]] = {}
    for update in (device_kernel.launch_matrices, reference.update_matrices):
        parts = items(torch.float32, Rounding.NEAREST, place)
        for step in range(1, num_steps + 1):
            update(pieces(parts, step), rounding=Rounding.NEAREST, gradient_factor=1.0)
        paths[update] = [weight for weight, _ in parts]
    for (ours, theirs), shape in zip(zip(*paths.values(), strict=True), SHAPES, strict=True):
        assert ours.shape == shape
        torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6)
