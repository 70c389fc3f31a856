from __future__ import annotations

import math

import pytest
import torch

from lowtide.models.registry import BUILT_INS
from lowtide.models.resnet import ResNet, ResNetConfig
from tests.models.training import train_losses

TINY = ResNetConfig(blocks=(1, 2, 1, 1), width=8, num_classes=5)


def test_resnet_50_has_torchvisions_parameters() -> None:
    config = BUILT_INS["resnet-50"].config
    assert isinstance(config, ResNetConfig)
    with torch.device("meta"):
        model = ResNet(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sum(math.prod(shape) for shape in shapes.values()) == 25_557_032
    assert len(shapes) == 161
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["fc.weight"] == (1000, 2048)
    # v1.5: the 3x3 convolution strides, not the first 1x1.
    assert model.layer2[0].conv1.stride == (1, 1)
    assert model.layer2[0].conv2.stride == (2, 2)


def test_sizes_halve_five_times() -> None:
    sizes = []
    with torch.device("meta"):
        model = ResNet(TINY)
        for stage in (model.maxpool, model.layer1, model.layer2, model.layer3, model.layer4):
            stage.register_forward_hook(lambda module, args, out: sizes.append(tuple(out.shape)))
        logits = model(pixel_values=torch.empty(2, 3, 64, 96)).logits
    assert sizes == [(2, 8, 16, 24), (2, 32, 16, 24), (2, 64, 8, 12), (2, 128, 4, 6), (2, 256, 2, 3)]
    assert logits.shape == (2, 5)


def test_loss_falls() -> None:
    torch.manual_seed(0)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(5, (8,))}
    losses = train_losses(ResNet(TINY), batch, steps=10)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_batch_serves_every_precision(dtype: torch.dtype) -> None:
    logits = ResNet(TINY).to(dtype)(pixel_values=torch.randn(2, 3, 32, 32)).logits
    assert logits.dtype == dtype


def test_a_model_from_the_meta_device_can_be_initialised_later() -> None:
    with torch.device("meta"):
        model = ResNet(TINY)
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert model.bn1.running_var is not None
    assert torch.equal(model.bn1.running_var, torch.ones(8))
    assert model.conv1.weight.std().item() == pytest.approx(math.sqrt(2 / (8 * 49)), rel=0.1)
