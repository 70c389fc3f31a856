"""What a chunked loss computes and in which pieces: settings, and the choice of the chunk. Plain data, pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from lowtide.errors import ConfigError
from lowtide.units import MiB

Reduction = Literal["mean", "sum", "none"]
Accumulation = Literal["weight", "float32"]
Implementation = Literal["auto", "torch", "lowtide"]

SMALL_SCRATCH_BYTES = 32 * MiB
"""Scratch of this size is worth nothing to save: below it all tokens are one chunk."""
LARGEST_CHUNK_TOKENS = 2048
"""Matrix products gain nothing from more: on an H200, twice as many change the time of a head by less than 2%."""
SCRATCH_BYTES_PER_LOGIT = 0.4
"""Between the two, the scratch for each logit of the whole batch. Unchunked, a logit takes 10 bytes or more at the peak
(itself in bf16, its fp32 copy, the logarithm of its softmax): this is 4% of that."""
TOKEN_MULTIPLE = 128
"""Matrix products of a GPU work in tiles of so many rows: a chunk is a multiple, where it is that large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What is computed from logits and targets, and how. See `linear_cross_entropy`, which has the same settings."""

    ignore_index: int = -100
    """Tokens with this target count for nothing."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """This times the square of the logarithm of the sum of the exponentials is added to each token's loss."""
    reduction: Reduction = "mean"
    """"mean" is over the tokens that are not ignored."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)`, after `logit_scale`."""
    logit_scale: float | None = None
    """Logits are multiplied by this."""
    chunk_tokens: int | None = None
    """Tokens that have logits at one time; None: see `choose_chunk_tokens`."""
    accumulation: Accumulation = "weight"
    """The dtype in which the chunks' parts of the weight's gradient are summed, where the weight is bf16: its own, or
    fp32, which takes 4 more bytes per weight until the backward. Eight sums in bf16 make the gradient's error against
    fp64 1 to 5% larger than plain torch's, which rounds once; fp32 makes it no larger. fp16 is always summed in fp32: it
    would overflow."""
    implementation: Implementation = "auto"
    """"torch" is torch 2.13's own function, where it knows all the settings; "auto" is Lowtide's."""

    def __post_init__(self) -> None:
        for key in ("ignore_index", "chunk_tokens", "label_smoothing", "z_loss", "softcap", "logit_scale"):
            _require_number(key, getattr(self, key))
        for key, (fits, advice) in _RANGES.items():
            value = getattr(self, key)
            if value is not None and not fits(value):
                raise ConfigError(f"{key} is {value}; give {advice}", key=key)
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ConfigError(f"{key} is {getattr(self, key)!r}; choose one of {', '.join(choices)}", key=key)


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "label_smoothing": (lambda share: 0.0 <= share <= 1.0, "a number from 0 to 1"),
    "z_loss": (lambda factor: 0.0 <= factor < math.inf, "a finite number, 0 or more"),
    "softcap": (lambda cap: 0.0 < cap < math.inf, "a finite number above 0, or None for no cap"),
    "logit_scale": (lambda scale: -math.inf < scale < math.inf, "a finite number, or None for no scale"),
    "chunk_tokens": (lambda count: count >= 1, "1 or more, or None to have it chosen"),
}
_CHOICES = {
    "reduction": get_args(Reduction),
    "accumulation": get_args(Accumulation),
    "implementation": get_args(Implementation),
}


def _require_number(key: str, value: object) -> None:
    whole = key in ("ignore_index", "chunk_tokens")
    is_optional = key in ("chunk_tokens", "softcap", "logit_scale")
    if value is None and is_optional:
        return
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise ConfigError(
            f"{key} is {value!r}; give a {'whole number' if whole else 'number'}{' or None' if is_optional else ''}",
            key=key,
        )


def choose_chunk_tokens(num_tokens: int, vocab_size: int, bytes_per_logit: int) -> int:
    """How many tokens have logits at one time.

    All of them where that takes little; else a small share, but no more than matrix products need to run at full speed.

    Args:
        num_tokens: Those of the whole batch.
        vocab_size: How many logits a token has.
        bytes_per_logit: Scratch memory for one logit.

    Example:
        >>> choose_chunk_tokens(16384, 128256, 2), choose_chunk_tokens(100, 50257, 4)
        (2048, 100)
    """
    token_bytes = vocab_size * bytes_per_logit
    share_tokens = int(num_tokens * SCRATCH_BYTES_PER_LOGIT / bytes_per_logit)
    wanted = max(SMALL_SCRATCH_BYTES // token_bytes, min(share_tokens, LARGEST_CHUNK_TOKENS))
    if wanted >= num_tokens:
        return max(1, num_tokens)
    if wanted >= TOKEN_MULTIPLE:
        wanted -= wanted % TOKEN_MULTIPLE
    return max(1, wanted)
