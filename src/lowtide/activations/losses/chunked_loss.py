"""Linear layer and cross entropy in one, chunk of tokens by chunk, so that the logits of all tokens never exist.

Note [Why "auto" is not torch's]
torch's knows no z-loss, smoothing, cap or scale, gives bf16 losses for bf16 hidden states, and is not there before 2.13.
On two processor cores in fp32, forward and backward of 512 tokens, 128 features and 8000 entries take 0.51 of the
unchunked time by Lowtide's and 1.21 by torch's; of 2048 tokens, 256 features and 16000 entries 0.29 and 1.11. torch's
chunks are smaller there, 18 MiB instead of 31 MiB of scratch: `chunk_tokens` sets both.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import compat
from lowtide.activations.losses.chunks import Job, run_loss
from lowtide.activations.losses.settings import Accumulation, Implementation, LossSettings, Reduction
from lowtide.errors import ConfigError, TargetRangeError


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    logit_scale: float | None = None,
    chunk_tokens: int | None = None,
    accumulation: Accumulation = "weight",
    implementation: Implementation = "auto",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), target)`, without the logits of all tokens at once.

    The gradients are made in the forward, while a chunk's logits are there, so a backward costs nothing and the forward
    as much as both. What is held beyond inputs, outputs and their gradients is the scratch of one chunk. Logits are in
    the dtype of the model (autocast is honoured), losses in fp32. Gradients that nobody asked for are not made.

    Args:
        hidden: (..., features)
        weight: (vocabulary, features), such as a head's.
        target: As `hidden` without its last dimension: indices into the vocabulary, as int64 or int32.
        bias: (vocabulary,)
        ignore_index: Tokens with this target count for nothing. All of them ignored: "mean" is nan, as in torch.
        label_smoothing: As in torch.
        z_loss: This times the square of the log-sum-exp is added to each token's loss, which keeps logits small.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none". For "none" the chunks are computed a
            second time in the backward.
        softcap: Logits become `softcap * tanh(logits / softcap)`, after `logit_scale`.
        logit_scale: Logits are multiplied by this.
        chunk_tokens: How many tokens have logits at one time. Chosen where not given.
        accumulation: "weight" sums a bf16 weight's gradient in bf16, each chunk's part in fp32; "float32" sums the
            parts in fp32 too, for 4 more bytes per weight.
        implementation: "torch" is torch 2.13's own chunked function. "auto" is Lowtide's, on every version.

    Raises:
        ConfigError: A setting is out of range, the shapes do not fit, or the targets are of another type.
        TargetRangeError: A target is neither in the vocabulary nor `ignore_index`; also an IndexError. On a GPU it is
            an assertion on the device, as in torch, because reading the answer would stop the queue.

    Example:
        >>> hidden, weight = torch.zeros(6, 4), torch.zeros(8, 4)
        >>> round(linear_cross_entropy(hidden, weight, torch.arange(6), chunk_tokens=2).item(), 3)  # log(8)
        2.079
    """
    settings = LossSettings(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_tokens=chunk_tokens,
        accumulation=accumulation,
        implementation=implementation,
    )
    return chunked_loss(hidden, weight, target, bias, settings)


