"""Models built on meta and filled from safetensors, group by group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lowtide.errors import BadRecordError, SessionError
from tests.runtime.side_by_side import (
    WIDTH,
    Block,
    Tower,
    adamw,
    assert_same_values,
    in_all_places,
    inputs,
    manage,
    seeded,
    steps,
)
from tests.zoo import assert_same_tensors


def saved(model: nn.Module, path: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    return path


def on_meta(kind: type[nn.Module] = Tower) -> nn.Module:
    with torch.device("meta"):
        return kind()


@in_all_places
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_model_on_meta_trains_as_one_that_was_never_there(place: str, is_folder: bool, tmp_path: Path) -> None:
    plain = seeded(Tower)
    tensors = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    path = tmp_path / "model.safetensors"
    if is_folder:
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names[::2]}, tmp_path / "one.safetensors")
        save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "two.safetensors")
        path = tmp_path
    else:
        save_file(tensors, path)
    model = on_meta()
    parameters = list(model.parameters())
    optimizer = adamw(model)
    with manage(model, optimizer, place, weights=path):
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        assert_same_tensors(plain.state_dict(), model.state_dict())
        assert_same_values(steps(plain, adamw(plain)), steps(model, optimizer))
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert not any(parameter.is_meta for parameter in model.parameters())


class TiedTower(Tower):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner.weight = self.blocks[0].inner.weight  # type: ignore[union-attr]


class NormTower(Tower):
    """With buffers, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("kept", ["blocks.0.inner.weight", "blocks.1.inner.weight", "both"])
def test_tied_weights_under_any_of_their_names(kept: str, tmp_path: Path) -> None:
    """Files hold a tied weight once, under the name that the one who saved it liked best."""
    plain = seeded(TiedTower)
    tensors = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for name in ("blocks.0.inner.weight", "blocks.1.inner.weight"):
        if kept not in (name, "both"):
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    model = on_meta(TiedTower)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host", weights=tmp_path):
        assert_same_values(steps(plain, adamw(plain)), steps(model, optimizer))


def test_buffers_come_from_the_file_too(tmp_path: Path) -> None:
    plain = seeded(NormTower)
    with torch.no_grad():
        plain(inputs(0, 9))
    path = saved(plain, tmp_path / "model.safetensors")
    model = on_meta(NormTower)
    optimizer = adamw(model)
    with manage(model, optimizer, "mixed", weights=path):
        assert_same_tensors(plain.state_dict(), model.state_dict())
        assert_same_values(steps(plain, adamw(plain)), steps(model, optimizer))


def test_values_are_converted_to_the_model_s_dtype(tmp_path: Path) -> None:
    plain = seeded(Tower).bfloat16()
    path = saved(plain, tmp_path / "model.safetensors")
    model = on_meta()
    with manage(model, adamw(model), "streamed-host", weights=path):
        assert_same_tensors(plain.float().state_dict(), model.state_dict())


def test_a_model_with_values_takes_those_of_the_file(tmp_path: Path) -> None:
    path = saved(seeded(Tower), tmp_path / "model.safetensors")
    model = Tower()
    with manage(model, adamw(model), "mixed", weights=path):
        assert_same_tensors(seeded(Tower).state_dict(), model.state_dict())


# What does not fit: told before anything is touched


def assert_untouched(model: nn.Module) -> None:
    assert all(parameter.is_meta for parameter in model.parameters()), "some parameters were filled"


@pytest.mark.parametrize("missing", ["stem.weight", "head.bias"])
def test_a_missing_tensor(missing: str, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in seeded(Tower).state_dict().items()}
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    model = on_meta()
    with pytest.raises(BadRecordError, match=f"have no tensor named '{missing}'"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    assert_untouched(model)


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in seeded(Tower).state_dict().items()}
    tensors["head.bias"] = torch.zeros(5)
    save_file(tensors, tmp_path / "model.safetensors")
    model = on_meta()
    with pytest.raises(BadRecordError, match=r"head.bias has shape \(5,\) in the weight files and \(4,\) in the model"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    assert_untouched(model)


def test_tensors_that_the_model_does_not_have(tmp_path: Path) -> None:
    """A file of another model, or a larger one: the surplus is told, not dropped in silence."""
    tensors = {name: tensor.clone() for name, tensor in seeded(Tower).state_dict().items()}
    tensors |= {f"blocks.3.{name}": tensor for name, tensor in Block().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = on_meta()
    optimizer = adamw(model)
    with (
        pytest.warns(UserWarning, match=r"has 4 tensors that the model does not have.*'blocks.3.inner.bias'"),
        manage(model, optimizer, "streamed-host", weights=tmp_path),
    ):
        assert_same_tensors(seeded(Tower).state_dict(), model.state_dict())


def test_one_name_in_two_files(tmp_path: Path) -> None:
    saved(seeded(Tower), tmp_path / "one.safetensors")
    saved(Tower(), tmp_path / "two.safetensors")
    model = on_meta()
    with pytest.raises(BadRecordError, match="'blocks.0.inner.bias' is in one.safetensors and in two.safetensors"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    assert_untouched(model)


def test_no_file_and_no_weights(tmp_path: Path) -> None:
    model = on_meta()
    with pytest.raises(BadRecordError, match="there is no safetensors file at"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadRecordError, match="broken.safetensors is not a safetensors file"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
    with pytest.raises(SessionError, match="18 parameters are on the meta device"):
        manage(model, adamw(model), "streamed-host")
    assert_untouched(model)


def test_a_buffer_on_meta_that_no_file_has(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in seeded(NormTower).state_dict().items()}
    del tensors["batch_norm.running_mean"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = on_meta(NormTower)
    with pytest.raises(SessionError, match="batch_norm.running_mean is on the meta device"):
        manage(model, adamw(model), "streamed-host", weights=tmp_path)
