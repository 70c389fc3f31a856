"""Modules in slices of the sequence: the same results, less memory, dropout, and modules that cannot be sliced."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.activations import apply
from lowtide.activations.tiling.sequence import tile_sequence
from lowtide.errors import ConfigError, UnknownNameError
from tests.zoo import bf16_safe, zoo

WIDTH, LENGTH = 8, 30


class Wide(nn.Module):
    """An MLP, with something around it that keeps its output alive."""

    def __init__(self, inner: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            layers = (nn.Linear(WIDTH, 32 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(32 * WIDTH, WIDTH))
            self.mlp = inner or nn.Sequential(*layers)
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x), *args, **kwargs)
        return out


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, LENGTH)), WIDTH, generator=torch.Generator().manual_seed(1))


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    (out.square() * torch.linspace(1, 2, WIDTH)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {"out": out.detach(), "x": x.grad, **gradients}
    model.zero_grad()
    return {name: value for name, value in found.items() if value is not None}


def assert_close(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert list(expected) == list(found)
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-5 * scale, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize(
    "size", [{"num_slices": 1}, {"num_slices": 4}, {"slice_tokens": 7}, {"slice_tokens": 100}], ids=str
)
@pytest.mark.parametrize("shape", [(2, LENGTH), (LENGTH,), (2, 3, LENGTH), (1, 1)], ids=str)
def test_equals_the_whole(shape: tuple[int, ...], size: dict[str, int]) -> None:
    model = Wide()
    expected = outcome(model, inputs(*shape))
    handle = tile_sequence(model, ["mlp"], **size)  # type: ignore[arg-type]
    assert_close(expected, outcome(model, inputs(*shape)))
    assert_close(expected, outcome(model, inputs(*shape)))
    handle.remove()
    handle.remove()
    again = outcome(model, inputs(*shape))
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


def test_each_slice_runs_twice_and_the_rest_as_ever() -> None:
    model = Wide()
    sizes: list[int] = []
    tile_sequence(model, ["mlp"], slice_tokens=7)
    model(inputs())  # the check
    model.mlp.get_submodule("0").register_forward_hook(lambda module, args, output: sizes.append(output.shape[-2]))
    loss = model(inputs()).sum()
    assert sizes == [7, 7, 7, 7, 2]
    loss.backward()
    assert sorted(sizes[5:]) == [2, 7, 7, 7, 7]
    sizes.clear()
    with torch.no_grad():
        model(inputs())
    assert sizes == [7, 7, 7, 7, 2]


def test_dropout_is_replayed() -> None:
    """The masks of the backward are those of the forward: beside one slice after the other, written out by hand."""

    def by_hand(model: Wide, x: Tensor) -> Tensor:
        return x + torch.cat([model.mlp(part) for part in model.norm(x).split(7, dim=-2)], dim=-2)

    model = Wide(dropout=0.4)
    x = inputs()
    torch.manual_seed(3)
    by_hand(model, x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    tile_sequence(model, ["mlp"], slice_tokens=7)
    model(x)  # the check
    assert model.mlp.training
    assert model.mlp.get_submodule("2").training
    torch.manual_seed(3)
    model(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(expected) == 6
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_bf16_passes_the_check() -> None:
    with bf16_safe():
        model = Wide().to(torch.bfloat16)
        x = inputs().bfloat16()
        expected = model(x)
        tile_sequence(model, ["mlp"], num_slices=3)
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


def test_inside_a_checkpoint_and_in_a_model() -> None:
    sample = zoo("gpt")
    results = []
    for is_tiled in (False, True):
        model = sample.build(False, torch.float32)
        if is_tiled:
            handle = tile_sequence(model, lambda path, module: path.endswith(".mlp"), num_slices=4)
            assert handle.paths
            assert all(path.endswith(".mlp") for path in handle.paths)
        batch = sample.batches(1)[0]
        loss = checkpoint(sample.loss, model, batch, use_reentrant=False)
        loss.backward()
        results.append(
            {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
        )
    assert_close(*results)


def test_the_inside_exists_for_one_slice() -> None:
    """On an emulated device, where every byte is counted: the wide tensors of the whole, and of a tenth of it."""
    peaks = []
    for num_slices in (None, 10):
        model = nn.Sequential(Wide(), Wide())
        if num_slices is not None:
            tile_sequence(model, lambda path, module: path.endswith("mlp"), num_slices=num_slices)
        plan = lowtide.make_plan(model, weights="resident", update="host")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lowtide.manage(model, optimizer, plan, device="cpu") as session:
            for _ in range(2):
                model(inputs(8, 200)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(next(tier.peak_bytes for tier in session.stats().tiers if tier.tier == "device"))
    wide_bytes = 8 * 200 * 32 * WIDTH * 4
    assert peaks[0] > 4 * wide_bytes
    assert peaks[1] < 1.2 * wide_bytes, f"{peaks[1]} bytes, where one wide tensor of the whole has {wide_bytes}"


class Mixing(nn.Module):
    """Each position sees the one before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.roll(1, dims=-2)


