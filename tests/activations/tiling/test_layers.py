"""Layers as tiles: the same results, the state of the ordinary layer, groups of their own, and the way back."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide.activations.tiling.layers import (
    TiledEmbedding,
    TiledLinear,
    tile,
    tile_groups,
    tile_ranges,
    tile_sizes,
    untile,
    within_tile,
)
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.memory.groups import find_groups
from lowtide.units import MiB
from tests.zoo import assert_same_tensors, zoo

VOCAB, WIDTH = 22, 6


class Language(nn.Module):
    """A table, something between, and a head."""

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width, **settings)
        self.between = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.between(self.table(ids))))
        return out


def language(**settings: Any) -> Language:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Language(**settings)


def tiled(**settings: Any) -> Language:
    model = language(**settings)
    tile(model, {"table": 3, "head": 5})
    return model


def ids(seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(seed))


@given(num_rows=st.integers(1, 50), num_tiles=st.integers(1, 50))
def test_tiles_cover_all_rows(num_rows: int, num_tiles: int) -> None:
    if num_tiles > num_rows:
        with pytest.raises(ConfigError, match=f"{num_rows} rows cannot be split into {num_tiles} tiles"):
            tile_sizes(num_rows, num_tiles)
        return
    ranges = tile_ranges(tile_sizes(num_rows, num_tiles))
    assert [row for rows in ranges for row in rows] == list(range(num_rows))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    every = torch.arange(num_rows)
    for rows in ranges:
        local = within_tile(every, rows, num_rows)
        assert local.min() >= 0
        assert local.max() < len(rows)
        assert local[rows.start : rows.stop].tolist() == list(range(len(rows)))


def test_linear_equals_the_whole() -> None:
    linear = nn.Linear(WIDTH, VOCAB)
    layer = TiledLinear.from_linear(linear, 5)
    x = torch.randn(3, 7, WIDTH)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(value) for module, value in zip((linear, layer), inputs, strict=True)]
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    back = layer.to_linear()
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(linear, name).grad, getattr(back, name).grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding_idx", [None, 0, 9, -1])
def test_embedding_has_the_same_bits(padding_idx: int | None) -> None:
    table = nn.Embedding(VOCAB, WIDTH, padding_idx=padding_idx)
    layer = TiledEmbedding.from_embedding(table, 4)
    weights = torch.randn(4, 9, WIDTH)
    for module in (table, layer):
        (module(ids()) * weights).sum().backward()
    assert torch.equal(table(ids()), layer(ids()))
    back = layer.to_embedding()
    assert back.padding_idx == table.padding_idx
    assert table.weight.grad is not None
    assert_same_tensors({"": table.weight.grad}, {"": back.weight.grad})  # type: ignore[dict-item]
    for wrong in (-1, VOCAB):
        with pytest.raises(IndexError):
            table(torch.tensor([wrong]))
        with pytest.raises(IndexError):
            layer(torch.tensor([wrong]))


def test_training_is_the_same_to_rounding() -> None:
    models = [language(), tiled()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(10):
            out = model(ids(step))
            nn.functional.cross_entropy(out.flatten(0, 1), ids(step).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    untile(models[1])
    start = language().state_dict()
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(value, models[1].state_dict()[name], rtol=1e-5, atol=1e-5)
        assert (value - start[name]).abs().max() > 1e-2, f"{name} was not trained"


def test_state_dict_is_that_of_the_ordinary_model() -> None:
    plain, model = language(), tiled()
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert list(plain.state_dict()._metadata) == list(model.state_dict()._metadata)  # type: ignore[attr-defined]
    assert_same_tensors(plain.state_dict(prefix="a."), model.state_dict(prefix="a."))
    other = language()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    given_state = other.state_dict()
    keys = list(given_state)
    model.load_state_dict(given_state)
    assert list(given_state) == keys
    assert_same_tensors(other.state_dict(), model.state_dict())
    plain.load_state_dict(model.state_dict())
    assert_same_tensors(other.state_dict(), plain.state_dict())


def test_loading_by_assignment_into_meta() -> None:
    state = language().state_dict()
    with torch.device("meta"):
        model = Language()
    tile(model, {"table": 3, "head": 5})
    model.load_state_dict(state, assign=True)
    assert_same_tensors(state, model.state_dict())
    assert torch.equal(model.table(ids()), nn.functional.embedding(ids(), state["table.weight"]))


def test_strict_loading_reports_ordinary_names() -> None:
    model, plain = tiled(), language()
    state = plain.state_dict()
    del state["head.bias"]
    state["head.extra"] = torch.ones(1)
    state["table.weight"] = torch.ones(3, WIDTH)

    def message(loaded: nn.Module) -> str:
        with pytest.raises(RuntimeError) as caught:
            loaded.load_state_dict(state)
        return "\n".join(sorted(str(caught.value).splitlines()))

    assert message(model) == message(plain)
    del state["table.weight"]
    expected, found = (loaded.load_state_dict(state, strict=False) for loaded in (language(), tiled()))
    assert set(found.missing_keys) == set(expected.missing_keys) == {"head.bias", "table.weight"}
    assert found.unexpected_keys == expected.unexpected_keys == ["head.extra"]
    bare = TiledLinear.from_linear(nn.Linear(2, 4, bias=False), 2)
    assert list(bare.state_dict()) == ["weight"]
    assert bare.load_state_dict({"weight": torch.ones(4, 2), "bias": torch.ones(4)}, strict=False).unexpected_keys == [
        "bias"
    ]


def test_untile_gives_values_gradients_and_settings_back() -> None:
    model = language(padding_idx=3)
    model.head.requires_grad_(requires_grad=False)
    gradient = torch.randn(VOCAB, WIDTH)
    model.table.weight.grad = gradient.clone()
    model.eval()
    before = copy.deepcopy(model)
    tile(model, {"table": 3, "head": 5})
    untile(model, ["head"])
    assert type(model.head) is nn.Linear
    untile(model)
    assert type(model.table) is nn.Embedding
    assert_same_tensors(before.state_dict(), model.state_dict())
    assert not model.head.weight.requires_grad
    assert not model.table.training
    assert model.table.padding_idx == 3
    assert model.table.weight.grad is not None
    assert torch.equal(model.table.weight.grad, gradient)
    with pytest.raises(UnknownNameError, match="no tiled layer named 'head'"):
        untile(model, ["head"])


def test_large_tiles_are_groups_and_small_ones_can_be_given() -> None:
    with torch.device("meta"):
        model = Language(vocab=8192, width=256)
    tile(model, {"table": 4, "head": 4})
    groups = find_groups(model)
    assert [group.name for group in groups[:-1]] == [
        f"{name}.tiles.{index}" for name in ("table", "head") for index in range(4)
    ]
    assert max(group.nbytes for group in groups) < 2.1 * MiB
    small = zoo("llama").build(False, torch.float32)
    tile(small, {"model.layers.0.mlp.up_proj": 2})
    assert tile_groups(small) == {
        f"model.layers.0.mlp.up_proj.tiles.{index}": (f"model.layers.0.mlp.up_proj.tiles.{index}",)
        for index in range(2)
    }
    names = {group.name for group in find_groups(small, tile_groups(small))}
    assert names >= set(tile_groups(small))


@pytest.mark.parametrize("update", ["host", "device"])
def test_streamed_tile_by_tile(update: str) -> None:
    """Under a session the device never holds more than a part of the tiled layers, and the bits are the same."""
    results = []
    for place in ("resident", "streamed"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            model = Language(vocab=4096, width=64)
        tile(model, {"table": 4, "head": 4})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = lowtide.make_plan(model, weights=place, update=update)
        with lowtide.manage(model, optimizer, plan, device="cpu") as session:
            for step in range(3):
                loss = model(ids(step)[:1, :2]).logsumexp(-1).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            peak = next(tier.peak_bytes for tier in session.stats().tiers if tier.tier == "device")
        results.append((model.state_dict(), peak))
    assert_same_tensors(results[0][0], results[1][0])
    whole = 4096 * 64 * 4
    assert results[0][1] > 2 * whole
    if update == "host":
        assert results[1][1] < 1.25 * whole, f"{results[1][1]} bytes, of a layer of {whole}"


def test_refusals() -> None:
    model = language()
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UnknownNameError, match="no module named 'haed'; did you mean 'head'"):
        tile(model, {"head": 2, "haed": 2})
    with pytest.raises(ConfigError, match="22 rows cannot be split into 23 tiles"):
        tile(model, {"table": 2, "head": 23})
    for number in ("2", True, None, math.nan, 2.0, [2]):
        with pytest.raises(ConfigError, match=re.escape(f"num_tiles is {number!r}; give a whole number, 1 to 22")):
            tile(model, {"table": 2, "head": number})  # type: ignore[dict-item]  # on purpose
    for wrong in (2, None, ["head"], "head"):
        with pytest.raises(
            ConfigError, match=re.escape(f"num_tiles is {wrong!r}; give the number of tiles by the path")
        ):
            tile(model, wrong)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(UnknownNameError, match="no module named 0; did you mean '0'"):
        tile(nn.Sequential(nn.Linear(4, 4)), {0: 2})  # type: ignore[dict-item]  # on purpose
    assert {name: id(module) for name, module in model.named_modules()} == before, "half done"
    with pytest.raises(ConfigError, match="'between' is a LayerNorm; only a plain nn.Linear"):
        tile(nn.ModuleDict({"between": nn.LayerNorm(3)}), {"between": 3})
    with pytest.raises(ConfigError, match="'head.weight' is tied to 'token_embedding.weight'"):
        tile(zoo("gpt").build(False, torch.float32), {"head": 2})
    shared = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="'0' is one module at 2 places .0, 1."):
        tile(nn.Sequential(shared, shared), {"0": 2})
    model.head.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ConfigError, match="'head' has hooks"):
        tile(model, {"head": 2})
    for settings in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ConfigError, match=f"an embedding with {next(iter(settings))}=.* cannot be tiled"):
            TiledEmbedding.from_embedding(nn.Embedding(4, 2, **settings), 2)  # type: ignore[arg-type]
