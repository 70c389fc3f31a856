"""Networks of the accuracy suites that no library provides: encoder-decoders, convolutional, recurrent and mixed ones."""

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


class RecurrentTagger(nn.Module):
    """A bidirectional recurrent layer over a sequence, one label for each position."""

    def __init__(
        self,
        vocabulary: int = 12000,
        width: int = 512,
        layers: int = 3,
        tags: int = 64,
        kind: type[nn.RNNBase] = nn.GRU,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = kind(width, width, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden, _ = self.gru(self.embedding(input_ids))
        return SimpleNamespace(loss=F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten() % 64))


class DenseNet(nn.Module):
    """Each layer reads all those before it: concatenations, batch norms and narrow convolutions."""

    def __init__(self, growth: int = 32, depths: tuple[int, ...] = (6, 12, 24, 16), classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for depth in depths:
            layers = [self._layer(channels + growth * number, growth) for number in range(depth)]
            self.blocks.append(nn.ModuleList(layers))
            channels += growth * depth
            if len(self.blocks) < len(depths):
                narrow = nn.Conv2d(channels, channels // 2, 1, bias=False)
                self.transitions.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), narrow, nn.AvgPool2d(2)))
                channels //= 2
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    @staticmethod
    def _layer(inputs: int, growth: int) -> nn.Sequential:
        return nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.stem(pixel_values)
        for number, block in enumerate(self.blocks):
            features = [hidden]
            for layer in block:
                features.append(layer(torch.cat(features, dim=1)))
            hidden = torch.cat(features, dim=1)
            if number < len(self.transitions):
                hidden = self.transitions[number](hidden)
        pooled = F.relu(self.norm(hidden)).mean(dim=(2, 3))
        return SimpleNamespace(loss=F.cross_entropy(self.head(pooled), labels))


class ResidualBlock(nn.Module):
    """A diffusion model's block: two convolutions and the noise level added between them."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.level = nn.Linear(embedding, outputs)
        self.second = nn.Sequential(
            nn.GroupNorm(32, outputs), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        inner = self.first(hidden) + self.level(F.silu(embedding))[:, :, None, None]
        return self.skip(hidden) + self.second(inner)


class PixelAttention(nn.Module):
    """Attention over the pixels of a feature map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // 64
        self.norm = nn.GroupNorm(32, channels)
        self.read = nn.Conv2d(channels, 3 * channels, 1)
        self.write = nn.Conv2d(channels, channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, channels, height, width = hidden.shape
        heads = self.read(self.norm(hidden)).reshape(batch, 3, self.heads, 64, height * width).transpose(-1, -2)
        mixed = F.scaled_dot_product_attention(heads[:, 0], heads[:, 1], heads[:, 2])
        return hidden + self.write(mixed.transpose(-1, -2).reshape(batch, channels, height, width))


class DiffusionUNet(nn.Module):
    """A denoiser as in latent diffusion: residual blocks, attention at the lower resolutions, strided convolutions."""

    def __init__(self, channels: int = 128, factors: tuple[int, ...] = (1, 2, 4), inputs: int = 4) -> None:
        super().__init__()
        widths, embedding = [channels * factor for factor in factors], 4 * channels
        self.channels = channels
        self.embed = nn.Sequential(nn.Linear(channels, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.stem = nn.Conv2d(inputs, channels, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, (before, width) in enumerate(itertools.pairwise([channels, *widths])):
            attend = PixelAttention(width) if level else nn.Identity()
            self.down.append(nn.ModuleList([ResidualBlock(before, width, embedding), attend]))
            self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
            attend = PixelAttention(before) if level else nn.Identity()
            self.up.append(nn.ModuleList([ResidualBlock(2 * width, before, embedding), attend]))
            self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.middle = ResidualBlock(widths[-1], widths[-1], embedding)
        self.head = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, inputs, 3, padding=1))

    def forward(self, noisy: Tensor, level: Tensor, noise: Tensor) -> SimpleNamespace:
        steps = torch.arange(self.channels // 2, device=level.device, dtype=torch.float32)
        angles = level[:, None] * torch.exp(-steps * 0.1)[None]
        embedding = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1).to(noisy.dtype))
        hidden, skips = self.stem(noisy), []
        for (block, attend), shrink in zip(self.down, self.shrink, strict=True):
            hidden = attend(block(hidden, embedding))
            skips.append(hidden)
            hidden = shrink(hidden)
        hidden = self.middle(hidden, embedding)
        for (block, attend), grow in zip(reversed(self.up), reversed(self.grow), strict=True):
            hidden = grow(F.interpolate(hidden, scale_factor=2.0, mode="nearest"))
            hidden = attend(block(torch.cat([hidden, skips.pop()], dim=1), embedding))
        return SimpleNamespace(loss=F.mse_loss(self.head(hidden), noise))


class SpeechTransformer(nn.Module):
    """Strided 1-d convolutions over a waveform, then a transformer encoder: wav2vec's shape."""

    def __init__(self, width: int = 512, layers: int = 6, tokens: int = 64) -> None:
        super().__init__()
        kernels, strides = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
        convolutions: list[nn.Module] = []
        for number, (kernel, stride) in enumerate(zip(kernels, strides, strict=True)):
            convolution = nn.Conv1d(width if number else 1, width, kernel, stride, bias=False)
            convolutions += [convolution, nn.GroupNorm(width, width) if number == 0 else nn.Identity(), nn.GELU()]
        self.features = nn.Sequential(*convolutions)
        self.position = nn.Conv1d(width, width, 129, padding=64, groups=16)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, waveform: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.features(waveform[:, None])
        hidden = (hidden + F.gelu(self.position(hidden))).transpose(1, 2)
        logits = self.head(self.encoder(hidden))
        return SimpleNamespace(loss=F.cross_entropy(logits.transpose(1, 2), labels))


class PatchMixer(nn.Module):
    """MLP-Mixer: products over the patches and over the channels in turn."""

    def __init__(
        self, size: int = 224, patch: int = 16, width: int = 512, layers: int = 8, classes: int = 1000
    ) -> None:
        super().__init__()
        patches = (size // patch) ** 2
        self.stem = nn.Conv2d(3, width, patch, stride=patch)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.across = nn.ModuleList(self._mlp(patches, width // 2) for _ in range(layers))
        self.within = nn.ModuleList(self._mlp(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    @staticmethod
    def _mlp(width: int, inner: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.stem(pixel_values).flatten(2).transpose(1, 2)
        for number, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            hidden = hidden + across(self.norms[2 * number](hidden).transpose(1, 2)).transpose(1, 2)
            hidden = hidden + within(self.norms[2 * number + 1](hidden))
        return SimpleNamespace(loss=F.cross_entropy(self.head(hidden.mean(dim=1)), labels))


class VideoNet(nn.Module):
    """Residual 3-d convolutions with batch norms."""

    def __init__(self, channels: int = 48, levels: int = 3, classes: int = 400) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.stem = self._block(3, channels, 1)
        self.narrow = nn.ModuleList(self._block(a, b, 2) for a, b in itertools.pairwise(widths))
        self.same = nn.ModuleList(self._block(width, width, 1) for width in widths)
        self.head = nn.Linear(widths[-1], classes)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU()
        )

    def forward(self, clip: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.stem(clip)
        for number, block in enumerate(self.same):
            hidden = hidden + block(hidden)
            if number < len(self.narrow):
                hidden = self.narrow[number](hidden)
        return SimpleNamespace(loss=F.cross_entropy(self.head(hidden.mean(dim=(2, 3, 4))), labels))
