"""Updates and formats in torch's own operators: what the kernels of the host and of the device are held to.

How numbers are stored (the exact format, stochastic rounding, moments of each width) comes last; `update_types` says why.

All arithmetic is in fp32, without fused products, in the order of torch.optim's loop over single tensors. An fp32 weight
with fp32 state is updated as torch.optim does it, bit for bit where its rate is a number. Temporaries are a few fp32 copies
of one piece. Adafactor goes band by band, so that it does not depend on where a band begins: a few fp32 copies of one
band, some MiB in all, however large the matrix; the gradient is read three times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.optim.optimizers import sign
from lowtide.optim.rules import COLUMN, ROW, UNSIGNED, Adam, ElementwiseRule, Lion, Sgd, matrix_shape, state_names
from lowtide.optim.update_types import BLOCK, MASK, MatrixPiece, Moments, Piece, Rounding, is_left_out

BAND_ELEMENTS = 1 << 18
"""Elements in a band, as far as whole rows go: 1 MiB in fp32, which stays in a core's cache between two operators."""
_HALF = 0x8000
_NAN_BITS = 0x7FC0
_SIGNED_STEPS = 127
_UNSIGNED_STEPS = 255
SMALLEST_SCALE = 2.0**-124
"""A block whose largest magnitude is below this is a block of zeros: one over its scale is too large."""
_LARGEST_TINY = 2.0**-126 - 2.0**-149
"""Up to this magnitude numbers count as zero: processors compute with them slowly, or take them for zero themselves."""
# Roots are counted in parts of these: powers of two, which keep the quotients below in the range of fp32.
SIGNED_UNIT = 32
UNSIGNED_UNIT = 128
SIGNED_SHARE = _SIGNED_STEPS**2 / SIGNED_UNIT**2
UNSIGNED_SHARE = _UNSIGNED_STEPS**4 / UNSIGNED_UNIT**4


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
        master = _read_master(piece, rounding)
        gradient = piece.gradient.float() * gradient_factor
        state = {name: read_moment(name, piece.state, moments) for name in state_names(piece.rule)}
        _apply_rule(piece.rule, master, gradient, state, piece.step)
        for name, value in state.items():
            write_moment(name, value, piece.state, moments)
        _write_master(piece, master, rounding)


@torch.no_grad()
def update_matrices(
    pieces: Sequence[MatrixPiece], *, rounding: Rounding, gradient_factor: float | Tensor = 1.0
) -> None:
    """Take one step of each piece's rule, in place; see Note [Adafactor in two vectors].

    Args:
        pieces: Whole parameters, in the order that their shape says.
        rounding: How results land in weights of 16 bits; an fp32 weight is not rounded.
        gradient_factor: What gradients are multiplied by in fp32: a number, or a tensor of one element on the pieces'
            device. Where it is a NaN nothing is changed.
    """
    if is_left_out(gradient_factor):
        return
    for piece in pieces:
        if not piece.weight.numel():
            continue
        _move_statistics(piece, gradient_factor)
        scales, size = _scales(piece)
        squares = torch.zeros((), dtype=torch.float64, device=piece.weight.device)
        for band in _bands(piece):
            squares += _row_sums(_direction(band, gradient_factor, scales).square_()).sum(dtype=torch.float64)
        mean = (squares / piece.weight.numel()).float()
        step = _step(piece, size, mean)
        for band in _bands(piece):
            _land(band, _direction(band, gradient_factor, scales).mul_(step), rounding)


