"""A factor that is a NaN leaves an update out: not a bit of weights and state changes, wherever it runs.

Without a GPU, but with Triton: TRITON_INTERPRET=1 python -m pytest tests/optim/test_left_out.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from lowtide import compat
from lowtide.optim import reference
from lowtide.optim.device import kernel as device_kernel
from lowtide.optim.host import kernel as host_kernel
from lowtide.optim.rules import ElementwiseRule
from lowtide.optim.update_types import MatrixPiece, Moments, Numerics, Piece, Rounding
from tests.optim import matrix_cases
from tests.optim.device.test_kernel import FORMATS, RULES, items, pieces

Update = Callable[..., None]

has_interpreter = compat.has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not has_interpreter, reason="needs Triton and TRITON_INTERPRET=1")
PLACES = [
    pytest.param("cpu", reference.update, id="reference"),
    pytest.param("cpu", host_kernel.update, id="host kernel"),
    pytest.param("cuda", device_kernel.update, marks=pytest.mark.gpu, id="device kernel"),
    pytest.param("cpu", device_kernel.launch_all, marks=needs_interpreter, id="interpreter"),
]
MATRIX_PLACES = [
    pytest.param("cpu", device_kernel.update_matrices, id="reference"),
    pytest.param("cuda", device_kernel.update_matrices, marks=pytest.mark.gpu, id="device kernel"),
    pytest.param("cpu", device_kernel.launch_matrices, marks=needs_interpreter, id="interpreter"),
]


def factor_of(value: float, place: str, update: Update) -> float | torch.Tensor:
    """As a session gives it: the host's kernel takes a number."""
    return value if update is host_kernel.update else torch.full((), value, device=place)


def everything(made: list[Piece] | list[MatrixPiece]) -> list[torch.Tensor]:
    kept = [[piece.weight, *piece.state.values(), piece.remainder, piece.master] for piece in made]
    return [tensor.clone() for tensors in kept for tensor in tensors if tensor is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit, whatever the bits mean."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("place", "update"), PLACES)
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize(("dtype", "rounding"), FORMATS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{RULES.index(rule)}")
def test_elementwise(
    rule: ElementwiseRule, dtype: torch.dtype, rounding: Rounding, moments: Moments, place: str, update: Update
) -> None:
    parts = items(rule, dtype, Numerics(rounding=rounding, moments=moments), place)
    if moments is not Moments.FP32 and not parts[0][1].tensors:
        pytest.skip("a rule without state has no format for it")
    words = {"rounding": rounding, "moments": moments}
    first = pieces(parts, rule, step=1)
    update(first, **words, gradient_factor=factor_of(1.0, place, update))
    second = pieces(parts, rule, step=2)
    before = everything(second)
    for piece in second:
        piece.gradient.fill_(torch.inf)
    update(second, **words, gradient_factor=factor_of(torch.nan, place, update))
    assert same(before, everything(second))
    update(pieces(parts, rule, step=2), **words, gradient_factor=factor_of(1.0, place, update))
    assert not same(before, everything(second)), "an update that is not left out changes something"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(("place", "update"), MATRIX_PLACES)
@pytest.mark.parametrize(("dtype", "rounding"), matrix_cases.FORMATS)
def test_whole_parameters(dtype: torch.dtype, rounding: Rounding, place: str, update: Update) -> None:
    parts = matrix_cases.items(dtype, rounding, place)
    update(matrix_cases.pieces(parts, 1), rounding=rounding, gradient_factor=factor_of(1.0, place, update))
    second = matrix_cases.pieces(parts, 2)
    before = everything(second)
    for piece in second:
        piece.gradient.fill_(torch.inf)
    update(second, rounding=rounding, gradient_factor=factor_of(torch.nan, place, update))
    assert same(before, everything(second))
    update(matrix_cases.pieces(parts, 2), rounding=rounding, gradient_factor=factor_of(1.0, place, update))
    assert not same(before, everything(second))
