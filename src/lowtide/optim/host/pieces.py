"""Packs pieces for the host kernel, and refuses those whose tensors do not fit together.

The kernel works on addresses: what is not caught here would read and write memory that belongs to something else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from lowtide.errors import BadPieceError, ConfigError
from lowtide.optim.update_types import (
    BLOCK,
    UNSIGNED,
    Adam,
    ElementwiseRule,
    Lion,
    Moments,
    Piece,
    Rounding,
    Sgd,
    state_names,
)

_HEAD = struct.Struct("=9Qq2I6i")
_CONSTANTS = struct.Struct("=10f")
PIECE_BYTES = _HEAD.size + _CONSTANTS.size
"""Size of one packed piece, as abi.h has it."""
_TABLE = np.dtype(
    [("addresses", "u8", 9), ("num_elements", "i8"), ("ids", "u4", 2), ("formats", "i4", 6), ("constants", "f4", 10)]
)
_TENSOR_NAMES = ("weight", "gradient", "remainder or master", *[f"state {i}" for i in range(3)], *["scale"] * 3)

_GRADIENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WEIGHTS = {
    (torch.bfloat16, Rounding.NEAREST): 1,
    (torch.float16, Rounding.NEAREST): 2,
    (torch.bfloat16, Rounding.STOCHASTIC): 3,
    (torch.bfloat16, Rounding.EXACT): 4,
    (torch.bfloat16, Rounding.MASTER): 5,
    (torch.float16, Rounding.MASTER): 6,
}
_WEIGHT_BYTES = np.array([4, 2, 2, 2, 2, 2, 2])
_EXTRA_BYTES = np.array([0, 0, 0, 0, 2, 4, 4])
_GRADIENT_BYTES = np.array([4, 2, 2])
_STATE_BYTES = np.array([4, 2, 1])
_STATES = {Moments.FP32: 0, Moments.BF16: 1, Moments.INT8: 2}
_STATE_DTYPES = {Moments.FP32: torch.float32, Moments.BF16: torch.bfloat16}
_RULES: dict[type, int] = {Adam: 0, Sgd: 1, Lion: 2}
_AMSGRAD, _NESTEROV, _FIRST_STEP = 1, 2, 4


def pack(pieces: Sequence[Piece], *, rounding: Rounding, moments: Moments, gradient_factor: float) -> bytearray:
    """The pieces as the kernel reads them; valid for as long as their tensors live. Some microseconds a piece.

    Raises:
        BadPieceError: A tensor has the wrong device, type, size or layout, or overlaps with another.
        ConfigError: A number of a rule does not fit in fp32.
    """
    packed = bytearray(PIECE_BYTES * len(pieces))
    # Most pieces of an update share their rule and step.
    seen: dict[tuple[ElementwiseRule, int], tuple[bytes, int]] = {}
    for index, piece in enumerate(pieces):
        key = (piece.rule, piece.step)
        if key not in seen:
            if piece.step < 1:
                raise BadPieceError(f"piece {index} is at step {piece.step}; the first step is 1")
            seen[key] = _constants(piece.rule, piece.step, gradient_factor), _flags(piece.rule, piece.step)
        constants, flags = seen[key]
        begin = index * PIECE_BYTES
        _pack_head(packed, begin, piece, index, rounding, moments, flags)
        packed[begin + _HEAD.size : begin + PIECE_BYTES] = constants
    _refuse_overlaps(packed)
    return packed


def _pack_head(
    packed: bytearray, begin: int, piece: Piece, index: int, rounding: Rounding, moments: Moments, flags: int
) -> None:
    weight, gradient = piece.weight, piece.gradient
    num_elements = weight.numel()
    weight_format, extra = _weight_format(piece, index, rounding, num_elements)
    gradient_format = _GRADIENTS.get(gradient.dtype)
    if gradient_format is None:
        raise BadPieceError(f"the gradient of piece {index} is {gradient.dtype}; it must be fp32, bf16 or fp16")
    if piece.first_element % BLOCK or piece.first_element < 0:
        raise BadPieceError(f"piece {index} begins at element {piece.first_element}, which is no multiple of {BLOCK}")
    addresses = [
        _address(weight, weight.dtype, num_elements, index, "weight"),
        _address(gradient, gradient.dtype, num_elements, index, "gradient"),
        extra,
    ]
    names = state_names(piece.rule)
    padding = [0] * (3 - len(names))
    addresses += [_state_address(piece, name, moments, num_elements, index) for name in names] + padding
    if moments is Moments.INT8:
        num_blocks = -(-num_elements // BLOCK)
        for name in names:
            scale = f"{name}_scale"
            addresses.append(_address(_state(piece, scale, index), torch.float32, num_blocks, index, scale))
        addresses += padding
    else:
        addresses += [0, 0, 0]
    _HEAD.pack_into(
        packed,
        begin,
        *addresses,
        num_elements,
        piece.key & 0xFFFFFFFF,
        piece.first_element & 0xFFFFFFFF,
        _RULES[type(piece.rule)],
        weight_format,
        gradient_format,
        _STATES[moments],
        len(names),
        flags,
    )


def _weight_format(piece: Piece, index: int, rounding: Rounding, num_elements: int) -> tuple[int, int]:
    """The number of the weight's format, and the address of what it keeps beside it. An fp32 weight is its own master."""
    if piece.weight.dtype is torch.float32:
        return 0, 0
    number = _WEIGHTS.get((piece.weight.dtype, rounding))
    if number is None:
        raise BadPieceError(
            f"the weight of piece {index} is {piece.weight.dtype}, for which there is no {rounding.value} update; fp32, "
            "bf16 with every rounding, and fp16 with nearest and master are known"
        )
    if rounding is Rounding.EXACT:
        return number, _kept_address(piece.remainder, torch.int16, num_elements, index, "remainder")
    if rounding is Rounding.MASTER:
        return number, _kept_address(piece.master, torch.float32, num_elements, index, "master")
    return number, 0


