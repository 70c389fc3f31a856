"""What an update is made of, as plain data: how it rounds, how its state is stored, and the pieces it works on, which are
checked before a kernel gets their addresses.

Three implementations take the same `Piece`s and agree within fp32 rounding: the reference in torch's own operators, the
host kernel in C++, and the device kernel.

Note [The exact format]
A bf16 weight and a signed 16-bit remainder are one fp32 number, the master: `bits = (weight_bits << 16) + remainder`. The
weight is the master rounded to the nearest bf16, ties up, so that the remainder always fits. The update reads and
writes the master; nothing is lost, in 4 bytes instead of 6. `weight_bits = (bits + 0x8000) >> 16` would turn a NaN into
infinity or zero: a NaN is the weight 0x7FC0 with remainder 0. The largest finite masters have the weight infinity and a
negative remainder, and are still themselves.

Note [Stochastic rounding]
An fp32 result goes to one of its two bf16 neighbours, with a chance that makes the mean right: 16 random bits are added
below the bf16's last bit, and the rest is cut off. The bits are a hash of a key and of the element's place in its parameter, so
they depend neither on chunks, threads nor devices, and a resumed run draws the same: see `random_bits`. Infinity stays
what it is; a NaN becomes 0x7FC0, because the sum could carry it over into infinity or zero.

Note [8-bit blocks]
128 elements share a scale, the largest magnitude of the block, in fp32. A first moment m is stored as the signed 8-bit
integer nearest to `127 * sign(m) * sqrt(|m| / scale)`, a second moment v as the unsigned one nearest to
`255 * sqrt(sqrt(v / scale))`: the roots spend the codes on small values. A second moment above zero has at least the code
1: after one large gradient in the block the others would read as zero, and an update divides by it. A block of zeros has
scale 0. A block with a NaN or an infinite element has scale NaN and codes 0, and reads as NaN throughout.

No code depends on how a root is rounded. The share of an element is `|m| * (127**2 / scale)` or `v * (255**4 / scale)`,
each constant and result rounded to fp32; its code is the number of borders that it has reached, `(c + 1/2) ** 2` or
`((c + 1/2) ** 2) ** 2` for c = 0, 1, 2 and so on, where only the last square needs rounding. So one quotient does for a
block, and for an element a fast root that is good for three digits: it leads to the right code or the one before, and one
comparison decides. Shares and borders are multiplied by `2**-10` and `2**-28`, which changes no digit and keeps the quotient
in the range of fp32.

Read back: `m = r * |r| * scale` with `r = c * (1 / 127)` and `v = (r * r) * (r * r) * scale` with `r = c * (1 / 255)`, from
the left and each result rounded. The largest code has r = 1 exactly: what is written again unchanged does not drift.

Numbers below `2**-126`, which kernels take for zero, count as zero before and after. A block whose largest is below
`2**-124` is one of zeros, because the quotient would leave that range.

Note [The order of sums]
A sum in fp32 depends on its order. The reference sums bands of rows, `BAND_ELEMENTS` elements long, and adds the bands
from the first to the last; the device sums tiles, and then the tiles. So each gives the same bits every time, wherever
chunks begin and end, and both agree within fp32 rounding. In each the sums do not depend on the weight's format, so that
an exact bf16 weight is the master bit for bit.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import BadPieceError, ConfigError, UnknownNameError
from lowtide.optim.rules import (
    STATISTICS,
    UNSIGNED,
    Adafactor,
    ElementwiseRule,
    Rule,
    names_of_states,
    state_names,
    statistic_sizes,
)

BLOCK = 128
"""Elements that share a scale in the 8-bit format."""
SCALE = "_scale"
"""After the name of an 8-bit state: its scales."""
MASK = 0xFFFFFFFF
"""The lower 32 bits, in which random bits are mixed."""


class Rounding(enum.StrEnum):
    """How an fp32 result lands in a weight of 16 bits."""

    NEAREST = "nearest"
    """To nearest even, and the rest is lost: small updates vanish."""
    STOCHASTIC = "stochastic"
    """Up or down by chance, right in the mean; see Note [Stochastic rounding]."""
    EXACT = "exact"
    """The rest is kept beside it; see Note [The exact format]. bf16 weights only."""
    MASTER = "master"
    """An fp32 copy is kept and updated, and the weight is its nearest."""


class Moments(enum.StrEnum):
    """How optimizer state is stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    """To nearest."""
    INT8 = "8bit"
    """See Note [8-bit blocks]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the user asked for: which numbers the update works on. Nothing here is chosen by a plan."""

    rounding: Rounding = Rounding.EXACT
    moments: Moments = Moments.FP32
    seed: int = 0
    """Seeds stochastic rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The type of trained weights, and how an fp32 result lands in it."""

    dtype: torch.dtype
    rounding: Rounding


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(dtype=torch.float32, rounding=Rounding.NEAREST),
    "bf16 exact": Precision(dtype=torch.bfloat16, rounding=Rounding.EXACT),
    "bf16 stochastic": Precision(dtype=torch.bfloat16, rounding=Rounding.STOCHASTIC),
    "bf16 nearest": Precision(dtype=torch.bfloat16, rounding=Rounding.NEAREST),
    "fp16 exact": Precision(dtype=torch.float16, rounding=Rounding.MASTER),
}
"""fp16 has another range than fp32's upper half, so that its exact format keeps a whole fp32 master."""


