"""Under every policy, every model trains with the bits of plain torch: losses, weights and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.activations import Applied, Keep, Offload, Policies, Policy, Recompute, Selective, apply
from tests.zoo import ZOO, ZooModel, assert_same, bf16_safe, train

POLICIES: dict[str, Policy] = {
    "keep": Keep(),
    "selective": Selective(),
    "recompute": Recompute(),
    "segments": Recompute(segment=3),
    "offload": Offload(min_bytes=0),
    "offload-all": Offload(recompute=False, min_bytes=0, depth=2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def policies_for(name: str, policy: Policy) -> Policies:
    """All repeated blocks; the small ResNet has a single pair of them, so that its stages are named."""
    return dict.fromkeys(["layer1", "layer2.0", "layer2.1", "layer3", "layer4"], policy) if name == "resnet" else policy


def run(
    model: ZooModel,
    policy: Policy | None,
    *,
    dtype: torch.dtype,
    num_steps: int = 2,
    device: str = "cpu",
    prepare: Any = None,
    **loop: Any,
) -> tuple[nn.Module, list[float], Applied | None]:
    """Train from the same seed, plainly where the policy is None."""
    network = model.build(True, dtype).to(device)
    if prepare is not None:
        prepare(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    batches = model.batches(num_steps * loop.get("accumulation", 1), device=device)
    applied = None if policy is None else apply(network, policies_for(model.name, policy), poison=True)
    with applied or contextlib.nullcontext():
        losses = train(network, optimizer, batches, loss=model.loss, seed=7, **loop)
    return network, losses, applied


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ZOO)
def test_same_bits_as_plain_torch(name: str, policy: str, dtype: str) -> None:
    plain, plain_losses, _ = run(ZOO[name], None, dtype=DTYPES[dtype])
    other, losses, applied = run(ZOO[name], POLICIES[policy], dtype=DTYPES[dtype])
    assert_same(plain, other, plain_losses, losses)
    assert applied is not None
    stats = applied.stats()
    if policy not in ("keep", "offload-all"):
        assert stats.num_recomputed >= 2 * len(applied.policies)
    if policy == "segments":
        assert stats.num_remade > 0
    if policy.startswith("offload"):
        assert stats.brought_bytes > 0
        assert stats.host_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_same_bits_with_accumulation_under_autocast(policy: str) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ZOO["gpt"].loss(model, batch)

    model = ZooModel(name="gpt", build=ZOO["gpt"].build, make_batch=ZOO["gpt"].make_batch, loss=loss)
    plain, plain_losses, _ = run(model, None, dtype=torch.float32, accumulation=2)
    other, losses, _ = run(model, POLICIES[policy], dtype=torch.float32, accumulation=2)
    assert_same(plain, other, plain_losses, losses)


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_between_forward_and_backward(policy: str) -> None:
    def gradients(given: Policy) -> list[torch.Tensor]:
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*blocks)
        with apply(model, given):
            loss = model(torch.randn(6, 8)).square().mean()
            model.eval()
            loss.backward()
        assert not any(part.training for part in model.modules())
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for expected, found in zip(gradients(Keep()), gradients(POLICIES[policy]), strict=True):
        assert torch.equal(expected, found)