def _kept_address(tensor: torch.Tensor | None, dtype: torch.dtype, num_elements: int, index: int, name: str) -> int:
    if tensor is None:
        raise BadPieceError(
            f"piece {index} has no {name}, which its rounding needs: one {dtype} number for each element"
        )
    return _address(tensor, dtype, num_elements, index, name)


def _state(piece: Piece, name: str, index: int) -> torch.Tensor:
    tensor = piece.state.get(name)
    if tensor is None:
        have = ", ".join(sorted(piece.state)) or "nothing"
        raise BadPieceError(
            f"piece {index} has no state {name!r}, which {type(piece.rule).__name__} keeps; it has {have}"
        )
    return tensor


def _state_address(piece: Piece, name: str, moments: Moments, num_elements: int, index: int) -> int:
    dtype = _STATE_DTYPES.get(moments)
    if dtype is None:
        dtype = torch.uint8 if name in UNSIGNED else torch.int8
    return _address(_state(piece, name, index), dtype, num_elements, index, name)


def _address(tensor: torch.Tensor, dtype: torch.dtype, num_elements: int, index: int, name: str) -> int:
    if not tensor.is_cpu:
        raise BadPieceError(f"the {name} of piece {index} is on {tensor.device}; the host kernel updates host memory")
    if tensor.dtype is not dtype:
        raise BadPieceError(f"the {name} of piece {index} is {tensor.dtype}; it must be {dtype}")
    if tensor.numel() != num_elements:
        raise BadPieceError(f"the {name} of piece {index} has {tensor.numel()} elements; it must have {num_elements}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise BadPieceError(f"the {name} of piece {index} is not dense in memory; pass a flat view of it")
    return tensor.data_ptr()


def _flags(rule: ElementwiseRule, step: int) -> int:
    if isinstance(rule, Adam):
        return _AMSGRAD if rule.amsgrad else 0
    if isinstance(rule, Sgd):
        return (_NESTEROV if rule.nesterov else 0) | (_FIRST_STEP if step == 1 else 0)
    return 0


def _constants(rule: ElementwiseRule, step: int, gradient_factor: float) -> bytes:
    """The numbers of a rule at a step, in the order of abi.h: computed in double, as torch does, and rounded once."""
    factor = -gradient_factor if rule.maximize else gradient_factor
    decay = 1 - rule.lr * rule.weight_decay
    if isinstance(rule, Adam):
        weight_factor, gradient_decay = (decay, 0.0) if rule.is_decoupled else (1.0, rule.weight_decay)
        correction = (1 - rule.beta2**step) ** 0.5
        step_size = rule.lr / (1 - rule.beta1**step)
        moving = (1 - rule.beta1, 0.0, 1 - rule.beta2, rule.beta2, correction, rule.eps, step_size)
    elif isinstance(rule, Sgd):
        weight_factor, gradient_decay = 1.0, rule.weight_decay
        moving = (0.0, rule.momentum, 1 - rule.dampening, 0.0, 0.0, 0.0, rule.lr)
    else:
        weight_factor, gradient_decay = decay, 0.0
        moving = (1 - rule.beta1, 0.0, 1 - rule.beta2, 0.0, 0.0, 0.0, rule.lr)
    try:
        return _CONSTANTS.pack(factor, weight_factor, gradient_decay, *moving)
    except OverflowError as error:
        raise ConfigError(
            f"a number of {rule} at step {step}, or the gradient factor {gradient_factor:g}, is beyond fp32's 3.4e38"
        ) from error


def _refuse_overlaps(packed: bytearray) -> None:
    """Threads write in any order: two places in the same memory would give a result by chance."""
    table = np.frombuffer(packed, dtype=_TABLE)
    count = table["num_elements"]
    formats = table["formats"]
    state = count * _STATE_BYTES[formats[:, 3]]
    widths = [
        count * _WEIGHT_BYTES[formats[:, 1]],
        count * _GRADIENT_BYTES[formats[:, 2]],
        count * _EXTRA_BYTES[formats[:, 1]],
        *[state] * 3,
        *[-(-count // BLOCK) * 4] * 3,
    ]
    begins = table["addresses"].astype(np.int64)
    ends = begins + np.stack(widths, axis=1)
    used = (begins != 0) & (ends > begins)
    place = np.flatnonzero(used)
    order = place[np.argsort(begins.ravel()[place], kind="stable")]
    sorted_begins, sorted_ends = begins.ravel()[order], ends.ravel()[order]
    is_read_only = order % 9 == 1
    # Gradients may share memory with each other: they are only read.
    last_written = np.maximum.accumulate(np.where(is_read_only, 0, sorted_ends))
    last_any = np.maximum.accumulate(sorted_ends)
    reach = np.where(is_read_only[1:], last_written[:-1], last_any[:-1])
    clash = np.flatnonzero(sorted_begins[1:] < reach)
    if clash.size:
        later = int(clash[0]) + 1
        earlier = int(np.flatnonzero(sorted_ends[:later] > sorted_begins[later])[-1])
        first, second = (divmod(int(order[i]), 9) for i in (earlier, later))
        raise BadPieceError(
            f"the {_TENSOR_NAMES[first[1]]} of piece {first[0]} and the {_TENSOR_NAMES[second[1]]} of piece {second[0]} "
            "share memory; every element may be updated once only"
        )
