"""Models built without memory: what is one Parameter stays one, and any file of the real model fills it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import lowtide
from lowtide.errors import BadRecordError
from tests.runtime.side_by_side import adamw, assert_same_values, in_all_places, manage, seeded
from tests.zoo import assert_same_tensors

VOCABULARY, WIDTH = 64, 32


class Tied(nn.Module):
    """A table that is looked up and projected with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


class Scaled(nn.Module):
    """Holds a Parameter that somebody else made."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale


def empty() -> Tied:
    with lowtide.empty_weights():
        return Tied()


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    ids = torch.arange(VOCABULARY)
    found = []
    for _ in range(4):
        loss = F.cross_entropy(model(ids), ids.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def test_a_tie_between_modules_is_kept() -> None:
    model = empty()
    assert model.head.weight is model.table.weight
    assert [name for name, _ in model.named_parameters()] == ["table.weight"]
    assert model.table.weight.is_meta


def test_one_parameter_given_to_several_modules() -> None:
    """Here the one that is registered second still has its values."""
    scale = nn.Parameter(torch.ones(3))
    with lowtide.empty_weights():
        one, other, third = Scaled(scale), Scaled(scale), Scaled(nn.Parameter(torch.ones(3)))
    assert one.scale is other.scale
    assert one.scale is not third.scale
    assert one.scale.is_meta
    assert not scale.is_meta


def test_values_are_freed_as_the_model_is_built() -> None:
    gc.disable()
    try:
        scale = nn.Parameter(torch.ones(3))
        values = weakref.ref(scale.untyped_storage())
        with lowtide.empty_weights():
            model = Scaled(scale)
            del scale
            assert values() is None
        assert model.scale.is_meta
    finally:
        gc.enable()


def test_a_frozen_tie_stays_frozen() -> None:
    with lowtide.empty_weights():
        model = Tied()
        model.table.weight.requires_grad_(False)
        model.head.weight = model.table.weight
    assert not model.head.weight.requires_grad


@in_all_places
@pytest.mark.parametrize("kept", ["table.weight", "head.weight", "both"])
def test_one_name_of_a_tied_parameter_is_enough(place: str, kept: str, tmp_path: Path) -> None:
    plain = seeded(Tied)
    names = ["table.weight", "head.weight"] if kept == "both" else [kept]
    save_file({name: plain.state_dict()[name].clone() for name in names}, tmp_path / "model.safetensors")
    model = empty()
    optimizer = adamw(model)
    with manage(model, optimizer, place, weights=tmp_path):
        assert_same_values(losses(plain, adamw(plain)), losses(model, optimizer))
    assert model.head.weight is model.table.weight
    assert_same_tensors(plain.state_dict(), model.state_dict())


def test_a_file_of_save_model(tmp_path: Path) -> None:
    """Which drops one of the two names."""
    plain = seeded(Tied)
    save_model(plain, str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) == 1
    model = empty()
    with manage(model, adamw(model), "streamed-host", weights=tmp_path):
        assert_same_tensors(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_folder_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        make = transformers.GPT2LMHeadModel
    else:
        config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        make = transformers.T5ForConditionalGeneration
    plain = make(config)
    plain.save_pretrained(tmp_path)
    with lowtide.empty_weights():
        model = make(config)
    with manage(model, adamw(model), "streamed-host", weights=tmp_path):
        assert_same_tensors(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("where", [0, -1])
def test_two_values_for_one_parameter(where: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first row or in the last, which is read later."""
    monkeypatch.setattr("lowtide.runtime.parameters.weight_file._COMPARED_ELEMENTS", 5 * WIDTH)
    weight = Tied().table.weight.detach()
    other = weight.clone()
    other[where, 0] += 1
    save_file({"table.weight": weight, "head.weight": other}, tmp_path / "model.safetensors")
    model = empty()
    with pytest.raises(BadRecordError, match="table.weight and head.weight are one parameter.* different values"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    assert model.table.weight.is_meta


def test_two_shapes_for_one_parameter(tmp_path: Path) -> None:
    save_file({"table.weight": torch.ones(VOCABULARY, WIDTH), "head.weight": torch.ones(3)}, tmp_path / "m.safetensors")
    model = empty()
    with pytest.raises(BadRecordError, match=r"head.weight has shape \(3,\) in the weight files and \(64, 32\)"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)


def test_a_missing_tensor_names_the_three_nearest(tmp_path: Path) -> None:
    save_file({f"h.{number}.c_fc": torch.ones(1) for number in range(40)}, tmp_path / "model.safetensors")
    model = empty()
    with pytest.raises(BadRecordError) as caught:
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    message = str(caught.value)
    assert message.count("c_fc") == 3
    assert "the nearest of 40 names are" in message
    save_file({"tabel.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadRecordError, match=r"no tensor named 'table.weight', .* did you mean 'tabel.weight'\?$"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
