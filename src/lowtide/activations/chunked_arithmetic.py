"""From a chunk's logits to its losses and the gradient of its logits, in place, by torch's own operators.

What a kernel does in one pass, and its reference: see `chunked_kernel`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.activations.chunked_settings import LossSettings


def loss_in_place(
    logits: Tensor, work: Tensor, target: Tensor, row_scale: Tensor | None, settings: LossSettings
) -> Tensor:
    """The loss of each token; the logits become their gradient where `row_scale` is given, and are garbage otherwise.

    Args:
        logits: (tokens, vocabulary), before scale and cap, in the dtype of the model.
        work: As large, in the dtype of the loss: `logits` itself where that is the same and nothing is capped.
        target: (tokens,) All in range: what stands for ignored ones does not matter, their scale is 0.
        row_scale: (tokens,) The gradient of each token's loss. None: no gradient is wanted.
        settings: What to compute.
    """
    vocab_size = logits.shape[1]
    if work is not logits:
        work.copy_(logits)
    scale = 1.0 if settings.logit_scale is None else settings.logit_scale
    if settings.softcap is not None:
        work.mul_(scale / settings.softcap).tanh_()
        if row_scale is not None:
            # What the gradient is multiplied by in the end. The raw logits are no longer needed, so it takes their place.
            torch.addcmul(work.new_ones(()), work, work, value=-1.0, out=logits)
        work.mul_(settings.softcap)
    elif scale != 1.0:
        work.mul_(scale)
    index = target[:, None]
    picked = work.gather(1, index)
    smoothing = settings.label_smoothing
    mean_logit = work.mean(1, keepdim=True) if smoothing else None
    top = work.amax(1, keepdim=True)
    # Not torch.logsumexp, which makes a copy of the whole chunk.
    work.sub_(top).exp_()
    total = work.sum(1, keepdim=True)
    log_total = top + total.log()
    loss = log_total - picked
    if mean_logit is not None:
        loss = loss.mul_(1.0 - smoothing).add_(log_total - mean_logit, alpha=smoothing)
    if settings.z_loss:
        loss = loss + settings.z_loss * log_total.square()
    if row_scale is not None:
        gradient_scale = (row_scale * scale)[:, None]
        work.mul_(gradient_scale * (1.0 + 2.0 * settings.z_loss * log_total) / total)
        # Not scatter_add_, which sums in any order on a GPU: deterministic algorithms refuse it.
        work.scatter_(1, index, work.gather(1, index) - (1.0 - smoothing) * gradient_scale)
        if smoothing:
            work.sub_(gradient_scale * (smoothing / vocab_size))
        if settings.softcap is not None:
            work.mul_(logits)
        if work is not logits:
            logits.copy_(work)
    return loss[:, 0]
