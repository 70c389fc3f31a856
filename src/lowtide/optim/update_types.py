"""What an update is made of, as plain data: the rule, how it rounds, how its state is stored, and the pieces it works on.

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

Note [Adafactor in two vectors]
A tensor with two dimensions or more is a matrix, of rows as long as its last dimension; its second moment is kept as the
sums of its rows and of its columns. Step t takes the gradient g, in fp32 and with its factor, and `s = g * g + eps`:

    beta2 = min(1 - t ** decay_rate, max_beta2)
    row  <- beta2 * row + (1 - beta2) * (sums of s over each row);    col likewise
    d     = g * (row ** -0.5 * col ** -0.5)                            the direction, up to a factor
    size  = sqrt(sum of row)                                           that factor
    step  = lr * size / max(1, size * sqrt(mean of d * d) / clip_threshold)
    weight <- weight * (1 - lr * weight_decay) - step * d

A vector or a number keeps its second moment whole, under `row`: there `d = g / sqrt(row)`, and `size` is 1. Nothing of the
weight's size is made: d is computed twice, from the gradient, and lands in the weight as the rounding says. The vectors
are fp32 whatever the weight is, and whatever format was chosen for moments: they are a thousandth of it.

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
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lowtide.errors import ConfigError, UnknownNameError

BLOCK = 128
"""Elements that share a scale in the 8-bit format."""
ROW = "row"
COLUMN = "col"
STATISTICS = frozenset({ROW, COLUMN})
"""States that are fp32 whatever format was chosen for moments; named as `lowtide.optim.Adafactor` names them."""


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
    seed: int = field(default=0)
    """Seeds stochastic rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam and AdamW as torch writes them."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_decoupled: bool = True
    """AdamW: decay multiplies the weight; else it is added to the gradient."""
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """SGD with momentum as torch writes it; the first step takes the gradient itself for the momentum."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled decay. The sign of zero is zero, that of a NaN is NaN."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """`lowtide.optim.Adafactor`; see Note [Adafactor in two vectors]."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-30
    decay_rate: float = -0.8
    max_beta2: float = 0.999
    clip_threshold: float = 1.0

    def beta2(self, step: int) -> float:
        """How much of the second moment stays in this step."""
        return min(1.0 - math.pow(step, self.decay_rate), self.max_beta2)


ElementwiseRule = Adam | Sgd | Lion
Rule = ElementwiseRule | Adafactor
"""What the kernels run."""
STATE_NAMES: dict[type, tuple[str, ...]] = {
    Adam: ("exp_avg", "exp_avg_sq"),
    Sgd: ("momentum_buffer",),
    Lion: ("exp_avg",),
}
"""As torch's optimizers call them; Adam with amsgrad has `max_exp_avg_sq` too, SGD without momentum has none."""
UNSIGNED = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
"""States that are never negative: second moments."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """One parameter, or a slice of it, to be updated in place. All tensors are flat, dense and of one device."""

    weight: torch.Tensor
    """fp32, bf16 or fp16."""
    gradient: torch.Tensor
    """fp32, bf16 or fp16; not changed."""
    state: dict[str, torch.Tensor]
    """By name. In 8 bits: int8 or, for `UNSIGNED` names, uint8; its scales are under `NAME_scale`, one for each block."""
    rule: ElementwiseRule
    step: int
    """The number of this update, from 1."""
    remainder: torch.Tensor | None = None
    """int16, with EXACT."""
    master: torch.Tensor | None = None
    """fp32, with MASTER."""
    key: int = 0
    """32 bits, with STOCHASTIC: another for each parameter and step; see `random_bits`."""
    first_element: int = 0
    """Where the slice begins in its parameter: a multiple of `BLOCK`."""


@dataclass(slots=True, kw_only=True)
class MatrixPiece:
    """One whole parameter to be updated in place. All tensors are flat, dense and of one device."""

    weight: torch.Tensor
    """fp32, bf16 or fp16; in the order of its memory."""
    gradient: torch.Tensor
    """fp32, bf16 or fp16, in the weight's order; not changed."""
    state: dict[str, torch.Tensor]
    """By name, fp32: of the sizes that `statistic_sizes` says."""
    rule: Adafactor
    step: int
    """The number of this update, from 1."""
    shape: tuple[int, ...]
    """The parameter's."""
    stride: tuple[int, ...]
    """In elements: a dense weight may lie in another order than its shape says."""
    remainder: torch.Tensor | None = None
    """int16, with EXACT; in the weight's order."""
    master: torch.Tensor | None = None
    """fp32, with MASTER; in the weight's order."""
    key: int = 0
    """32 bits, with STOCHASTIC: another for each parameter and step; see `random_bits`."""
    first_element: int = 0
    """Where a band of it begins; a whole parameter begins at 0."""

    @property
    def is_matrix(self) -> bool:
        """Whether its second moment is two vectors."""
        return len(self.shape) > 1


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


