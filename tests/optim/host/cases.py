"""Pieces for the tests of the host kernel, and the rules and formats that they go through."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from lowtide.optim.host import library as host_library
from lowtide.optim.reference import join
from lowtide.optim.rules import UNSIGNED, Adam, ElementwiseRule, Lion, Sgd, state_names
from lowtide.optim.update_types import BLOCK, Moments, Piece, Rounding

# Elsewhere than in CI a machine without a compiler runs the other tests.
needs_kernel = pytest.mark.skipif(
    host_library.why_missing() is not None and "CI" not in os.environ, reason="needs a C++ compiler"
)

RULES: dict[str, ElementwiseRule] = {
    "adamw": Adam(lr=1e-2, weight_decay=0.1),
    "adam": Adam(lr=1e-2, is_decoupled=False),
    "adam with decay": Adam(lr=1e-2, weight_decay=0.1, is_decoupled=False),
    "adamw far": Adam(lr=1e-2, beta1=0.3, beta2=0.5, eps=1e-3, weight_decay=0.1),
    "amsgrad": Adam(lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adam maximize": Adam(lr=1e-2, weight_decay=0.1, is_decoupled=False, maximize=True),
    "sgd": Sgd(lr=1e-2),
    "sgd with decay": Sgd(lr=1e-2, weight_decay=0.1, maximize=True),
    "momentum": Sgd(lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": Sgd(lr=1e-2, momentum=0.9, nesterov=True),
    "lion": Lion(lr=1e-3, weight_decay=0.1),
    "lion maximize": Lion(lr=1e-3, beta1=0.4, beta2=0.3, maximize=True),
}
FORMATS = [
    (torch.float32, Rounding.NEAREST),
    (torch.float32, Rounding.EXACT),
    (torch.bfloat16, Rounding.NEAREST),
    (torch.float16, Rounding.NEAREST),
    (torch.bfloat16, Rounding.STOCHASTIC),
    (torch.bfloat16, Rounding.EXACT),
    (torch.bfloat16, Rounding.MASTER),
    (torch.float16, Rounding.MASTER),
]


def make_piece(
    num_elements: int,
    rule: ElementwiseRule,
    *,
    dtype: torch.dtype = torch.float32,
    rounding: Rounding = Rounding.NEAREST,
    moments: Moments = Moments.FP32,
    gradient: torch.dtype = torch.float32,
    seed: int = 0,
    step: int = 1,
) -> Piece:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_elements, generator=generator)
    state: dict[str, torch.Tensor] = {}
    for name in state_names(rule):
        if moments is Moments.INT8:
            state[name] = torch.zeros(num_elements, dtype=torch.uint8 if name in UNSIGNED else torch.int8)
            state[f"{name}_scale"] = torch.zeros(-(-num_elements // BLOCK))
        else:
            state[name] = torch.zeros(num_elements, dtype=torch.float32 if moments is Moments.FP32 else torch.bfloat16)
    stored = weight.to(dtype)
    is_short = dtype is not torch.float32  # an fp32 weight keeps nothing beside it
    return Piece(
        weight=stored,
        gradient=torch.randn(num_elements, generator=generator).to(gradient),
        state=state,
        rule=rule,
        step=step,
        remainder=torch.zeros(num_elements, dtype=torch.int16) if is_short and rounding is Rounding.EXACT else None,
        master=stored.float() if is_short and rounding is Rounding.MASTER else None,
        key=12345,
    )


def next_gradient(piece: Piece, step: int) -> None:
    """Another gradient and key for another step, the same for equal arguments."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = 10.0 ** (step % 5 - 3)
    piece.gradient = (torch.randn(piece.weight.numel(), generator=generator) * size).to(piece.gradient.dtype)
    piece.step, piece.key = step, 7919 * step


def tensors_of(piece: Piece) -> dict[str, torch.Tensor]:
    """Everything that an update writes."""
    found = {"weight": piece.weight, **piece.state}
    if piece.remainder is not None:
        found["remainder"] = piece.remainder
    if piece.master is not None:
        found["master"] = piece.master
    return found


def full_weight(piece: Piece) -> torch.Tensor:
    if piece.weight.dtype is torch.float32:
        return piece.weight
    if piece.remainder is not None:
        return join(piece.weight, piece.remainder)
    return piece.master if piece.master is not None else piece.weight.float()


def assert_same_bits(one: Piece, other: Piece) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.nan_to_num(nan=7.5), theirs[name].nan_to_num(nan=7.5)), name
        assert torch.equal(tensor.isnan(), theirs[name].isnan()), name


def clone(piece: Piece) -> Piece:
    return copy.deepcopy(piece)
