"""Updates in torch's own operators: what the kernels of the host and of the device are held to.

All arithmetic is in fp32, in the order of torch.optim's loop over single tensors. An fp32 weight with fp32 state is
updated as torch.optim does it, bit for bit where its rate is a number. Temporaries are a few fp32 copies of one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.optim.formats import join, read_moment, round_stochastic, split, write_moment
from lowtide.optim.matrix_rules import MatrixPiece
from lowtide.optim.precision import state_names
from lowtide.optim.update_types import (
    Adam,
    ElementwiseRule,
    Lion,
    Moments,
    Piece,
    Rounding,
    Sgd,
    is_left_out,
)


@torch.no_grad()
def update(
    pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float | Tensor = 1.0
) -> None:
    """Take one step of each piece's rule, in place. Weights in fp32 are what they are: `rounding` is for the others.

    Args:
        pieces: Parameters or slices of them.
        rounding: How results land in weights of 16 bits.
        moments: How state is stored.
        gradient_factor: What gradients are multiplied by in fp32: one over the loss scale, times the clipping. A number,
            or a tensor of one element on the pieces' device. Where it is a NaN nothing is changed.
    """
    if is_left_out(gradient_factor):
        return
    for piece in pieces:
        master = read_master(piece, rounding)
        gradient = piece.gradient.float() * gradient_factor
        state = {name: read_moment(name, piece.state, moments) for name in state_names(piece.rule)}
        apply_rule(piece.rule, master, gradient, state, piece.step)
        for name, value in state.items():
            write_moment(name, value, piece.state, moments)
        write_master(piece, master, rounding)


def apply_rule(rule: ElementwiseRule, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
    """One step of a rule on fp32 tensors, in place: weight and state are moved, the gradient is used up."""
    if rule.maximize:
        gradient.neg_()
    if isinstance(rule, Adam):
        _adam(rule, weight, gradient, state, step)
    elif isinstance(rule, Sgd):
        _sgd(rule, weight, gradient, state, step)
    else:
        _lion(rule, weight, gradient, state)


def _adam(rule: Adam, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
    if rule.weight_decay != 0:
        if rule.is_decoupled:
            weight.mul_(1 - rule.lr * rule.weight_decay)
        else:
            gradient.add_(weight, alpha=rule.weight_decay)
    average, square = state["exp_avg"], state["exp_avg_sq"]
    average.lerp_(gradient, 1 - rule.beta1)
    square.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    if rule.amsgrad:
        square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
    denominator = (square.sqrt() / (1 - rule.beta2**step) ** 0.5).add_(rule.eps)
    weight.addcdiv_(average, denominator, value=-(rule.lr / (1 - rule.beta1**step)))


def _sgd(rule: Sgd, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
    if rule.weight_decay != 0:
        gradient.add_(weight, alpha=rule.weight_decay)
    if rule.momentum != 0:
        buffer = state["momentum_buffer"]
        if step == 1:
            buffer.copy_(gradient)
        else:
            buffer.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        gradient = gradient.add_(buffer, alpha=rule.momentum) if rule.nesterov else buffer
    weight.add_(gradient, alpha=-rule.lr)


def _lion(rule: Lion, weight: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
    average = state["exp_avg"]
    if rule.weight_decay != 0:
        weight.mul_(1 - rule.lr * rule.weight_decay)
    weight.add_(sign(average.lerp(gradient, 1 - rule.beta1)), alpha=-rule.lr)
    average.lerp_(gradient, 1 - rule.beta2)


def sign(values: Tensor) -> Tensor:
    """-1, 0 or 1, and NaN for a NaN, for which torch says 0: a broken gradient would go unnoticed."""
    return torch.where(values.isnan(), values, values.sign())


def read_master(piece: Piece | MatrixPiece, rounding: Rounding) -> Tensor:
    """The weight in fp32: the stored tensor itself where there is one."""
    if piece.weight.dtype is torch.float32:
        return piece.weight
    if rounding is Rounding.EXACT:
        assert piece.remainder is not None, "the exact format has a remainder"
        return join(piece.weight, piece.remainder)
    if rounding is Rounding.MASTER:
        assert piece.master is not None, "updates through a master have one"
        return piece.master
    return piece.weight.float()


def write_master(piece: Piece | MatrixPiece, master: Tensor, rounding: Rounding) -> None:
    """The fp32 result lands in the weight, and what is kept beside it follows."""
    if piece.weight.dtype is torch.float32:
        return
    if rounding is Rounding.EXACT:
        assert piece.remainder is not None, "the exact format has a remainder"
        weight, remainder = split(master)
        piece.weight.copy_(weight)
        piece.remainder.copy_(remainder)
    elif rounding is Rounding.STOCHASTIC:
        piece.weight.copy_(round_stochastic(master, piece.key, piece.first_element))
    else:
        piece.weight.copy_(master)