def rounding_for(weight: torch.Tensor, numerics: Numerics) -> Rounding:
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


def state_names(rule: ElementwiseRule) -> tuple[str, ...]:
    """The states that a rule keeps for each element."""
    if isinstance(rule, Sgd) and not rule.momentum:
        return ()
    more = ("max_exp_avg_sq",) if isinstance(rule, Adam) and rule.amsgrad else ()
    return STATE_NAMES[type(rule)] + more


def names_of_states(rule: Rule, shape: Sequence[int]) -> tuple[str, ...]:
    """The states that a rule keeps for a parameter of this shape."""
    return tuple(statistic_sizes(shape)) if isinstance(rule, Adafactor) else state_names(rule)


def stored_as(name: str, moments: Moments) -> Moments:
    """The format of a state, where `moments` was asked for."""
    return Moments.FP32 if name in STATISTICS else moments


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of two dimensions or more, as `lowtide.optim.Adafactor` sees it.

    Example:
        >>> matrix_shape((4, 3, 2, 5))
        (24, 5)
    """
    return math.prod(shape[:-1]), shape[-1]


def statistic_sizes(shape: Sequence[int]) -> dict[str, int]:
    """The states of a parameter of this shape, and how many numbers each has.

    Example:
        >>> statistic_sizes((2048, 5400)), statistic_sizes((7,)), statistic_sizes(())
        ({'row': 2048, 'col': 5400}, {'row': 7}, {'row': 1})
    """
    if len(shape) < 2:
        return {ROW: math.prod(shape)}
    rows, columns = matrix_shape(shape)
    return {ROW: rows, COLUMN: columns}


def kept_bytes(num_elements: int, dtype: torch.dtype, numerics: Numerics) -> int:
    """Bytes beside a weight that its rounding keeps: a remainder or a master."""
    if dtype is torch.float32:
        return 0
    return {Rounding.EXACT: 2, Rounding.MASTER: 4}.get(numerics.rounding, 0) * num_elements


def moment_bytes(num_elements: int, moments: Moments) -> int:
    """Bytes of one state with a number for each element."""
    if moments is Moments.INT8:
        return num_elements + 4 * -(-num_elements // BLOCK)
    return (4 if moments is Moments.FP32 else 2) * num_elements


def random_bits(key: int, index: int) -> int:
    """The 16 random bits for an element: the same on every device. A mixing function of 32 bits, as in murmur3.

    Example:
        >>> random_bits(1, 0) == random_bits(1, 0), random_bits(1, 0) == random_bits(2, 0)
        (True, False)
    """
    mask = 0xFFFFFFFF
    x = (index * 0x9E3779B9 + key) & mask
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & mask
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & mask
    x ^= x >> 16
    return x & 0xFFFF


def is_left_out(gradient_factor: float | torch.Tensor) -> bool:
    """Whether an update with this factor changes nothing: a NaN, by which gradients that are not finite are kept out.

    Waits for one that lies on a device.
    """
    if isinstance(gradient_factor, torch.Tensor):
        return bool(gradient_factor.isnan())
    return math.isnan(gradient_factor)
