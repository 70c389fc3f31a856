"""Networks of the accuracy suite that no library provides: an encoder-decoder with dropout, a UNet, a recurrent model."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TranslationTransformer(nn.Module):
    """`nn.Transformer` as in the textbook: post-norm, ReLU, dropout everywhere, causal target mask."""

    def __init__(self, vocabulary: int = 16000, width: int = 512, layers: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 8, layers, layers, 4 * width, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        length = labels.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=labels.device, dtype=self.head.weight.dtype
        )
        source, target = self.embedding(input_ids), self.embedding(labels)
        hidden = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(hidden)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Skip connections across the whole depth: activations whose lives do not nest."""

    def __init__(self, channels: int = 64, depth: int = 4, classes: int = 8) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.stem = DoubleConv(3, widths[0])
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in itertools.pairwise(widths))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(DoubleConv(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.stem(pixel_values)
        skips = []
        for block in self.down:
            skips.append(hidden)
            hidden = block(F.max_pool2d(hidden, 2))
        for block, lift in zip(reversed(self.up), reversed(self.lift), strict=True):
            hidden = block(torch.cat([lift(hidden), skips.pop()], dim=1))
        return SimpleNamespace(loss=F.cross_entropy(self.head(hidden), labels))


class RecurrentLM(nn.Module):
    """An LSTM language model."""

    def __init__(self, vocabulary: int = 10000, width: int = 1024, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return SimpleNamespace(loss=F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


class MixerMLP(nn.Module):
    """A plain MLP with BatchNorm1d and a wide hidden layer: no attention, no convolution."""

    def __init__(self, width: int = 4096, layers: int = 6, classes: int = 1000) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.1), nn.Dropout(0.2))
            for _ in range(layers)
        ]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=F.cross_entropy(self.head(self.body(inputs)), labels))
