"""GPT: the GPT-2 architecture in plain torch (Radford et al. 2019, section 2.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.layers import LayeredModel, LayerStack, ModelOutput, next_token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT. The inner width of the MLP is four times `hidden_size`."""

    vocab_size: int
    context_length: int
    """Number of learned positions: the longest sequence."""
    num_layers: int
    hidden_size: int
    num_heads: int
    dropout: float = 0.1
    """Share dropped in the embedding, in the attention weights and at the end of each branch."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; the two that end a branch get it divided by sqrt(2 * num_layers)."""


class Attention(nn.Module):
    """Causal self-attention with one matrix for query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each [batch, heads, length, head_size]
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        out: Tensor = self.residual_dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)))
        return out


class MLP(nn.Module):
    """Two matrices around the tanh form of GELU, the one that GPT-2 was trained with."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        out: Tensor = self.residual_dropout(self.down(F.gelu(self.up(x), approximate="tanh")))
        return out


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(LayeredModel):
    """GPT-2 with its loss: learned positions, LayerNorm, the head tied to the token embedding.

    Example:
        >>> config = GPTConfig(vocab_size=64, context_length=16, num_layers=2, hidden_size=32, num_heads=4)
        >>> ids = torch.arange(16).view(1, 16)
        >>> GPT(config)(input_ids=ids, labels=ids).logits.shape
        torch.Size([1, 16, 64])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.context_length, config.hidden_size)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.layers = LayerStack(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as GPT-2 did. Call it again after `to_empty` on a model built on the meta device."""
        self.head.weight = self.token_embedding.weight  # here, because `to_empty` makes two tensors of one
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            elif name.endswith(("attention.out.weight", "mlp.down.weight")):
                # Each branch adds to the residual stream; without this its variance would grow with the depth.
                nn.init.normal_(parameter, std=std / (2 * self.config.num_layers) ** 0.5)
            else:
                nn.init.normal_(parameter, std=std)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Logits for each position, and the loss of predicting the next token when labels are given.

        Args:
            input_ids: `[batch, length]`, length at most `context_length`.
            labels: `[batch, length]`, usually the input ids themselves; -100 is ignored.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embedding_dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        logits = self.head(self.final_norm(self.layers(x)))
        return ModelOutput(loss=None if labels is None else next_token_loss(logits, labels), logits=logits)
