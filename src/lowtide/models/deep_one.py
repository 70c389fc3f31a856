"""Deep One: the 1.6 B decoder whose peak memory the "Peak Memory" experiment measured in eleven configurations.

It is reproduced op by op, since the published peaks are made of what each op keeps. Do not tidy the forwards: the order
of the products and the names that hold a tensor decide what is alive at the peak.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.activations.losses.chunked_loss import linear_cross_entropy
from lowtide.models.layers import IGNORED_LABEL, LayeredModel, LayerStack, ModelOutput


class NormKind(enum.StrEnum):
    """How RMSNorm runs, and so what it keeps for the backward."""

    SEPARATE = "separate"
    """One op after another in fp32, as torch 2.8 ran it: keeps the fp32 input and the fp32 normalised input."""
    FUSED = "fused"
    """`F.rms_norm`: with the kernel of torch 2.9 and later it keeps the input and one number per row."""


class AttentionKind(enum.StrEnum):
    """Which kernel attention may run."""

    EFFICIENT = "efficient"
    """The memory-efficient one, as in the experiment."""
    MATH = "math"
    """Matrix products and a softmax: the scores of all heads exist at once."""


class LossKind(enum.StrEnum):
    """How the loss comes from the last hidden states."""

    COPIED = "copied"
    """The loss as in the experiment, see `copied_logits_loss`."""
    CHUNKED = "chunked"
    """Head and cross entropy in one, chunk of tokens by chunk: logits never exist at once, losses are fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepOneConfig:
    """Sizes of a Deep One."""

    vocab_size: int
    context_length: int
    """Length every batch is padded to in the experiment; longer ones run."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the gated MLP."""
    num_heads: int
    pad_id: int = 1
    """Token whose embedding starts at zero and stays there."""
    norm: NormKind = NormKind.SEPARATE
    norm_eps: float = 1e-6
    attention: AttentionKind = AttentionKind.EFFICIENT
    loss: LossKind = LossKind.COPIED

    @property
    def alpha(self) -> float:
        """Weight of the residual before each norm (DeepNet, Wang et al. 2022, table in section 4.2, decoder only)."""
        return math.pow(2 * self.num_layers, 0.25)

    @property
    def beta(self) -> float:
        """Gain of the initial value, output and MLP matrices (same table)."""
        return math.pow(8 * self.num_layers, -0.25)


class RMSNorm(nn.Module):
    """RMSNorm whose ops can be taken apart, see NormKind."""

    def __init__(self, config: DeepOneConfig) -> None:
        super().__init__()
        self.kind = config.norm
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same, in the same dtype."""
        if self.kind is NormKind.FUSED:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        upcast = x.float()
        scale = upcast.pow(2).mean(dim=-1, keepdim=True).add_(self.eps).rsqrt()
        return (upcast * scale * self.weight).type_as(x)


class Attention(nn.Module):
    """Causal attention whose only sense of position is a bias that falls with distance, at a slope learned per head.

    ALiBi, Press et al. 2022. The mask is made anew in each layer and is as large as all heads' attention scores of one
    sequence.
    """

    def __init__(self, config: DeepOneConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.kind = config.attention
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.slopes = nn.Parameter(torch.empty(config.num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        batch, length, hidden = x.shape
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        bias = self._bias(length, query)
        # Pinned, as in the experiment. The CPU has no such kernel; there the math path stands in.
        backends = [SDPBackend.EFFICIENT_ATTENTION] if self.kind is AttentionKind.EFFICIENT else [SDPBackend.MATH]
        if x.device.type == "cpu" and self.kind is AttentionKind.EFFICIENT:
            backends.append(SDPBackend.MATH)
        with sdpa_kernel(backends):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)  # [batch, heads, length, head_size]

    def _bias(self, length: int, like: Tensor) -> Tensor:
        """`[heads, length, length]`: slope times (key - query), and minus infinity where the key comes later."""
        # In the activations' dtype on purpose: a bf16 arange is inexact beyond 256, and so it was in the experiment.
        positions = torch.arange(length, dtype=like.dtype, device=like.device)
        distance = positions[None, :] - positions[:, None]
        bias = distance * self.slopes.view(-1, 1, 1)
        later = torch.ones(length, length, dtype=torch.bool, device=like.device).triu_(1)
        return bias.masked_fill_(later, float("-inf"))


class MLP(nn.Module):
    """ReGLU: `down(up(x) * relu(gate(x)))`."""

    def __init__(self, config: DeepOneConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        gate = self.gate(x)
        up = self.up(x)
        x = up * F.relu(gate)
        out: Tensor = self.down(x)
        return out


class Block(nn.Module):
    """One post-norm layer: `norm(alpha * x + branch(x))` twice, DeepNorm's form."""

    def __init__(self, config: DeepOneConfig) -> None:
        super().__init__()
        self.alpha = config.alpha
        self.attention = Attention(config)
        self.attention_norm = RMSNorm(config)
        self.mlp = MLP(config)
        self.mlp_norm = RMSNorm(config)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        residual = x
        x = self.attention(x)
        x = self.attention_norm(residual * self.alpha + x)
        residual = x
        x = self.mlp(x)
        out: Tensor = self.mlp_norm(residual * self.alpha + x)
        return out


