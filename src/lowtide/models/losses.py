"""Next-token loss: the mean cross entropy of each token's prediction of the one after it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
"""Positions with this label count neither in the sum nor in the mean, as everywhere in torch and Hugging Face."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32 over the labels that are not ignored.

    The labels are shifted, not the logits: dropping the last position of the logits would copy the largest tensor of
    the step. Low-precision logits are upcast first, as Hugging Face does, because a sum over the vocabulary loses too
    much in bf16; that copy is one of the reasons for a peak at the loss.

    Args:
        logits: `[batch, length, vocab]`.
        labels: `[batch, length]`, the input ids themselves; the shift happens here.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_LABEL)
