"""Cross entropy over tiles beside torch's own over all logits: values, gradients, and the memory it is made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.activations.tiling.cross_entropy import tiled_cross_entropy
from lowtide.activations.tiling.layers import TiledLinear
from lowtide.errors import ConfigError, TargetRangeError
from tests.zoo import assert_same_tensors, bf16_safe

VOCAB, WIDTH, NUM_TOKENS = 301, 16, 24


def sample(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(WIDTH, VOCAB, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = 2 * torch.randn(2, NUM_TOKENS // 2, WIDTH, generator=generator)
    target = torch.randint(VOCAB, (2, NUM_TOKENS // 2), generator=generator)
    target[0, :3] = -100
    return head.to(dtype), hidden.to(dtype).requires_grad_(), target


def results(loss: Tensor, hidden: Tensor, head: nn.Linear) -> dict[str, Tensor]:
    found = {"loss": loss.detach(), "hidden": hidden.grad, "weight": head.weight.grad}
    if head.bias is not None:
        found["bias"] = head.bias.grad
    return {name: value for name, value in found.items() if value is not None}


def plain(reduction: str, **settings: Any) -> dict[str, Tensor]:
    head, hidden, target = sample(**settings)
    loss = F.cross_entropy(head(hidden).float().flatten(0, 1), target.flatten(), reduction=reduction)
    (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum().backward()
    return results(loss, hidden, head)


def in_tiles(reduction: Any, num_tiles: int, **settings: Any) -> dict[str, Tensor]:
    head, hidden, target = sample(**settings)
    layer = TiledLinear.from_linear(head, num_tiles)
    loss = tiled_cross_entropy(hidden, layer, target, reduction=reduction)
    (loss.flatten() * torch.linspace(1, 2, loss.numel())).sum().backward()
    assert loss.shape == (target.shape if reduction == "none" else ())
    return results(loss.flatten() if reduction == "none" else loss, hidden, layer.to_linear())


@pytest.mark.parametrize("num_tiles", [1, 3, 8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_cross_entropy(reduction: str, bias: bool, num_tiles: int) -> None:
    expected = plain(reduction, bias=bias)
    found = in_tiles(reduction, num_tiles, bias=bias)
    assert list(found) == list(expected)
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-5 * scale, msg=lambda text, name=name: name + text
        )


def test_bf16_weights() -> None:
    with bf16_safe():
        expected = plain("mean", dtype=torch.bfloat16)
        found = in_tiles("mean", 4, dtype=torch.bfloat16)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(
            found[name].float(), value.float(), rtol=2e-2, atol=2e-2 * value.float().abs().max().item()
        )


def test_large_logits_do_not_overflow() -> None:
    head, hidden, target = sample()
    layer = TiledLinear.from_linear(head, 4)
    expected = F.cross_entropy(head(hidden * 1e4).flatten(0, 1), target.flatten())
    torch.testing.assert_close(tiled_cross_entropy(hidden * 1e4, layer, target), expected)


def test_without_gradients_and_without_counted_tokens() -> None:
    head, hidden, target = sample()
    layer = TiledLinear.from_linear(head, 4)
    target = target.clamp(min=0)
    with torch.no_grad():
        found = tiled_cross_entropy(hidden, list(layer.tiles), target, ignore_index=0)  # type: ignore[arg-type]
        torch.testing.assert_close(found, F.cross_entropy(head(hidden).flatten(0, 1), target.flatten(), ignore_index=0))
        assert tiled_cross_entropy(hidden, layer, torch.full_like(target, -100)).isnan()


def test_targets_out_of_range_fail_as_in_torch() -> None:
    head, hidden, target = sample()
    layer = TiledLinear.from_linear(head, 4)
    for wrong in (-1, VOCAB):
        target[1, 1] = wrong
        with pytest.raises((IndexError, RuntimeError)):
            F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
        with pytest.raises(
            TargetRangeError, match=f"1 of {NUM_TOKENS} targets .*: the first is {wrong}, and the vocabulary has"
        ):
            tiled_cross_entropy(hidden, layer, target)


def test_no_more_than_a_tile_of_logits_is_saved_or_made() -> None:
    head, hidden, target = sample()
    layer = TiledLinear.from_linear(head, 7)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tiled_cross_entropy(hidden, layer, target)
    # What a checkpoint keeps goes by its own hooks; nothing else keeps logits.
    assert max(saved) < NUM_TOKENS * VOCAB / 7
    sizes: list[int] = []
    for tile in layer.tiles:
        tile.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    tiled_cross_entropy(hidden, layer, target).backward()
    assert len(sizes) == 14, "each tile runs once forward and once in the backward"
    assert max(sizes) <= NUM_TOKENS * (VOCAB // 7 + 1)


class WithLoss(nn.Module):
    """Gives its loss."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.body = nn.Linear(64, 64)
            self.head = TiledLinear.from_linear(nn.Linear(64, vocab, bias=False), 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return tiled_cross_entropy(torch.tanh(self.body(x)), self.head, target)


def test_a_session_brings_tile_by_tile() -> None:
    vocab = 8192
    outcomes = []
    for place in (None, "streamed"):
        model = WithLoss(vocab)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session = None
        if place is not None:
            plan = lowtide.make_plan(model, weights=place, update="host")
            session = lowtide.manage(model, optimizer, plan, device="cpu")
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 64, generator=generator)
            target = torch.randint(vocab, (16,), generator=generator)
            loss = model(x, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if session is not None:
            peak = next(tier.peak_bytes for tier in session.stats().tiers if tier.tier == "device")
            assert peak < 0.75 * vocab * 64 * 4, f"{peak} bytes on the device, of a head of {vocab * 64 * 4}"
            session.close()
        outcomes.append({**model.state_dict(), **{str(index): value for index, value in enumerate(losses)}})
    assert_same_tensors(*outcomes)


def test_refusals() -> None:
    head, hidden, target = sample()
    layer = TiledLinear.from_linear(head, 2)
    with pytest.raises(ConfigError, match="reduction is 'max'"):
        tiled_cross_entropy(hidden, layer, target, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"shape \(2, 12, 16\) do not fit 2 tiles and targets of shape \(12,\)"):
        tiled_cross_entropy(hidden, layer, target[0])
    with pytest.raises(ConfigError, match="a tile is a Tanh"):
        tiled_cross_entropy(hidden, [nn.Tanh()], target)  # type: ignore[list-item]
    for dtype in (torch.uint8, torch.int16, torch.bool, torch.float32):
        with pytest.raises(ConfigError, match=f"target is {dtype}; give indices into the vocabulary, as torch.long"):
            tiled_cross_entropy(hidden, layer, target.clamp(min=0).to(dtype))


def test_a_head_without_tiles_is_refused() -> None:
    with pytest.raises(ConfigError, match="a plain nn.Linear, which has no tiles"):
        tiled_cross_entropy(torch.zeros(2, 4), nn.Linear(4, 8), torch.zeros(2, dtype=torch.long))  # type: ignore[arg-type]  # on purpose