class Head(nn.Linear):
    """Logits, or the loss without them."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """`[batch, length, hidden]` to logits; with labels to the mean loss of predicting the next token."""
        if labels is None:
            return super().forward(x)
        # The last position predicts nothing. Shifting the labels, not the hidden states, copies no large tensor.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        loss = linear_cross_entropy(x, self.weight, targets, ignore_index=IGNORED_LABEL)
        return zero_without_labels(loss, targets)


class DeepOne(LayeredModel):
    """The experiment's model with its loss: untied, no biases, no dropout.

    `gradient_checkpointing_enable()` gives the experiment's checkpoint rows: each layer recomputed, the rest kept.

    Example:
        >>> config = DeepOneConfig(vocab_size=64, context_length=16, num_layers=2, hidden_size=32, intermediate_size=72,
        ...                        num_heads=4)
        >>> ids = torch.arange(16).view(1, 16)
        >>> DeepOne(config)(input_ids=ids, labels=ids).logits.shape
        torch.Size([1, 16, 64])
    """

    def __init__(self, config: DeepOneConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_id)
        self.layers = LayerStack(Block(config) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config)
        self.head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights. Call it again after `to_empty` on a model that was built on the meta device."""
        scaled = ("value.weight", "attention.out.weight", "up.weight", "gate.weight", "down.weight")
        for name, parameter in self.named_parameters():
            if name.endswith("slopes"):
                parameter.copy_(alibi_slopes(parameter))
            elif "norm" in name:
                nn.init.ones_(parameter)
            elif name.startswith("token_embedding"):
                nn.init.normal_(parameter, std=self.config.hidden_size**-0.5)
                parameter[self.config.pad_id].zero_()
            else:
                nn.init.xavier_uniform_(parameter, gain=self.config.beta if name.endswith(scaled) else 1.0)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Logits for each position, and the loss of predicting the next token when labels are given.

        Args:
            input_ids: `[batch, length]`. Padding needs no mask: it is on the right, and attention looks left only.
            labels: `[batch, length]`, the input ids with padding set to -100.
        """
        if labels is not None and self.config.loss is LossKind.CHUNKED:
            loss = self.head(self.final_norm(self.layers(self.token_embedding(input_ids))), labels)
            return ModelOutput(loss=loss, logits=None)
        # No name holds the last hidden states: as in the experiment they live as long as their backward needs them.
        logits = self.head(self.final_norm(self.layers(self.token_embedding(input_ids))))
        return ModelOutput(loss=None if labels is None else copied_logits_loss(logits, labels), logits=logits)


def alibi_slopes(like: Tensor) -> Tensor:
    """ALiBi's slopes at the start: 2^-1 to 2^-8, even in the exponent, but 0 for the second half: they begin without position."""
    num_heads = like.shape[0]
    slopes = torch.logspace(-1, -8, num_heads, base=2.0, dtype=torch.float32, device=like.device)
    slopes[num_heads // 2 :] = 0.0
    return slopes


def copied_logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in the logits' own dtype, 0 for a batch without labels.

    The last position is dropped by copying all the others: with the log-softmax the step holds three tensors of the
    logits' size here, which is where the experiment's uncheckpointed peaks are.
    """
    kept = logits[:, :-1].contiguous()
    targets = labels[:, 1:].contiguous()
    loss = F.cross_entropy(kept.view(-1, kept.shape[-1]), targets.view(-1), ignore_index=IGNORED_LABEL)
    return zero_without_labels(loss, targets)


def zero_without_labels(loss: Tensor, targets: Tensor) -> Tensor:
    """The loss; 0 where no target counts, and the mean is of nothing.

    The experiment wrote `nan_to_num` here, which also makes a loss of 0 of a run that has diverged.
    """
    return torch.where((targets != IGNORED_LABEL).any(), loss, torch.zeros_like(loss))
