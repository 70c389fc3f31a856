from __future__ import annotations

from pathlib import Path

import cloudpickle
import pytest
import torch

from lowtide.errors import BatchMismatchError, ConfigError, UnknownNameError
from lowtide.models import built_in_names, resolve_model
from lowtide.models.registry import BUILT_INS, build_from_config


@pytest.mark.parametrize("name", built_in_names())
def test_built_ins_build_on_meta_and_take_their_batch(name: str) -> None:
    source = resolve_model(name)
    model = source.build(torch.bfloat16)
    assert model.training
    parameters = list(model.parameters())
    assert {(p.device.type, p.dtype, p.requires_grad) for p in parameters} == {("meta", torch.bfloat16, True)}
    assert next(source.build(None).parameters()).dtype == torch.float32
    assert source.default_batch.startswith(f"{source.make_batch(source.default_batch)['labels'].shape[0]}x")
    batch = {key: tensor.to("meta") for key, tensor in source.make_batch("2").items()}
    if source.name in {
        "gpt-tiny",
        "llama-tiny",
        "deep-one-tiny",
        "resnet-50",
    }:  # one of each family: a forward takes time
        output = model(**batch)
        assert output.loss.shape == ()
        output.loss.backward()
        assert all(p.grad is not None for p in parameters)


@pytest.mark.parametrize(("name", "family"), [("gpt2", "gpt"), ("llama-8b", "llama"), ("deep-one-tiny", "deep-one")])
def test_families(name: str, family: str) -> None:
    assert resolve_model(name).family == family


def test_sources_are_picklable() -> None:
    for name in built_in_names():
        source = resolve_model(name)
        copy = cloudpickle.loads(cloudpickle.dumps(source))
        assert (copy.name, copy.default_batch) == (name, source.default_batch)
        assert torch.equal(copy.make_batch("1")["labels"], source.make_batch("1")["labels"])
    assert len(list(copy.build(None).parameters())) == 161
    assert len(cloudpickle.dumps(source)) < 2000


def test_recompute() -> None:
    assert resolve_model("llama-tiny", recompute=True).build(None).layers.gradient_checkpointing
    assert not resolve_model("llama-tiny").build(None).layers.gradient_checkpointing
    with pytest.raises(ConfigError, match="resnet-50 cannot recompute its layers: ResNet has no"):
        resolve_model("resnet-50", recompute=True).build(None)


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="no model named 'lama-8b'; did you mean 'llama-8b'"):
        resolve_model("lama-8b")
    with pytest.raises(UnknownNameError, match="no model named 'zzz'; choose one of .*gpt2, .*resnet-50"):
        resolve_model("zzz")


def test_the_folder_of_a_model_without_its_prefix_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"is the folder of a Hugging Face model: give hf:{tmp_path}"):
        resolve_model(str(tmp_path))


def test_batches_that_do_not_fit() -> None:
    with pytest.raises(BatchMismatchError, match="1025 tokens, and this model has 1024 positions"):
        resolve_model("gpt2").make_batch("1x1025")
    with pytest.raises(BatchMismatchError, match="write BATCHxLENGTH such as 4x2048"):
        resolve_model("llama-8b").make_batch("many")
    with pytest.raises(BatchMismatchError, match="write BATCHxCHANNELSxHEIGHTxWIDTH such as 64x3x224x224"):
        resolve_model("resnet-50").make_batch("64x224")
    assert resolve_model("llama-70b").make_batch("1x9000")["input_ids"].max() < 128256


# From the published checkpoints; the 20B, which is none, by hand: 48 layers of 4 attention and 3 MLP matrices and 2
# norms, two tables and a norm.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-20b": 48 * (2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16384 + 2 * 6144) + 2 * 128256 * 6144 + 6144,
    "llama-70b": 70_553_706_496,
    "deep-one-1.6b": 1_631_455_744,
    "deep-one-1.6b-fused-norm": 1_631_455_744,
    "resnet-50": 25_557_032,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = build_from_config(BUILT_INS[name].config)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_only_the_tiny_ones_are_uncounted() -> None:
    assert {name for name in BUILT_INS if name not in PARAMETERS} == {"gpt-tiny", "llama-tiny", "deep-one-tiny"}
    for name in ("gpt-tiny", "llama-tiny", "deep-one-tiny"):
        assert sum(p.numel() for p in build_from_config(BUILT_INS[name].config).parameters()) < 10**6
