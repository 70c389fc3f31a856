"""Outputs whose shape depends on the values of an argument: lengths of sequences, which come with the batch.

Unlike those of `shapes`, these functions take the ghosts themselves, so that they can ask for values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.errors import ValueReadError
from lowtide.tracing.ghost.tensor import Ghost

aten = torch.ops.aten
META = torch.device("meta")


def numbers(values: Any) -> list[int] | None:
    """Lengths given as a tensor or a list; None where they are not known."""
    if isinstance(values, Ghost):
        known = values.value()
        if known is None:
            return None
        values = known.get()
    return [int(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def ctc(log_probs: Tensor, targets: Tensor, input_lengths: Any, lengths: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Torch's own CUDA kernel (`LossCTC.cu`): the loss of each sequence, and the table of forward variables.

    The table has a place for each label of the longest target, with blanks around it. Where the lengths are not known it is
    as long as it could be. cuDNN's kernel, which torch prefers for int32 targets on the host, is not modelled.
    """
    steps, batch = log_probs.shape[:2]
    known = numbers(lengths)
    longest = int(targets.shape[-1]) if known is None else max(known, default=0)
    return (
        torch.empty(batch, dtype=log_probs.dtype, device=META),
        torch.empty(batch, steps, 2 * longest + 1, dtype=log_probs.dtype, device=META),
    )


def ctc_backward(grad: Tensor, log_probs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The gradient; a second table beside it is scratch (see `costs`)."""
    return torch.empty(log_probs.shape, dtype=log_probs.dtype, device=META)


def pack_padded(inputs: Ghost, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """A padded batch with the padding taken out, and how many sequences still run at each step: the latter on the host."""
    known = numbers(lengths)
    if known is None:
        raise ValueReadError(
            "pack_padded_sequence needs the lengths of the sequences, and they depend on weights or chance. Give them "
            "as part of the batch, or use lowtide.observe on a machine with a GPU.",
            op="aten._pack_padded_sequence",
        )
    with compat.without_modes():
        out: tuple[Tensor, Tensor] = aten._pack_padded_sequence(inputs.inner, torch.tensor(known), batch_first)
    return out


VALUE_SHAPES: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: ctc,
    aten._ctc_loss.Tensor: ctc,
    aten._ctc_loss_backward.default: ctc_backward,
    aten._ctc_loss_backward.Tensor: ctc_backward,
    aten._pack_padded_sequence.default: pack_padded,
}
