"""Llama: the Llama 2 and 3 architecture in plain torch (Touvron et al. 2023; Grattafiori et al. 2024, section 3.2), with
rotary position embedding (Su et al. 2021): queries and keys are turned by an angle that grows with their position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.layers import LayeredModel, LayerStack, ModelOutput, next_token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama.

    The stretched frequencies that Llama 3.1 and later use for long contexts are not here: they change values, not
    bytes.
    """

    vocab_size: int
    context_length: int
    """The longest sequence it was trained on; longer ones run."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the gated MLP."""
    num_heads: int
    num_kv_heads: int
    """Heads of key and value, each shared by `num_heads / num_kv_heads` queries."""
    tied: bool = False
    """Whether the head is the token embedding."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.query = nn.Linear(config.hidden_size, config.num_heads * config.head_size, bias=False)
        self.key = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_size, bias=False)
        self.value = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_size, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        query = rotate(self._split(self.query(x)), cos, sin)
        key = rotate(self._split(self.key(x)), cos, sin)
        mixed = grouped_attention(query, key, self._split(self.value(x)))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)  # [batch, heads, length, head_size]


def grouped_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in which several query heads share one head of key and value.

    The flash kernels take the groups as they are. In fp32 there is no flash kernel, and the memory-efficient one wants
    equal heads; handed groups, torch would fall back to the math path, which keeps the whole attention matrix. So there
    the heads of key and value are repeated, which costs `num_heads / num_kv_heads` times their bytes.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.dtype == torch.float32:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups > 1)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to what came in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(LayeredModel):
    """Llama with its loss: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

    Example:
        >>> config = LlamaConfig(vocab_size=64, context_length=16, num_layers=2, hidden_size=32, intermediate_size=64,
        ...                      num_heads=4, num_kv_heads=2)
        >>> ids = torch.arange(16).view(1, 16)
        >>> Llama(config)(input_ids=ids, labels=ids).logits.shape
        torch.Size([1, 16, 64])
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = LayerStack(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights. Call it again after `to_empty` on a model that was built on the meta device."""
        if self.config.tied:
            self.head.weight = self.token_embedding.weight  # here, because `to_empty` makes two tensors of one
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Logits for each position, and the loss of predicting the next token when labels are given.

        Args:
            input_ids: `[batch, length]`.
            labels: `[batch, length]`, usually the input ids themselves; -100 is ignored.
        """
        x = self.token_embedding(input_ids)
        cos, sin = rope_tables(
            input_ids.shape[1], self.config.head_size, theta=self.config.rope_theta, device=input_ids.device
        )
        logits = self.head(self.final_norm(self.layers(x, cos, sin)))
        return ModelOutput(loss=None if labels is None else next_token_loss(logits, labels), logits=logits)


def rope_tables(length: int, head_size: int, *, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, `[length, head_size]` each, in fp32.

    Made anew in every forward instead of kept as buffers: they are small, and a model that was built on the meta device
    then needs nothing restored. Angles need fp32: bf16 cannot tell neighbouring positions apart beyond 256.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    frequencies = 1.0 / theta**exponents
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_size / 2) of `x`, `[batch, heads, length, head_size]`, by its position's angle.

    The tables take the dtype of `x`, else fp32 tables would promote bf16 queries and keys and double their bytes.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