def chunked_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, settings: LossSettings) -> Tensor:
    """`linear_cross_entropy` with its settings in one piece."""
    _check_shapes(hidden, weight, target, bias)
    flat_hidden, flat_target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    check_target(flat_target, weight.shape[0], settings.ignore_index)
    if settings.implementation == "torch":
        loss = _torch_loss(flat_hidden, weight, flat_target, bias, settings)
    else:
        dtype = _autocast_dtype(hidden)
        job = Job(settings=settings, dtype=dtype or hidden.dtype, makes_graph=torch.is_grad_enabled())
        with contextlib.nullcontext() if dtype is None else torch.autocast(hidden.device.type, enabled=False):
            loss = run_loss(flat_hidden, weight, bias, flat_target, job)
    return loss.reshape(target.shape) if settings.reduction == "none" else loss


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What autocast would compute a linear layer in; None where it leaves it alone."""
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return None if hidden.dtype == torch.float64 else torch.get_autocast_dtype(device)


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    fits = (
        weight.dim() == 2
        and hidden.dim() >= 1
        and hidden.shape[-1] == weight.shape[1]
        and hidden.shape[:-1] == target.shape
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)}"
            f"{'' if bias is None else f' and bias {tuple(bias.shape)}'} do not belong together; give hidden "
            "(..., features), weight (vocabulary, features), target (...) and bias (vocabulary,)"
        )
    if _autocast_dtype(hidden) is None and hidden.dtype != weight.dtype:
        raise ConfigError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; cast one of them, or use torch.autocast"
        )


def check_target(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Refuse targets of other types, and those neither in the vocabulary nor ignored: on a GPU it is the device that fails."""
    # In a narrower type the comparisons would wrap: an ignore_index of -100 is 156 in uint8, which is a byte like any other.
    if target.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"target is {target.dtype}; give indices into the vocabulary, as torch.long", key="target")
    if compat.has_no_values(target):
        return
    is_wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if target.device.type != "cpu":
        compat.assert_on_device(~is_wrong.any(), "a target is out of the range of the vocabulary")
        return
    if bool(is_wrong.any()):
        wrong = target[is_wrong]
        raise TargetRangeError(
            f"{len(wrong)} of {len(target)} targets are out of range: the first is {int(wrong[0])}, and the vocabulary "
            f"has {vocab_size} entries; give indices from 0 to {vocab_size - 1}, or ignore_index={ignore_index}"
        )


class ChunkedHead(nn.Linear):
    """A linear layer that gives the loss when it is called with targets, and logits without: `head(hidden, target)`.

    Its parameters are used inside its own call, so that a session brings them there and back; its `state_dict` is that
    of a linear layer.

    Example:
        >>> head = ChunkedHead.of(nn.Linear(4, 8), settings=LossSettings(z_loss=1e-4))
        >>> head(torch.randn(2, 3, 4)).shape, head(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)).shape
        (torch.Size([2, 3, 8]), torch.Size([]))
    """

    settings = LossSettings()

    @classmethod
    def of(cls, linear: nn.Linear, *, settings: LossSettings | None = None) -> ChunkedHead:
        """A head over the same parameters: tied weights stay tied."""
        with torch.device("meta"):
            head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        head.weight, head.bias = linear.weight, linear.bias
        head.settings = settings or LossSettings()
        return head.train(linear.training)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss for a target; without one the logits, neither scaled nor capped."""
        if target is None:
            return super().forward(hidden)
        return chunked_loss(hidden, self.weight, target, self.bias, self.settings)


def _torch_loss(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, settings: LossSettings) -> Tensor:
    """The loss by `torch.nn.functional.linear_cross_entropy`, in the dtype of the hidden states.

    Raises:
        ConfigError: This torch has no such function, or it does not know one of the settings.
    """
    function: Any = getattr(F, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    reasons = [
        f"{key}={getattr(settings, key)!r}"
        for key, plain in (("label_smoothing", 0.0), ("z_loss", 0.0), ("softcap", None), ("logit_scale", None))
        if getattr(settings, key) != plain
    ]
    if function is None or options is None:
        reasons = [f"torch {torch.__version__}, which does not have it"]
    if reasons:
        raise ConfigError(
            f'implementation is "torch", whose chunked function cannot be used with {", ".join(reasons)}; '
            'leave implementation at "auto"',
            key="implementation",
        )
    policy = "accurate" if settings.accumulation == "float32" else "auto"
    loss: Tensor = function(
        hidden,
        weight,
        target,
        linear_bias=bias,
        reduction=settings.reduction,
        ignore_index=settings.ignore_index,
        options=options(batch_chunk_size=settings.chunk_tokens, acc_policy=policy),
    )
    return loss