def numerics_of(precision: str, moments: str | Moments = Moments.FP32, *, seed: int = 0) -> tuple[Precision, Numerics]:
    """From words.

    Example:
        >>> numerics_of("bf16 exact", "8bit")[1].moments.value
        '8bit'

    Raises:
        UnknownNameError: A word is none.
        ConfigError: The seed is no whole number.
    """
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    try:
        stored = Moments(moments)
    except ValueError:
        raise UnknownNameError("format of moments", str(moments), [member.value for member in Moments]) from None
    try:
        whole = operator.index(seed)
    except TypeError:
        # Else the first update would find out, in the middle of a step.
        raise ConfigError(f"seed is {seed!r}; give a whole number", key="seed") from None
    found = PRECISIONS[precision]
    return found, Numerics(rounding=found.rounding, moments=stored, seed=whole)


def rounding_for(weight: Tensor, numerics: Numerics) -> Rounding:
    """How results land in this weight: in fp32 there is nothing to round.

    Raises:
        ConfigError: The weight is of a type that the format is not for.
    """
    if weight.dtype is torch.float32:
        return Rounding.NEAREST
    if numerics.rounding in (Rounding.EXACT, Rounding.STOCHASTIC) and weight.dtype is not torch.bfloat16:
        raise ConfigError(
            f"a {numerics.rounding.value} update is for bf16 weights, and this one is {weight.dtype}; convert the model "
            "with model.to(torch.bfloat16), or choose the precision 'fp16 exact'",
            key="precision",
        )
    return numerics.rounding


def stored_as(name: str, moments: Moments) -> Moments:
    """The format of a state, where `moments` was asked for."""
    return Moments.FP32 if name in STATISTICS else moments


def kept_bytes(num_elements: int, dtype: torch.dtype, numerics: Numerics) -> int:
    """Bytes beside a weight that its rounding keeps: a remainder or a master."""
    if dtype is torch.float32:
        return 0
    return {Rounding.EXACT: 2, Rounding.MASTER: 4}.get(numerics.rounding, 0) * num_elements


