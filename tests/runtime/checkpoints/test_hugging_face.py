"""A checkpoint's folder is a Hugging Face one: `from_pretrained` loads it as it is, and what it saves has the same form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowtide.runtime.checkpoints.folder import RunFolder
from lowtide.runtime.checkpoints.format import CheckpointWriter, TensorSpec
from tests.runtime.checkpoints.power_cut import QuickDisk
from tests.runtime.checkpoints.saves import saving

transformers = pytest.importorskip("transformers")


def tiny_model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    assert isinstance(model, torch.nn.Module)
    return model


def once(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights under their first names: a tied one is saved once."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 4000], ids=["one_file", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_pretrained_loads_the_folder(tmp_path: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
    model = tiny_model(dtype)
    weights = once(model)
    assert "lm_head.weight" in model.state_dict()
    assert "lm_head.weight" not in weights
    specs = {
        "model": {name: TensorSpec.of(value) for name, value in weights.items()},
        "optimizer": {"exp_avg.0": TensorSpec(dtype=torch.float32, shape=(64, 16))},
    }
    with RunFolder(tmp_path, disk=QuickDisk()) as run, saving(run, 5) as partial:
        writer = CheckpointWriter(partial, specs, max_file_bytes=max_file_bytes, disk=QuickDisk())
        for name, value in weights.items():
            writer.write("model", name, value)
        writer.write("optimizer", "exp_avg.0", torch.ones(64, 16))
        writer.add_file("config.json", model.config.to_json_string())
        writer.finish(step=5, state={})
    folder = tmp_path / "step-00000005"
    assert (folder / "model.safetensors").exists() is (max_file_bytes > 4000)

    loaded = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_the_index_is_the_one_that_transformers_writes(tmp_path: Path) -> None:
    """The same names of files, the same keys, and the same total."""
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    theirs = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    weights = once(model)
    (tmp_path / "ours").mkdir()
    specs = {"model": {name: TensorSpec.of(value) for name, value in weights.items()}}
    with CheckpointWriter(tmp_path / "ours", specs, max_file_bytes=8000, disk=QuickDisk()) as writer:
        for name, value in weights.items():
            writer.write("model", name, value)
        writer.finish(step=1, state={})
    ours = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert all((tmp_path / "ours" / file).is_file() for file in ours["weight_map"].values())
    count = len(set(ours["weight_map"].values()))
    assert set(ours["weight_map"].values()) == {f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)}
    assert {len(name) for name in ours["weight_map"].values()} == {len(name) for name in theirs["weight_map"].values()}