class Halving(nn.Module):
    """Fewer positions come out."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., ::2, :]


class Pair(nn.Module):
    """Two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Mixing(), "Mixing at 'mlp' mixes positions: run in two slices, its output differs by"),
        (Halving(), r"Halving at 'mlp' gave shape \(2, 8, 8\) for an input of shape \(2, 16, 8\)"),
        (Pair(), "Pair at 'mlp' gave a tuple"),
    ],
)
def test_modules_that_cannot_be_sliced_are_found_at_the_first_call(inner: nn.Module, message: str) -> None:
    model = Wide(inner)
    tile_sequence(model, ["mlp"], num_slices=2)
    with pytest.raises(ConfigError, match=message):
        model(inputs())
    assert inner.training


def test_other_arguments_go_to_each_slice() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: float, shift: float = 0.0) -> Tensor:
            return x * factor + shift

    model = Wide(Scaled())
    expected = model(inputs(), 3.0, shift=2.0)
    tile_sequence(model, ["mlp"], num_slices=3)
    assert torch.equal(model(inputs(), 3.0, shift=2.0), expected)


def test_refusals() -> None:
    model = Wide()
    with pytest.raises(ConfigError, match="num_slices is None and slice_tokens is None; give one of the two"):
        tile_sequence(model, ["mlp"])
    with pytest.raises(ConfigError, match="num_slices is 2 and slice_tokens is 3"):
        tile_sequence(model, ["mlp"], num_slices=2, slice_tokens=3)
    with pytest.raises(ConfigError, match="slice_tokens is 0; give 1 or more"):
        tile_sequence(model, ["mlp"], slice_tokens=0)
    for number in ("2", True, math.nan, 2.5, [2]):
        for key in ("num_slices", "slice_tokens"):
            with pytest.raises(ConfigError, match=re.escape(f"{key} is {number!r}; give a whole number, 1 or more")):
                tile_sequence(model, ["mlp"], **{key: number})  # type: ignore[arg-type]  # on purpose
    with pytest.raises(UnknownNameError, match="no module named 'mpl'; did you mean 'mlp'"):
        tile_sequence(model, ["mpl"], num_slices=2)
    with pytest.raises(ConfigError, match="no module was chosen"):
        tile_sequence(model, lambda path, module: False, num_slices=2)
    with pytest.raises(ConfigError, match="'mlp' has a BatchNorm1d at 'mlp.0', which looks at several positions"):
        tile_sequence(Wide(nn.Sequential(nn.BatchNorm1d(3))), ["mlp"], num_slices=2)
    with pytest.raises(ConfigError, match="'mlp' is a ModuleList, which is never called"):
        tile_sequence(Wide(nn.ModuleList([nn.Linear(2, 2)])), ["mlp"], num_slices=2)
    tile_sequence(model, ["mlp"], num_slices=2)
    with pytest.raises(ConfigError, match="at 'mlp' was called with no tensor of positions first"):
        model.mlp(torch.ones(3))
    with pytest.raises(ConfigError, match="at 'mlp' was called with str first"):
        model.mlp("text")


def test_removal_leaves_what_was_installed_later() -> None:
    model = nn.Sequential(Wide(), Wide())
    expected = outcome(model, inputs())
    handle = tile_sequence(model, ["0.mlp"], num_slices=3)
    with apply(model, {"0.mlp": "recompute"}) as applied:
        handle.remove()
        found = outcome(model, inputs())
        assert applied.stats().num_recomputed == 1
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


class Debugged(nn.Module):
    """Takes arguments that a checkpoint has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_runs", torch.zeros(()))

    def forward(self, x: Tensor, *, debug: bool = False, early_stop: float = 0.0) -> Tensor:
        self.num_runs += 1
        return self.layer(x).exp() * (2.0 if debug else 1.0) + early_stop


def test_keywords_are_the_modules_and_buffers_move_once_for_a_slice() -> None:
    inner = Debugged()
    model, x = Wide(inner), inputs()
    expected = model(x, debug=True, early_stop=3.0)
    tile_sequence(model, ["mlp"], num_slices=3)
    model(x, debug=True, early_stop=3.0)
    before = inner.num_runs.clone()
    out = model(x, debug=True, early_stop=3.0)
    out.sum().backward()
    torch.testing.assert_close(out, expected)
    assert inner.num_runs - before == 3