def state_tensors(rule: Rule, shape: Sequence[int], moments: Moments) -> dict[str, tuple[torch.dtype, int]]:
    """The type and the number of elements of each tensor that a rule keeps for a parameter, by name, scales among them.

    Example:
        >>> state_tensors(Adafactor(lr=1e-3), (4, 3), Moments.INT8)
        {'row': (torch.float32, 4), 'col': (torch.float32, 3)}
    """
    if isinstance(rule, Adafactor):
        return {name: (torch.float32, size) for name, size in statistic_sizes(shape).items()}
    num_elements = math.prod(shape)
    if moments is not Moments.INT8:
        dtype = torch.float32 if moments is Moments.FP32 else torch.bfloat16
        return dict.fromkeys(state_names(rule), (dtype, num_elements))
    found: dict[str, tuple[torch.dtype, int]] = {}
    for name in state_names(rule):
        found[name] = (torch.uint8 if name in UNSIGNED else torch.int8, num_elements)
        found[f"{name}{SCALE}"] = (torch.float32, -(-num_elements // BLOCK))
    return found


def random_bits(key: int, index: int) -> int:
    """The 16 random bits for an element: the same on every device. A mixing function of 32 bits, as in murmur3.

    Example:
        >>> random_bits(1, 0) == random_bits(1, 0), random_bits(1, 0) == random_bits(2, 0)
        (True, False)
    """
    x = (index * 0x9E3779B9 + key) & MASK
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & MASK
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & MASK
    x ^= x >> 16
    return x & 0xFFFF


def update_key(seed: int, parameter_index: int, step: int) -> int:
    """The `key` of a parameter's update in a step: 32 bits in which every argument shows.

    Example:
        >>> update_key(0, 3, 1) == update_key(0, 3, 1), update_key(0, 3, 1) == update_key(0, 1, 3)
        (True, False)
    """
    key = 0
    for part in (seed, parameter_index, step):
        key = (key ^ (part & MASK)) * 0x9E3779B1 + 0x85EBCA77 & MASK
        key ^= key >> 15
        key = key * 0xC2B2AE3D & MASK
        key ^= key >> 13
    return key


def is_left_out(gradient_factor: float | Tensor) -> bool:
    """Whether an update with this factor changes nothing: a NaN, by which gradients that are not finite are kept out.

    Waits for one that lies on a device.
    """
    if isinstance(gradient_factor, Tensor):
        return bool(gradient_factor.isnan())
    return math.isnan(gradient_factor)


@dataclass(slots=True, kw_only=True)
class _UpdatedTensors:
    """What every piece has. All tensors are flat, dense and of one device; those beside the weight are in its order."""

    weight: Tensor
    """fp32, bf16 or fp16."""
    gradient: Tensor
    """fp32, bf16 or fp16; not changed."""
    state: dict[str, Tensor]
    """By name, as `state_tensors` says."""
    step: int
    """The number of this update, from 1."""
    remainder: Tensor | None = None
    """int16, with EXACT."""
    master: Tensor | None = None
    """fp32, with MASTER."""
    key: int = 0
    """32 bits, with STOCHASTIC: another for each parameter and step; see `random_bits`."""
    first_element: int = 0
    """Where the slice begins in its parameter: a multiple of `BLOCK`; where a band begins of a whole one."""


@dataclass(slots=True, kw_only=True)
class Piece(_UpdatedTensors):
    """One parameter, or a slice of it, to be updated in place."""

    rule: ElementwiseRule

    @property
    def shape(self) -> tuple[int, ...]:
        """The slice's own: its rule looks at single elements."""
        return (self.weight.numel(),)


@dataclass(slots=True, kw_only=True)
class MatrixPiece(_UpdatedTensors):
    """One whole parameter to be updated in place."""

    rule: Adafactor
    shape: tuple[int, ...]
    """The parameter's."""
    stride: tuple[int, ...]
    """In elements: a dense weight may lie in another order than its shape says."""

    @property
    def is_matrix(self) -> bool:
        """Whether its second moment is two vectors."""
        return len(self.shape) > 1


AnyPiece = Piece | MatrixPiece


@dataclass(slots=True, kw_only=True)
class Turn:
    """What changes from one update of the same parameters to the next, in the order of their pieces."""

    weights: list[int]
    """Addresses, as those of `gradients`."""
    gradients: list[int]
    rules: list[tuple[ElementwiseRule, int]]
    """With the number of the update."""
    keys: list[int]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Turn:
        """That of an update of these."""
        return cls(
            weights=[piece.weight.data_ptr() for piece in pieces],
            gradients=[piece.gradient.data_ptr() for piece in pieces],
            rules=[(piece.rule, piece.step) for piece in pieces],
            keys=[piece.key for piece in pieces],
        )


class Repeatable(Protocol):
    """An update as a kernel has it, to be made again: what it was told of formats, sizes and states is not looked at again."""

    def fits(self, turn: Turn) -> bool:
        """Whether these addresses are such as the kernel was chosen for."""

    def run(self, turn: Turn, gradient_factor: float | Tensor) -> None:
        """Make it; the caller counts the weights as written."""


MOST_STATES = 3
"""How many states a rule may keep."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What weights and gradients may be."""


def addresses_of(piece: AnyPiece) -> list[int]:
    """Where a kernel finds the piece's tensors, 0 for those that it lacks.

    In this order: weight, gradient, what the rounding keeps, `MOST_STATES` states, and as many scales.
    """
    names = names_of_states(piece.rule, piece.shape)
    gap = [None] * (MOST_STATES - len(names))
    states = [piece.state[name] for name in names]
    scales = [piece.state.get(f"{name}{SCALE}") for name in names]
    kept = piece.master if piece.remainder is None else piece.remainder
    tensors = (piece.weight, piece.gradient, kept, *states, *gap, *scales, *gap)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def check_pieces(
    pieces: Sequence[AnyPiece], *, rounding: Rounding, moments: Moments = Moments.FP32, device: torch.device
) -> None:
    """Look at types, sizes and places; nothing is read. What is not caught would be written where it must not.

    Raises:
        BadPieceError: A tensor is missing, of another type or size, not flat and dense, or elsewhere; or a rule that looks
            at whole parameters has a part of one.
        ConfigError: The rounding is not for weights of this type.
    """
    numerics = Numerics(rounding=rounding, moments=moments)
    for index, piece in enumerate(pieces):
        if piece.weight.dtype not in FLOATS or piece.gradient.dtype not in FLOATS:
            raise BadPieceError(
                f"piece {index} has a weight of {piece.weight.dtype} and a gradient of {piece.gradient.dtype}; updates "
                "take fp32, bf16 and fp16"
            )
        if piece.step < 1:
            raise BadPieceError(f"piece {index} is at step {piece.step}; the first step is 1")
        _check_part(piece, index)
        for what, tensor, dtype, num_elements in _needed(piece, rounding_for(piece.weight, numerics), moments):
            if tensor is None:
                raise BadPieceError(
                    f"the {what} of piece {index} is missing; its format needs {num_elements} elements of {dtype}"
                )
            if tensor.dtype is not dtype or tensor.shape != (num_elements,) or not tensor.is_contiguous():
                raise BadPieceError(
                    f"the {what} of piece {index} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride "
                    f"{tensor.stride()}; it must be flat and dense, with {num_elements} elements of {dtype}"
                )
            if tensor.device != device:
                raise BadPieceError(
                    f"the {what} of piece {index} is on {tensor.device}, and the update on {device}; bring them together"
                )


def _check_part(piece: AnyPiece, index: int) -> None:
    if isinstance(piece, Piece):
        if piece.first_element % BLOCK or piece.first_element < 0:
            raise BadPieceError(f"piece {index} begins at element {piece.first_element}; cut at multiples of {BLOCK}")
    elif piece.first_element or piece.weight.numel() != math.prod(piece.shape):
        raise BadPieceError(
            f"piece {index} begins at element {piece.first_element} and has {piece.weight.numel()} of the "
            f"{math.prod(piece.shape)} elements of its shape {piece.shape}; {type(piece.rule).__name__} looks at whole "
            "parameters: do not cut them"
        )


def _needed(
    piece: AnyPiece, rounding: Rounding, moments: Moments
) -> Iterator[tuple[str, Tensor | None, torch.dtype, int]]:
    """Every tensor of a piece: what it is, itself, its type and its number of elements."""
    num_elements = piece.weight.numel()
    yield "weight", piece.weight, piece.weight.dtype, num_elements
    yield "gradient", piece.gradient, piece.gradient.dtype, num_elements
    if rounding is Rounding.EXACT:
        yield "remainder", piece.remainder, torch.int16, num_elements
    if rounding is Rounding.MASTER:
        yield "master", piece.master, torch.float32, num_elements
    for name, (dtype, count) in state_tensors(piece.rule, piece.shape, moments).items():
        yield name, piece.state.get(name), dtype, count
