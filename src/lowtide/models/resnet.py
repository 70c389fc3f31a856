"""ResNet-50 v1.5 (He et al. 2015, with the stride on the 3x3 convolution), under torchvision's parameter names."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.models.layers import ModelOutput

EXPANSION = 4
"""Channels that a bottleneck puts out, per channel inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a ResNet of bottlenecks."""

    blocks: tuple[int, int, int, int]
    """Bottlenecks in each of the four stages."""
    width: int = 64
    """Channels after the stem, and inside the first stage's bottlenecks; doubles with each stage."""
    num_classes: int = 1000
    image_size: int = 224
    """Side of the default image; any other that survives five halvings runs."""


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, added to the (projected) input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, EXPANSION * width, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(EXPANSION * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != EXPANSION * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, EXPANSION * width, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(EXPANSION * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, channels, height, width]`, halved in height and width by a stride of 2."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A classifier of images with its loss.

    Example:
        >>> import torch
        >>> model = ResNet(ResNetConfig(blocks=(1, 1, 1, 1), width=8, num_classes=10))
        >>> model(pixel_values=torch.zeros(2, 3, 64, 64)).logits.shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(width, width, config.blocks[0], stride=1)
        self.layer2 = _stage(EXPANSION * width, 2 * width, config.blocks[1], stride=2)
        self.layer3 = _stage(EXPANSION * 2 * width, 4 * width, config.blocks[2], stride=2)
        self.layer4 = _stage(EXPANSION * 4 * width, 8 * width, config.blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(EXPANSION * 8 * width, config.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights, reset the statistics. Call it again after `to_empty` on a model from the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.Linear):
                module.reset_parameters()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Logits for each image, and the mean cross entropy when labels are given.

        Args:
            pixel_values: `[batch, 3, height, width]`, cast to the weights' dtype: one batch serves every precision.
            labels: `[batch]`, the class of each image.
        """
        x = self.maxpool(self.relu(self.bn1(self.conv1(pixel_values.to(self.conv1.weight.dtype)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits = self.fc(self.avgpool(x).flatten(1))
        return ModelOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


def _stage(channels: int, width: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width, 1) for _ in range(num_blocks - 1)))
