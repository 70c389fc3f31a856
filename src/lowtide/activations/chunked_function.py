"""A linear layer and a cross entropy as one node of the graph, chunk of tokens by chunk: logits never exist for all.

Note [Gradients in the forward]
For "mean" and "sum" the gradients of hidden states and weight are made in the forward, while a chunk's logits are there,
for a loss that is the plain sum over the tokens. The backward multiplies them by what arrives, divided by the number of
tokens for "mean", in fp32 and rounded once. So fp16 needs no loss scale in the forward: the gradients of a sum are not
small, and the scale comes with what arrives. For "none" each token's gradient is known in the backward only: the chunks
are run again there.

Note [Who owns the gradients]
The node owns the two buffers from the forward on. A backward gives them away (autograd may make one of them a
parameter's `.grad`), multiplied in place. Where the graph is retained it gives copies, and the node keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.activations.chunked_arithmetic import loss_in_place
from lowtide.activations.chunked_kernel import find_kernel
from lowtide.activations.chunked_products import accumulate_product, multiply_into, scaled
from lowtide.activations.chunked_settings import LossSettings, choose_chunk_tokens
from lowtide.errors import ChunkedBackwardError

Wanted = tuple[bool, ...]
"""For hidden states, weight and bias: whether its gradient is to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call, apart from its tensors."""

    settings: LossSettings
    dtype: torch.dtype
    """Of the logits: what a linear layer would give, autocast considered."""
    makes_graph: bool


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of hidden states, weight and bias; None for those that nobody wants."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses of such logits are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    job: Job,
    row_scale: Tensor | None,
    wanted: Wanted,
) -> tuple[Tensor, Gradients]:
    """Each token's loss, 0 for ignored ones, and gradients.

    Args:
        hidden: (tokens, features)
        weight: (vocabulary, features)
        bias: (vocabulary,)
        target: (tokens,)
        job: What to compute.
        row_scale: (tokens,) The gradient of each token's loss; None makes no gradients.
        wanted: Which gradients to make.
    """
    settings, wide = job.settings, loss_dtype(job.dtype)
    num_tokens, vocab_size = hidden.shape[0], weight.shape[0]
    # The kernel reads targets one after the other, and labels may come as a column of a batch.
    target = target.contiguous()
    is_counted = target != settings.ignore_index
    # Index 0 stands for what is ignored; the gradient there is multiplied by 0.
    safe_target = torch.where(is_counted, target, 0)
    if row_scale is not None:
        row_scale = (row_scale * is_counted).contiguous()
    kernel = find_kernel(hidden, job.dtype)
    needs_work = kernel is None and (job.dtype != wide or (settings.softcap is not None and row_scale is not None))
    bytes_per_logit = job.dtype.itemsize + needs_work * wide.itemsize
    chunk_tokens = min(
        settings.chunk_tokens or choose_chunk_tokens(num_tokens, vocab_size, bytes_per_logit), max(1, num_tokens)
    )
    logits_buffer = hidden.new_empty(chunk_tokens, vocab_size, dtype=job.dtype)
    work_buffer = hidden.new_empty(chunk_tokens, vocab_size, dtype=wide) if needs_work else logits_buffer
    weight_now = weight.to(job.dtype)
    bias_now = None if bias is None else bias.to(job.dtype)
    gradients = _empty_gradients(hidden, weight, bias, job, wanted) if row_scale is not None else Gradients()
    losses = hidden.new_empty(num_tokens, dtype=wide)
    for start in range(0, num_tokens, chunk_tokens):
        stop = min(start + chunk_tokens, num_tokens)
        rows = hidden[start:stop].to(job.dtype)
        logits = logits_buffer[: stop - start]
        work = work_buffer[: stop - start] if needs_work else logits
        if bias_now is None:
            torch.mm(rows, weight_now.t(), out=logits)
        else:
            torch.addmm(bias_now, rows, weight_now.t(), out=logits)
        scale = None if row_scale is None else row_scale[start:stop]
        if kernel is None:
            losses[start:stop] = loss_in_place(logits, work, safe_target[start:stop], scale, settings)
        else:
            kernel(logits, target[start:stop], scale, losses[start:stop], settings)
        if gradients.hidden is not None:
            multiply_into(gradients.hidden[start:stop], logits, weight_now)
        if gradients.weight is not None:
            accumulate_product(gradients.weight, logits, rows, is_first=start == 0)
        if gradients.bias is not None:
            gradients.bias.add_(logits.sum(0, dtype=gradients.bias.dtype))
    return losses.masked_fill_(~is_counted, 0.0), gradients


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, wanted: Wanted) -> Gradients:
    """Buffers for the gradients that are wanted. Not zeros, apart from the bias: the first chunk writes all of them."""
    make = torch.empty if len(hidden) else torch.zeros
    wide = loss_dtype(job.dtype)
    sums_wide = job.settings.accumulation == "float32" or job.dtype == torch.float16
    sum_dtype = wide if sums_wide else weight.dtype
    return Gradients(
        hidden=make(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wanted[0] else None,
        weight=make(weight.shape, dtype=sum_dtype, device=weight.device) if wanted[1] else None,
        bias=torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None,
    )


class ChunkedLoss(torch.autograd.Function):
    """See Note [Gradients in the forward]. Its inputs are hidden states, weight, bias, target and a `Job`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, job: Job) -> Tensor:
        """The loss; and the gradients, for the backward."""
        ctx.job = job
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.wanted = tuple(ctx.needs_input_grad[:3]) if job.makes_graph else (False, False, False)
        reduction = job.settings.reduction
        row_scale = None
        if any(ctx.wanted) and reduction != "none":
            row_scale = torch.ones(len(hidden), dtype=loss_dtype(job.dtype), device=hidden.device)
        losses, gradients = run_chunks(hidden, weight, bias, target, job, row_scale, ctx.wanted)
        if reduction == "none":
            ctx.save_for_backward(hidden, weight, bias, target)
            return losses
        # Attributes, not saved tensors: hooks on those would carry the gradients of the weight to the host and back.
        ctx.gradients = gradients
        if reduction == "sum":
            ctx.num_counted = None
            return losses.sum()
        num_counted = (target != job.settings.ignore_index).sum()
        ctx.num_counted = num_counted
        return losses.sum() / num_counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs."""
        if torch.is_grad_enabled():
            raise ChunkedBackwardError(
                "create_graph=True goes through a chunked loss, whose gradients are made in the forward and have no graph "
                "of their own; use F.linear and F.cross_entropy where gradients of gradients are wanted"
            )
        if ctx.job.settings.reduction == "none":
            hidden, weight, bias, target = ctx.saved_tensors
            _, made = run_chunks(hidden, weight, bias, target, ctx.job, gradient, ctx.wanted)
            factor, is_ours = None, True
        else:
            made, is_ours = ctx.gradients, not compat.keeps_graph()
            if made is None:
                raise ChunkedBackwardError(
                    "the gradients of this chunked loss were given away by an earlier backward; call that one with "
                    "retain_graph=True to go through the graph a second time"
                )
            if is_ours:
                ctx.gradients = None
            # Where all tokens are ignored the gradients are 0, as they are in torch, though the loss is nan.
            factor = gradient if ctx.num_counted is None else gradient / ctx.num_counted.clamp(min=1)
        given = []
        for buffer, dtype in zip((made.hidden, made.weight, made.bias), ctx.dtypes, strict=True):
            if buffer is None or factor is None:
                given.append(buffer if buffer is None else buffer.to(dtype))
            else:
                given.append(scaled(buffer, factor, dtype, may_overwrite=is_ours))
        return (*given, None, None)


def run_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, job: Job) -> Tensor:
    """The loss as a node of the graph."""
    loss: Tensor = ChunkedLoss.apply(hidden, weight, bias, target, job)  # type: ignore[no-untyped-call]  # torch's
    return loss
