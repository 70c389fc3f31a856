"""What stands in the place of logits that are never made: it takes the steps of a model's own code up to its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import LogitsNotMadeError

TakeLoss = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]
"""Given hidden states (tokens, features), targets and what `LossSettings` calls its fields: the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What was done to the logits so far: `after * tanh(before * logits)`, or `before * logits` without a tanh."""

    before: float = 1.0
    after: float | None = None

    def times(self, factor: float) -> Shaping:
        """The shaping after one more multiplication."""
        if self.after is None:
            return Shaping(before=self.before * factor)
        return Shaping(before=self.before, after=self.after * factor)

    def settings(self) -> dict[str, Any]:
        """As the scale and the cap of a chunked loss: `cap * tanh(scale * logits / cap)`."""
        if self.after is None:
            return {} if self.before == 1.0 else {"logit_scale": self.before}
        return {"logit_scale": self.before * self.after, "softcap": self.after}


class DeferredLogits:
    """Logits that are not there. They can be scaled, capped, cast, sliced along tokens, flattened, and given to
    `F.cross_entropy`, which is computed chunk by chunk from the hidden states. Anything else raises and says why.

    Not a tensor, so that nothing mistakes it for one.
    """

    def __init__(
        self, hidden: Tensor, vocab_size: int, dtype: torch.dtype, take_loss: TakeLoss, made: list[DeferredLogits]
    ) -> None:
        self._hidden: Tensor | None = hidden
        self._shaping = Shaping()
        self._take_loss: TakeLoss | None = take_loss
        self._made = made
        self.shape = torch.Size((*hidden.shape[:-1], vocab_size))
        self.dtype = dtype
        self.device = hidden.device
        made.append(self)

    def release(self) -> None:
        """Let go of the hidden states: only shape, dtype and device remain."""
        self._hidden = self._take_loss = None
        self._made = []

    def _like(
        self, hidden: Tensor | None = None, *, dtype: torch.dtype | None = None, shaping: Shaping | None = None
    ) -> DeferredLogits:
        if self._hidden is None or self._take_loss is None:
            self._refuse("use them")
        source = self._hidden if hidden is None else hidden
        other = DeferredLogits(source, self.shape[-1], dtype or self.dtype, self._take_loss, self._made)
        other._shaping = shaping or self._shaping
        return other

    def _refuse(self, what: str) -> NoReturn:
        raise LogitsNotMadeError(
            f"cannot {what}: the logits {tuple(self.shape)} of this training step were never made, because the loss is "
            "computed chunk by chunk. For logits call the model without labels or in eval mode, or undo the chunked head "
            "with its remove()"
        )

    # What a model's code does between its head and its loss

    def __mul__(self, factor: object) -> DeferredLogits:
        if isinstance(factor, Tensor) or not isinstance(factor, int | float):
            self._refuse(f"multiply them by a {type(factor).__name__}")
        return self._like(shaping=self._shaping.times(float(factor)))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> DeferredLogits:
        if isinstance(divisor, Tensor) or not isinstance(divisor, int | float):
            self._refuse(f"divide them by a {type(divisor).__name__}")
        return self._like(shaping=self._shaping.times(1.0 / float(divisor)))

    def tanh(self) -> DeferredLogits:
        """The logits capped, which can be done once."""
        if self._shaping.after is not None:
            self._refuse("take a second tanh of them")
        return self._like(shaping=Shaping(before=self._shaping.before, after=1.0))

    def float(self) -> DeferredLogits:
        """The logits in fp32."""
        return self._like(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """In another dtype. On another device they stay where the hidden states are, as the loss will."""
        probe = torch.empty(0, dtype=self.dtype, device="meta")
        wanted = [*args, *kwargs.values()]
        found = [probe.to(value).dtype for value in wanted if isinstance(value, torch.dtype)]
        found += [value.dtype for value in wanted if isinstance(value, Tensor | DeferredLogits)]
        return self._like(dtype=found[0] if found else None)

    def contiguous(self) -> DeferredLogits:
        """The same logits."""
        return self._like()

    def view(self, *shape: Any) -> DeferredLogits:
        """Other dimensions for the tokens; the vocabulary stays the last one."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if self._hidden is None:
            self._refuse("use them")
        leading = self.shape[:-1]
        vocab_size = self.shape[-1]
        num_tokens = math.prod(leading)
        known = math.prod(size for size in sizes if size != -1)
        last = sizes[-1] if sizes[-1] != -1 else (num_tokens * vocab_size) // max(1, known)
        if last != vocab_size:
            self._refuse(f"view them as {tuple(sizes)}, which divides the {vocab_size} logits of a token")
        return self._like(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))

    reshape = view

    def __getitem__(self, key: Any) -> DeferredLogits:
        if self._hidden is None:
            self._refuse("index them")
        parts = key if isinstance(key, tuple) else (key,)
        num_dims = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts)
        if any(part is Ellipsis for part in parts):
            keeps_vocabulary = parts[-1] == slice(None) and parts[-1] is not Ellipsis
        else:
            keeps_vocabulary = num_dims < len(self.shape) or (num_dims == len(self.shape) and parts[-1] == slice(None))
        if not keeps_vocabulary or any(part is None for part in parts):
            self._refuse(f"index them along the vocabulary with {key}")
        return self._like(self._hidden[key])

    # What would need their values

    def _refuse_arithmetic(self, *others: object) -> NoReturn:
        self._refuse("compute or compare with them" if others else "compute with them")

    __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse_arithmetic
    __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse_arithmetic
    __and__ = __or__ = __xor__ = __invert__ = __neg__ = __pos__ = __abs__ = _refuse_arithmetic
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_arithmetic
    __bool__ = __int__ = __float__ = _refuse_arithmetic
    __hash__ = object.__hash__

    def __setitem__(self, key: object, value: object) -> NoReturn:
        self._refuse("write to them")

    # What a reader may ask of them

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, never made: the loss is chunked)"

    def __getattr__(self, name: str) -> NoReturn:
        # Copying and pickling look for names before there is anything to tell about.
        if name.startswith("_") or name == "shape":
            raise AttributeError(name)
        self._refuse(f"read .{name} of them")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls instead of its functions."""
        given = kwargs or {}
        if function is F.cross_entropy:
            return _cross_entropy(*args, **given)
        logits = next(_logits_in((args, given)))
        if function in (torch.tanh, F.tanh) and args and args[0] is logits:
            return logits.tanh()
        return logits._refuse(f"call {getattr(function, '__name__', function)} on them")


def _logits_in(value: object) -> Iterator[DeferredLogits]:
    """Every one, in nested lists, tuples and dictionaries."""
    if isinstance(value, DeferredLogits):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _logits_in(entry)


def _cross_entropy(
    input: DeferredLogits,  # noqa: A002  torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy`, by its own signature."""
    logits = input
    if weight is not None or size_average is not None or reduce is not None:
        logits._refuse("weigh their classes in a cross entropy, or use its size_average or reduce")
    if target.is_floating_point():
        logits._refuse("compare them with probabilities")
    if logits._hidden is None or logits._take_loss is None:
        logits._refuse("take a loss of them")
    if target.shape != logits.shape[:-1]:
        logits._refuse(f"take a loss of them with targets {tuple(target.shape)}")
    settings: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        **logits._shaping.settings(),
    }
    device = logits.device.type
    loss = logits._take_loss(logits._hidden, target, settings)
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    # torch gives the loss of bf16 logits in bf16, but for autocast, which computes it in fp32.
    return loss if is_autocast else loss.to(logits.dtype)