def _apply_rule(rule: ElementwiseRule, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
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


def _move_statistics(piece: MatrixPiece, factor: float | Tensor) -> None:
    amount = 1.0 - piece.rule.beta2(piece.step)
    if not piece.is_matrix:
        for band in _bands(piece):
            squares = _gradient(band, factor).square_().add_(piece.rule.eps)
            band.state[ROW].lerp_(squares.view(-1), amount)
        return
    row, column = torch.empty_like(piece.state[ROW]), torch.zeros_like(piece.state[COLUMN])
    for band in _bands(piece):
        squares = _gradient(band, factor).square_().add_(piece.rule.eps)
        first_row = band.first_element // column.numel()
        row[first_row : first_row + squares.shape[0]] = _row_sums(squares)
        column += squares.sum(dim=0)
    piece.state[ROW].lerp_(row, amount)
    piece.state[COLUMN].lerp_(column, amount)


def _scales(piece: MatrixPiece) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """One over the roots of the two vectors, and the size that their product lacks; None for a vector."""
    if not piece.is_matrix:
        return None, None
    size = piece.state[ROW].sum(dtype=torch.float64).float().sqrt_()
    return (piece.state[ROW].rsqrt(), piece.state[COLUMN].rsqrt()), size


def _direction(band: MatrixPiece, factor: float | Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    gradient = _gradient(band, factor)
    if scales is None:
        return gradient.div_(band.state[ROW].sqrt())
    first_row = band.first_element // scales[1].numel()
    return gradient.mul_(torch.outer(scales[0][first_row : first_row + gradient.shape[0]], scales[1]))


def _row_sums(values: Tensor) -> Tensor:
    # A sum to one number is in fp64, here and elsewhere: torch splits it by threads, which does not show so.
    return values.sum(dim=1, dtype=torch.float64 if values.shape[0] == 1 else torch.float32)


def _step(piece: MatrixPiece, size: Tensor | None, mean: Tensor) -> Tensor:
    """What the direction is multiplied by; a NaN in the gradient is one here, and so in all of the weight."""
    root = mean.sqrt()
    if size is None:
        return piece.rule.lr / (root / piece.rule.clip_threshold).clamp_(min=1.0)
    return piece.rule.lr * size / (size * root / piece.rule.clip_threshold).clamp_(min=1.0)


def _land(band: MatrixPiece, moved: Tensor, rounding: Rounding) -> None:
    master = _read_master(band, rounding)
    master.mul_(1.0 - band.rule.lr * band.rule.weight_decay).sub_(moved.view(-1))
    _write_master(band, master, rounding)


def _gradient(band: MatrixPiece, factor: float | Tensor) -> Tensor:
    """An fp32 copy of a band's gradient, with its factor, in rows."""
    copied = band.gradient.to(torch.float32, copy=True).mul_(factor)
    return copied.view(-1, band.shape[-1]) if band.is_matrix else copied.view(1, -1)


def _bands(piece: MatrixPiece) -> Iterator[MatrixPiece]:
    """Some rows at a time, by the shape alone: in the order of memory, which is that of the rows."""
    columns = matrix_shape(piece.shape)[1] if piece.is_matrix else 1
    num_elements = max(1, BAND_ELEMENTS // columns) * columns
    total = math.prod(piece.shape)
    for first in range(0, total, num_elements):
        part = slice(first, min(first + num_elements, total))
        yield replace(
            piece,
            weight=piece.weight[part],
            gradient=piece.gradient[part],
            state=piece.state if piece.is_matrix else {ROW: piece.state[ROW][part]},
            remainder=None if piece.remainder is None else piece.remainder[part],
            master=None if piece.master is None else piece.master[part],
            first_element=first,
        )


def _read_master(piece: Piece | MatrixPiece, rounding: Rounding) -> Tensor:
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


def _write_master(piece: Piece | MatrixPiece, master: Tensor, rounding: Rounding) -> None:
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


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 weight and the int16 remainder of an fp32 tensor; see Note [The exact format].

    Example:
        >>> weight, remainder = split(torch.tensor([1.0, 1.0 + 2**-20]))
        >>> weight.tolist(), remainder.tolist()
        ([1.0, 1.0], [0, 8])
    """
    bits = master.view(torch.int32)
    # Only a NaN overflows here, and is replaced.
    upper = (bits + _HALF) >> 16
    remainder = bits - (upper << 16)
    is_nan = master.isnan()
    weight = upper.masked_fill_(is_nan, _NAN_BITS).to(torch.int16).view(torch.bfloat16)
    return weight, remainder.masked_fill_(is_nan, 0).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 number that `split` took apart."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def random_bits_of(key: int, first_element: int, num_elements: int, device: torch.device | str = "cpu") -> Tensor:
    """`random_bits` of elements in a row, as int64."""
    index = torch.arange(first_element, first_element + num_elements, dtype=torch.int64, device=device)
    # Every product of two 32-bit numbers below wraps around in 64 bits, and its lower half is right all the same.
    x = (index * 0x9E3779B9 + key).bitwise_and_(MASK)
    x ^= x >> 16
    x = (x * 0x85EBCA6B).bitwise_and_(MASK)
    x ^= x >> 13
    x = (x * 0xC2B2AE35).bitwise_and_(MASK)
    x ^= x >> 16
    return x.bitwise_and_(0xFFFF)


def round_stochastic(values: Tensor, key: int, first_element: int = 0) -> Tensor:
    """A flat fp32 tensor in bf16, up or down by chance; see Note [Stochastic rounding].

    Example:
        >>> round_stochastic(torch.full((4,), 0.5), key=1).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    drawn = random_bits_of(key, first_element, values.numel(), values.device).to(torch.int32)
    upper = drawn.add_(values.view(torch.int32)) >> 16
    return upper.masked_fill_(values.isnan(), _NAN_BITS).to(torch.int16).view(torch.bfloat16)


def read_moment(name: str, state: dict[str, Tensor], moments: Moments) -> Tensor:
    """A state in fp32: itself where it is stored so, else a copy."""
    stored = state[name]
    if moments is Moments.INT8:
        return decode_blocks(stored, state[f"{name}_scale"])
    return stored.float()


def write_moment(name: str, value: Tensor, state: dict[str, Tensor], moments: Moments) -> None:
    """Store an fp32 state in place; nothing happens where it is stored there already."""
    stored = state[name]
    if moments is Moments.INT8:
        codes, scales = encode_blocks(value, is_unsigned=name in UNSIGNED)
        stored.copy_(codes)
        state[f"{name}_scale"].copy_(scales)
    elif value is not stored:
        stored.copy_(value)


def encode_blocks(values: Tensor, *, is_unsigned: bool) -> tuple[Tensor, Tensor]:
    """The codes of a flat fp32 tensor (int8, or uint8 for second moments), and the scale of each block.

    Measured by its block's largest element, the root of a first moment comes back within 1/254, the fourth root of a
    second moment within 1/510, or within 1/255 where it is the smallest that is not zero; fp32 rounding adds 1e-7.

    Example:
        >>> codes, scales = encode_blocks(torch.tensor([0.25, -1.0, 0.0]), is_unsigned=False)
        >>> codes.tolist(), scales.tolist()
        ([64, -127, 0], [1.0])
    """
    num_elements = values.numel()
    num_blocks = -(-num_elements // BLOCK)
    rows = torch.nn.functional.pad(values, (0, num_blocks * BLOCK - num_elements)).view(num_blocks, BLOCK)
    magnitudes = _flush(rows.abs())
    scales = magnitudes.amax(dim=1, keepdim=True) if num_blocks else values.new_zeros(0, 1)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scales = torch.where(scales < SMALLEST_SCALE, 0.0, scales)
    # For a block of zeros it is divided by infinity, for one with NaN by NaN, and those codes are made zero below. Not a
    # number by a tensor: torch would multiply by a reciprocal, and round twice.
    share = torch.full_like(scales, UNSIGNED_SHARE if is_unsigned else SIGNED_SHARE)
    shares = magnitudes * (share / torch.where(scales == 0, torch.inf, scales))
    if is_unsigned:
        codes = shares.sqrt().sqrt_().mul_(UNSIGNED_UNIT).floor_()
        codes += ((codes + 0.5) / UNSIGNED_UNIT).square_().square_().le_(shares)
        codes = torch.maximum(codes, magnitudes.sign_().mul_((scales > 0).float()))
    else:
        codes = shares.sqrt().mul_(SIGNED_UNIT).floor_()
        codes += ((codes + 0.5) / SIGNED_UNIT).square_().le_(shares)
        codes.copysign_(rows)
    codes = codes.nan_to_num_(nan=0.0).to(torch.uint8 if is_unsigned else torch.int8)
    return codes.view(-1)[:num_elements], scales.view(-1)


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers of codes; which kind they are, their dtype says."""
    spread = scales.repeat_interleave(BLOCK)[: codes.numel()]
    if codes.dtype is torch.uint8:
        return _flush((codes.float() * (1 / _UNSIGNED_STEPS)).square_().square_().mul_(spread))
    roots = codes.float() * (1 / _SIGNED_STEPS)
    return _flush((roots * roots.abs()).mul_(spread))


def _flush(values: Tensor) -> Tensor:
    # By its name a function for networks: zero up to a magnitude, and everything else, a NaN too, as it is.
    return torch.nn.functional.hardshrink(values, _LARGEST_TINY)
