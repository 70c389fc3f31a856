from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import transformers
from torch import nn

from lowtide.errors import BadRecordError, BatchMismatchError, ConfigError, MissingExtraError, UnknownNameError
from lowtide.models import ModelSource, resolve_model

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=16),
    "mixtral": transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4),
    "bert": transformers.BertConfig(**TEXT, pad_token_id=0),
    "t5": transformers.T5Config(
        vocab_size=128, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, decoder_start_token_id=0
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=48, bos_token_id=None, eos_token_id=None
    ),
    "vit": transformers.ViTConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    ),
    "swin": transformers.SwinConfig(
        embed_dim=24, depths=[2, 2], num_heads=[2, 4], image_size=32, patch_size=2, window_size=4, drop_path_rate=0.1
    ),
    "convnext": transformers.ConvNextConfig(
        hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, image_size=32, drop_path_rate=0.1
    ),
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
    "vit": "ViTForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
}
TIED = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "t5": ("shared.weight", "decoder.embed_tokens.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
}


def _save(folder: Path, config: transformers.PretrainedConfig, **changes: object) -> str:
    values = {**config.to_dict(), **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return f"hf:{folder}"


def _resolve(folder: Path, name: str, **changes: object) -> ModelSource:
    return resolve_model(_save(folder, CONFIGS[name], **changes))


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    return model.get_parameter(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_builds_on_meta(name: str, tmp_path: Path) -> None:
    source = _resolve(tmp_path, name, architectures=[CLASSES[name]])
    source.build(None)  # the first build of a family imports its code
    start = time.perf_counter()
    model = source.build(torch.bfloat16)
    assert time.perf_counter() - start < 2.0
    assert type(model).__name__ == CLASSES[name]
    assert source.family == f"hf:{name}"
    assert model.training
    parameters = list(model.parameters())
    assert all(p.requires_grad for p in parameters)
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert {t.device.type for t in [*parameters, *model.buffers()]} == {"meta"}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_a_real_model(name: str, tmp_path: Path) -> None:
    real = getattr(transformers, CLASSES[name])(CONFIGS[name])
    ours = _resolve(tmp_path, name, architectures=[CLASSES[name]]).build(None)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_are_one_parameter(name: str, tmp_path: Path) -> None:
    model = _resolve(tmp_path, name, architectures=[CLASSES[name]]).build(torch.bfloat16)
    first, second = (_parameter(model, path) for path in TIED[name])
    assert first is second


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_trains_a_real_model(name: str, tmp_path: Path) -> None:
    source = _resolve(tmp_path, name, architectures=[CLASSES[name]])
    torch.manual_seed(0)
    real = getattr(transformers, CLASSES[name])(CONFIGS[name]).train()
    loss = real(**source.make_batch("2" if "x3x" in source.default_batch else "2x24")).loss
    loss.backward()
    assert loss.isfinite()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in real.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_without_architectures_gets_the_usual_head(name: str, tmp_path: Path) -> None:
    assert type(_resolve(tmp_path, name, architectures=None).build(None)).__name__ == CLASSES[name]


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("BertForSequenceClassification", {"labels": (3,)}),
        ("BertForTokenClassification", {"labels": (3, 24)}),
        ("BertForQuestionAnswering", {"start_positions": (3,), "end_positions": (3,)}),
        ("BertLMHeadModel", {"labels": (3, 24)}),
    ],
)
def test_the_architecture_chooses_head_and_labels(
    architecture: str, labels: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    source = _resolve(tmp_path, "bert", architectures=[architecture])
    batch = source.make_batch("3x24")
    assert {name: tuple(t.shape) for name, t in batch.items()} == {"input_ids": (3, 24), **labels}
    assert type(source.build(None)).__name__ == architecture
    assert getattr(transformers, architecture)(CONFIGS["bert"])(**batch).loss.isfinite()


def test_dtype_none_is_the_configs(tmp_path: Path) -> None:
    source = _resolve(tmp_path, "llama", dtype="bfloat16")
    assert next(source.build(None).parameters()).dtype == torch.bfloat16
    assert next(source.build(torch.float32).parameters()).dtype == torch.float32


def test_defaults_and_limits(tmp_path: Path) -> None:
    gpt2 = _resolve(tmp_path, "gpt2")
    assert gpt2.default_batch == "8x48"
    with pytest.raises(BatchMismatchError, match="49 tokens, and this model has 48 positions"):
        gpt2.make_batch("2x49")
    llama = _resolve(tmp_path, "llama", max_position_embeddings=131072)
    assert llama.default_batch == "8x2048"
    assert llama.make_batch("1x3000")["input_ids"].shape == (1, 3000)
    assert _resolve(tmp_path, "vit").default_batch == "8x3x32x32"


def test_recompute(tmp_path: Path) -> None:
    spec = _save(tmp_path, CONFIGS["llama"])
    assert resolve_model(spec, recompute=True).build(None).is_gradient_checkpointing
    assert not resolve_model(spec).build(None).is_gradient_checkpointing


def test_config_file_and_pickle(tmp_path: Path) -> None:
    _save(tmp_path, CONFIGS["qwen3"])
    source = cloudpickle.loads(cloudpickle.dumps(resolve_model(f"hf:{tmp_path / 'config.json'}")))
    (tmp_path / "config.json").unlink()  # the source carries its config along
    assert type(source.build(None)).__name__ == "Qwen3ForCausalLM"
    assert source.make_batch("2x8")["input_ids"].shape == (2, 8)


def test_model_id_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    _save(tmp_path, CONFIGS["llama"])
    cached = {"owner/model": str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: cached.get(repo))
    assert resolve_model("hf:owner/model").family == "hf:llama"
    with pytest.raises(UnknownNameError, match="no Hugging Face config .* named 'owner/other'"):
        resolve_model("hf:owner/other")


def test_what_is_not_there() -> None:
    with pytest.raises(
        UnknownNameError, match="a folder with config.json, a config.json, or a model id in the local cache"
    ):
        resolve_model("hf:/no/such/folder")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "cannot be read"), ("[]", "names no model_type"), ('{"vocab_size": 3}', "names no model_type")],
)
def test_a_file_that_is_no_config(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadRecordError, match=problem):
        resolve_model(f"hf:{tmp_path}")


def test_unknown_model_type_names_near_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(UnknownNameError, match="no transformers model type named 'lama'; did you mean 'llama'"):
        resolve_model(f"hf:{tmp_path}")


def test_invalid_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ConfigError, match="is not a valid llama config"):
        resolve_model(f"hf:{tmp_path}")


def test_a_model_without_a_known_batch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    with pytest.raises(
        ConfigError, match="clip config for CLIPModel, and .* put one of CLIPForImageClassification there, or"
    ):
        resolve_model(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sam"}))
    with pytest.raises(ConfigError, match="sam config for no architecture, and .* a loss; write a function"):
        resolve_model(f"hf:{tmp_path}")


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _save(tmp_path, CONFIGS["llama"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lowtide\[transformers\]"'):
        resolve_model(spec)
