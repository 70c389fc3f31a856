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

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide import compat
from lowtide.activations.losses.settings import LossSettings, choose_chunk_tokens
from lowtide.errors import ChunkedBackwardError

_Wanted = tuple[bool, ...]
"""For hidden states, weight and bias: whether its gradient is to be made."""
LossKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, LossSettings], None]
"""Given logits, targets, the gradient of each token's loss (None: the logits stay as they are), and where the losses go.

All are contiguous. Logits become their gradient in place, in their own dtype: no copy of them is made.
"""
SLICE_NUMEL = 1 << 22
"""How much of a large buffer is worked on at a time where an operator would need a temporary of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call, apart from its tensors."""

    settings: LossSettings
    dtype: torch.dtype
    """The logits' dtype: what a linear layer would give, autocast considered."""
    makes_graph: bool


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of hidden states, weight and bias; None for those that are not wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def run_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, job: Job) -> Tensor:
    """The loss as a node of the graph."""
    loss: Tensor = ChunkedLoss.apply(hidden, weight, bias, target, job)  # type: ignore[no-untyped-call]  # torch's
    return loss


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
            row_scale = torch.ones(len(hidden), dtype=_loss_dtype(job.dtype), device=hidden.device)
        losses, gradients = _run_chunks(hidden, weight, bias, target, job, row_scale, ctx.wanted)
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
            _, made = _run_chunks(hidden, weight, bias, target, ctx.job, gradient, ctx.wanted)
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
                given.append(_scaled(buffer, factor, dtype, may_overwrite=is_ours))
        return (*given, None, None)


def _run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    job: Job,
    row_scale: Tensor | None,
    wanted: _Wanted,
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
    settings, wide = job.settings, _loss_dtype(job.dtype)
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
        if gradients.hidden is not None and gradients.hidden.dtype == logits.dtype:
            torch.mm(logits, weight_now, out=gradients.hidden[start:stop])
        elif gradients.hidden is not None:
            gradients.hidden[start:stop].copy_(torch.mm(logits, weight_now))
        if gradients.weight is not None:
            accumulate_product(gradients.weight, logits, rows, is_first=start == 0)
        if gradients.bias is not None:
            gradients.bias.add_(logits.sum(0, dtype=gradients.bias.dtype))
    return losses.masked_fill_(~is_counted, 0.0), gradients


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, wanted: _Wanted) -> Gradients:
    """Buffers for the gradients that are wanted. Not zeros, apart from the bias: the first chunk writes all of them."""
    make = torch.empty if len(hidden) else torch.zeros
    wide = _loss_dtype(job.dtype)
    sums_wide = job.settings.accumulation == "float32" or job.dtype == torch.float16
    sum_dtype = wide if sums_wide else weight.dtype
    return Gradients(
        hidden=make(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wanted[0] else None,
        weight=make(weight.shape, dtype=sum_dtype, device=weight.device) if wanted[1] else None,
        bias=torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None,
    )


def _loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses of such logits are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def find_kernel(hidden: Tensor, dtype: torch.dtype) -> LossKernel | None:
    """The kernel for logits of a dtype from these hidden states; None where torch's operators do the work.

    On a GPU without Triton they do, and a warning says so once.
    """
    if dtype == torch.float64 or hidden.device.type in ("cpu", "meta"):
        return None
    if compat.has_no_values(hidden):
        return _predicted
    if hidden.device.type != "cuda":
        return None
    if not compat.has_triton():
        _warn_once()
        return None
    from lowtide.activations.losses import triton

    return triton.loss_in_place


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "the chunked loss runs through torch's operators, slower than the Triton kernel and, for logits of 16 bits, with an "
        "fp32 copy of a chunk's: the package 'triton' is not installed; run: pip install triton",
        RuntimeWarning,
        stacklevel=3,
    )


def _predicted(
    logits: Tensor, target: Tensor, row_scale: Tensor | None, losses: Tensor, settings: LossSettings
) -> None:
    """What the kernel allocates, where a step is predicted for a GPU: nothing. Everything else is there already."""


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


def accumulate_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """`total` becomes `left.T @ right`, and grows by that after the first time.

    Where `total` is fp32 and the factors are not, products are summed in fp32 and never rounded to their dtype.
    """
    if total.dtype != left.dtype and compat.has_no_values(total):
        total.zero_()  # a prediction for a GPU, whose product needs no temporary: whatever is written has no value
        return
    transposed = left.t()
    if total.dtype == left.dtype:
        if is_first:
            torch.mm(transposed, right, out=total)
        else:
            total.addmm_(transposed, right)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        if is_first:
            torch.mm(transposed, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, transposed, right, out_dtype=torch.float32, out=total)
    else:
        # Processors have no product of bf16 into fp32: the factors are widened, a slice of the vocabulary at a time.
        wide = right.to(total.dtype)
        num_rows = max(1, SLICE_NUMEL // max(1, left.shape[0]))
        for start in range(0, total.shape[0], num_rows):
            part = total[start : start + num_rows]
            factor = transposed[start : start + num_rows].to(total.dtype)
            if is_first:
                torch.mm(factor, wide, out=part)
            else:
                part.addmm_(factor, wide)


def _scaled(buffer: Tensor, factor: Tensor, dtype: torch.dtype, *, may_overwrite: bool) -> Tensor:
    """`buffer * factor` in a dtype, multiplied in the wider of both dtypes and rounded once.

    A factor without dimensions would be rounded to the buffer's dtype first: 1/3 in bf16 makes every gradient wrong by
    0.2%. So it has one dimension here.
    """
    result = buffer if may_overwrite and buffer.dtype == dtype else torch.empty_like(buffer, dtype=dtype)
    factor = factor.reshape(1)
    if buffer.dtype == factor.dtype == dtype or buffer.device.type == "cuda":
        return torch.mul(buffer, factor, out=result)
    # The kernels of processors convert through temporaries of the whole size.
    source, target = buffer.view(-1), result.view(-1)
    for start in range(0, source.numel(), SLICE_NUMEL):
        torch.mul(source[start : start + SLICE_NUMEL], factor, out=target[start : start + SLICE_NUMEL])
    return result
