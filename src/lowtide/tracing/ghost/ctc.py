"""The CTC loss of torch's own CUDA kernel (`LossCTC.cu`), which has no shape function.

Its table of forward variables is as long as the longest target: a number it reads from `target_lengths`. cuDNN's kernel, which
torch prefers for int32 targets on the host, is not modelled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.tracing.ghost.tensor import Ghost

META = torch.device("meta")


def longest_target(targets: Tensor, lengths: Any) -> int:
    """The longest target of the batch; where the lengths are not known, the longest there could be."""
    known = lengths.value() if isinstance(lengths, Ghost) else None
    if known is not None:
        lengths = known.get()
    if isinstance(lengths, Ghost):
        return int(targets.shape[-1])  # padded: a row; concatenated: all of them
    values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    return max((int(value) for value in values), default=0)


def forward(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, lengths: Any, *_: Any, **__: Any
) -> tuple[Any, Any]:
    """The loss of each sequence, and the table: batch x time x (labels with blanks around them)."""
    steps, batch = log_probs.shape[:2]
    table = (batch, steps, 2 * longest_target(targets, lengths) + 1)
    return (
        torch.empty(batch, dtype=log_probs.dtype, device=META),
        torch.empty(table, dtype=log_probs.dtype, device=META),
    )


def backward(grad: Tensor, log_probs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The gradient; a second table beside it is scratch (see `costs`)."""
    return torch.empty(log_probs.shape, dtype=log_probs.dtype, device=META)


SHAPES: dict[Any, Any] = {
    torch.ops.aten._ctc_loss.default: forward,
    torch.ops.aten._ctc_loss.Tensor: forward,
    torch.ops.aten._ctc_loss_backward.default: backward,
    torch.ops.aten._ctc_loss_backward.Tensor: backward,
}
"""By operator; unlike those of `shapes` they take the ghosts themselves, because they ask for values."""
