"""The loss and the gradient of a chunk's logits in one Triton kernel: logits are read twice and written once.

One program per token. torch's operators pass over a chunk nine times, and need a copy of it in fp32.
"""
# Triton has no types, and is not installed where there is no GPU.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, misc, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lowtide.activations.losses.settings import LossSettings

BLOCK = 4096
"""Logits that a program has in registers at one time."""
NUM_WARPS = 8


@triton.jit
def _shape(raw, scale, cap, HAS_CAP: tl.constexpr):  # noqa: N803  Triton's way to write constants
    logits = raw.to(tl.float32) * scale
    if HAS_CAP:
        logits = cap * libdevice.tanh(logits / cap)
    return logits


@triton.jit
def _loss_kernel(
    logits_pointer,
    row_stride,
    target_pointer,
    row_scale_pointer,
    loss_pointer,
    vocab_size,
    ignore_index,
    scale,
    cap,
    smoothing,
    z_loss,
    HAS_CAP: tl.constexpr,  # noqa: N803
    HAS_GRADIENT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    logits_pointer += row * row_stride
    target = tl.load(target_pointer + row)
    columns = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(loss_pointer + row, 0.0)
        if HAS_GRADIENT:
            for start in range(0, vocab_size, BLOCK):
                zeros = tl.zeros([BLOCK], dtype=logits_pointer.dtype.element_ty)
                tl.store(logits_pointer + start + columns, zeros, mask=start + columns < vocab_size)
        return
    picked = _shape(tl.load(logits_pointer + target), scale, cap, HAS_CAP)
    # The greatest logit and the sum of exponentials so far, per lane; lanes are brought together at the end.
    top = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    plain_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + columns < vocab_size
        raw = tl.load(logits_pointer + start + columns, mask=inside, other=0.0)
        logits = _shape(raw, scale, cap, HAS_CAP)
        plain_sum += tl.where(inside, logits, 0.0)
        new_top = tl.where(inside, tl.maximum(top, logits), top)
        # A lane that has seen nothing yet has no greatest logit: infinity minus infinity is no number.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.where(inside, tl.exp(logits - shift), 0.0)
        top = new_top
    row_top = tl.max(top, axis=0)
    log_total = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), axis=0))
    mean_logit = tl.sum(plain_sum, axis=0) / vocab_size
    loss = log_total - (1.0 - smoothing) * picked - smoothing * mean_logit + z_loss * log_total * log_total
    tl.store(loss_pointer + row, loss)
    if HAS_GRADIENT:
        gradient_scale = tl.load(row_scale_pointer + row).to(tl.float32) * scale
        softmax_scale = 1.0 + 2.0 * z_loss * log_total
        # Every lane has read the target's logit before any lane writes.
        tl.debug_barrier()
        for start in range(0, vocab_size, BLOCK):
            inside = start + columns < vocab_size
            raw = tl.load(logits_pointer + start + columns, mask=inside, other=0.0)
            logits = _shape(raw, scale, cap, HAS_CAP)
            gradient = tl.exp(logits - log_total) * softmax_scale - smoothing / vocab_size
            gradient -= tl.where(start + columns == target, 1.0 - smoothing, 0.0)
            if HAS_CAP:
                gradient *= 1.0 - (logits / cap) * (logits / cap)
            gradient *= gradient_scale
            tl.store(logits_pointer + start + columns, gradient.to(logits_pointer.dtype.element_ty), mask=inside)


def loss_in_place(
    logits: Tensor, target: Tensor, row_scale: Tensor | None, losses: Tensor, settings: LossSettings
) -> None:
    """Losses of the tokens into `losses`; the logits become their gradient where `row_scale` is given.

    Computed in fp32. Ignored tokens are passed over. Targets out of range must have been refused before.
    """
    num_tokens, vocab_size = logits.shape
    cap = settings.softcap
    _loss_kernel[(num_tokens,)](
        logits,
        logits.stride(0),
        target,
        losses if row_scale is None else row_scale,
        losses,
        vocab_size,
        settings.ignore_index,
        1.0 if settings.logit_scale is None else settings.logit_scale,
        1.0 if cap is None else cap,
        settings.label_smoothing,
        settings.z_loss,
        HAS_CAP=cap is not None,
        HAS_GRADIENT=row_scale is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
