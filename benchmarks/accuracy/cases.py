"""The accuracy suite as data: each case is one training step that is both predicted and measured.

`suite()` is what the published figures are made of. `held_out()` holds other models, written down at the same time. It is not a
blind test: its results and its operators' measurements were seen while the predictor was worked on (docs/accuracy.md).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy import networks

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    precision: str = "fp32"
    """`fp32`, `bf16` (the whole model) or `autocast` (fp32 weights, bf16 autocast)."""
    optimizer: str = "adamw"
    recompute: bool = False
    accumulate: int = 1
    frozen: tuple[str, ...] = ()
    """Prefixes of parameter names that do not train."""
    channels_last: bool = False
    activations: str | None = None
    """An activation policy of Lowtide's, as `StepSettings.activations`."""
    chunked_loss: bool = False
    """Lowtide's chunked head in place of the model's own."""

    def make_model(self) -> nn.Module:
        """The model in training mode and in its precision, on whichever device is the default."""
        model = self.build().train()
        if self.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.precision == "bf16":
            model = model.to(torch.bfloat16)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen) and self.frozen:
                parameter.requires_grad_(False)
        return model

    def make_batch(self) -> Batch:
        """The batch, floats in the model's dtype."""
        batch = self.batch()
        if self.precision == "bf16":
            batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
        if self.channels_last:
            batch = {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in batch.items()}
        return batch

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters."""
        return OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])

    def apply_settings(self, model: nn.Module) -> None:
        """Put Lowtide's policy and head on a real model, for good. Other cases are plain torch and import none of it."""
        if self.chunked_loss:
            from lowtide.activations.losses.huggingface import chunked_head

            chunked_head(model)
        if self.activations is not None:
            from lowtide.activations import apply

            apply(model, self.settings().policy)

    def settings(self) -> Any:
        """The step's settings for a prediction."""
        from lowtide import StepSettings

        return StepSettings(accumulate=self.accumulate, activations=self.activations, chunked_loss=self.chunked_loss)

    @contextlib.contextmanager
    def autocast(self, device_type: str) -> Iterator[None]:
        """The autocast context the forward and the loss run under."""
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=self.precision == "autocast"):
            yield


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "lion-like-adamax": lambda p: torch.optim.Adamax(p, lr=1e-4),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-4),
}


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        resolved = getattr(transformers, config)(**settings)
        return getattr(transformers, model)(resolved)

    return build


def _tokens(
    batch: int, length: int, vocabulary: int, *, padded: bool = False, **extra: tuple[int, ...]
) -> Callable[[], Batch]:
    def make() -> Batch:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
        result = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            mask = torch.ones(batch, length, dtype=torch.int64)
            mask[:, -length // 8 :] = 0
            result["attention_mask"] = mask
        return result

    return make


def _images(batch: int, size: int, classes: int = 1000) -> Callable[[], Batch]:
    def make() -> Batch:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (batch,), generator=generator)}

    return make


def _masks(batch: int, size: int, classes: int) -> Callable[[], Batch]:
    def make() -> Batch:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (batch, size, size), generator=generator)}

    return make


LLAMA = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000, use_cache=False,
)  # fmt: skip
LLAMA_1B = dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, use_cache=False, tie_word_embeddings=True,
)  # fmt: skip
QWEN3 = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, use_cache=False, tie_word_embeddings=True,
)  # fmt: skip
MIXTRAL = dict(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=4,
    num_local_experts=8, num_experts_per_tok=2, vocab_size=32000, use_cache=False,
)  # fmt: skip


def _llama(name: str, batch: str = "4x1024", **fields: Any) -> Case:
    size, length = (int(part) for part in batch.split("x"))
    config = {**LLAMA, **fields.pop("config", {})}
    return Case(
        name=f"llama-{name}", family="Llama", build=_hugging_face("LlamaForCausalLM", "LlamaConfig", **config),
        batch=_tokens(size, length, config["vocab_size"]), **fields,
    )  # fmt: skip


def _transformers(
    name: str, family: str, model: str, config: str, batch: Callable[[], Batch], settings: dict[str, Any], **fields: Any
) -> Case:
    return Case(name=name, family=family, build=_hugging_face(model, config, **settings), batch=batch, **fields)


def suite() -> list[Case]:
    """The published cases."""
    cases = [
        _llama("fp32", precision="fp32"),
        _llama("bf16", precision="bf16"),
        _llama("autocast", precision="autocast"),
        _llama("bf16-recompute", precision="bf16", recompute=True),
        _llama("autocast-recompute-fused", precision="autocast", recompute=True, optimizer="adamw-fused"),
        _llama("bf16-fused", precision="bf16", optimizer="adamw-fused"),
        _llama("bf16-loop", precision="bf16", optimizer="adamw-loop"),
        _llama("bf16-sgd", precision="bf16", optimizer="sgd"),
        _llama("bf16-adafactor", precision="bf16", optimizer="adafactor"),
        _llama("bf16-small-batch", batch="1x256", precision="bf16"),
        _llama("bf16-small-batch-fused", batch="1x256", precision="bf16", optimizer="adamw-fused"),
        _llama(
            "bf16-frozen",
            precision="bf16",
            frozen=("model.embed", "model.layers.0.", "model.layers.1.", "model.layers.2."),
        ),
        _llama("bf16-accumulate", precision="bf16", accumulate=4),
        _llama("bf16-eager-attention", precision="bf16", config={"attn_implementation": "eager"}),
        _llama("bf16-8k", batch="1x8192", precision="bf16", recompute=True),
        _llama(
            "1b-bf16-recompute-fused",
            batch="4x2048",
            config=LLAMA_1B,
            precision="bf16",
            recompute=True,
            optimizer="adamw-fused",
        ),
        _llama("1b-autocast", batch="2x1024", config=LLAMA_1B, precision="autocast"),
    ]
    cases += [
        _transformers(
            f"qwen3-{tag}", "Qwen3", "Qwen3ForCausalLM", "Qwen3Config", _tokens(2, 1024, 151936), QWEN3, **fields
        )
        for tag, fields in {
            "fp32-fused": dict(optimizer="adamw-fused"),
            "bf16": dict(precision="bf16"),
            "autocast": dict(precision="autocast"),
            "bf16-recompute": dict(precision="bf16", recompute=True),
        }.items()
    ]
    gpt2 = dict(n_layer=12, n_embd=768, n_head=12, use_cache=False)
    cases += [
        _transformers(f"gpt2-{tag}", "GPT-2", "GPT2LMHeadModel", "GPT2Config", _tokens(8, 512, 50257), gpt2, **fields)
        for tag, fields in {
            "fp32": {},
            "fp32-recompute": dict(recompute=True),
            "bf16": dict(precision="bf16"),
            "autocast": dict(precision="autocast"),
            "autocast-sgd": dict(precision="autocast", optimizer="sgd"),
        }.items()
    ]
    bert = dict(num_hidden_layers=12, hidden_size=768)
    cases += [
        _transformers(
            f"bert-{tag}", "BERT", "BertForMaskedLM", "BertConfig", _tokens(16, 256, 30522, padded=True), bert, **fields
        )
        for tag, fields in {
            "fp32": {},
            "bf16-loop": dict(precision="bf16", optimizer="adamw-loop"),
            "autocast": dict(precision="autocast"),
            "autocast-recompute": dict(precision="autocast", recompute=True),
        }.items()
    ]
    t5 = dict(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, use_cache=False, decoder_start_token_id=0)
    cases += [
        _transformers(f"t5-{tag}", "T5", "T5ForConditionalGeneration", "T5Config", _tokens(8, 512, 32128), t5, **fields)
        for tag, fields in {
            "fp32": {},
            "bf16": dict(precision="bf16"),
            "bf16-recompute-adafactor": dict(precision="bf16", recompute=True, optimizer="adafactor"),
        }.items()
    ]
    cases += [
        _transformers(
            f"mixtral-{tag}",
            "Mixtral",
            "MixtralForCausalLM",
            "MixtralConfig",
            _tokens(4, 512, 32000),
            MIXTRAL,
            **fields,
        )
        for tag, fields in {
            "bf16": dict(precision="bf16"),
            "autocast": dict(precision="autocast"),
            "bf16-recompute": dict(precision="bf16", recompute=True),
        }.items()
    ]
    vit = dict(hidden_size=768, num_hidden_layers=12, num_labels=1000)
    cases += [
        _transformers(f"vit-{tag}", "ViT", "ViTForImageClassification", "ViTConfig", _images(64, 224), vit, **fields)
        for tag, fields in {"fp32": {}, "bf16": dict(precision="bf16"), "autocast": dict(precision="autocast")}.items()
    ]
    swin = dict(num_labels=1000, image_size=224)
    cases += [
        _transformers(
            f"swin-{tag}", "Swin", "SwinForImageClassification", "SwinConfig", _images(32, 224), swin, **fields
        )
        for tag, fields in {"fp32": {}, "bf16": dict(precision="bf16"), "autocast": dict(precision="autocast")}.items()
    ]
    convnext = dict(num_labels=1000, drop_path_rate=0.1)
    cases += [
        _transformers(
            f"convnext-{tag}",
            "ConvNeXt",
            "ConvNextForImageClassification",
            "ConvNextConfig",
            _images(32, 224),
            convnext,
            **fields,
        )
        for tag, fields in {"fp32": {}, "bf16": dict(precision="bf16"), "autocast": dict(precision="autocast")}.items()
    ]
    resnet = dict(num_labels=1000)
    cases += [
        _transformers(
            f"resnet-{tag}",
            "ResNet",
            "ResNetForImageClassification",
            "ResNetConfig",
            _images(64, 224),
            resnet,
            **fields,
        )
        for tag, fields in {
            "fp32-sgd": dict(optimizer="sgd"),
            "bf16": dict(precision="bf16"),
            "autocast": dict(precision="autocast"),
            "autocast-channels-last-sgd": dict(precision="autocast", channels_last=True, optimizer="sgd"),
        }.items()
    ]
    cases += [
        Case(
            name=f"nn-transformer-{tag}",
            family="nn.Transformer",
            build=networks.TranslationTransformer,
            batch=_tokens(16, 256, 16000),
            **fields,
        )
        for tag, fields in {"fp32": {}, "bf16": dict(precision="bf16"), "autocast": dict(precision="autocast")}.items()
    ]
    cases += [
        Case(name=f"unet-{tag}", family="UNet", build=networks.UNet, batch=_masks(8, 256, 8), **fields)
        for tag, fields in {"fp32": {}, "bf16": dict(precision="bf16"), "autocast": dict(precision="autocast")}.items()
    ]
    return cases


POLICIES = {
    "keep": dict(activations="keep"),
    "selective": dict(activations="selective"),
    "recompute": dict(activations="recompute"),
    "segments": dict(activations="recompute/4"),
    "offload": dict(activations="offload"),
    "offload-all": dict(activations="offload/all"),
    "chunked-loss": dict(chunked_loss=True),
    "recompute-chunked-loss": dict(activations="recompute", chunked_loss=True),
    "offload-chunked-loss": dict(activations="offload", chunked_loss=True),
}  # fmt: skip
"""Fields of a case."""


def policies() -> list[Case]:
    """Llamas under each activation policy, and with a chunked loss: the only cases in which Lowtide's own code is measured."""
    return [
        _llama(f"{size}policy-{name}", batch=batch, config=config, precision="bf16", optimizer="adamw-fused", **fields)
        for size, batch, config in (("", "8x2048", {}), ("1b-", "8x2048", LLAMA_1B))
        for name, fields in POLICIES.items()
    ] + [
        _llama(
            "policy-autocast-offload-chunked",
            batch="8x2048",
            precision="autocast",
            activations="offload",
            chunked_loss=True,
        )
    ]


def held_out() -> list[Case]:
    """Other models, written down beside the suite; seen during the work, so not blind."""
    small = dict(hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, use_cache=False)
    rows: list[tuple[str, str, str, Callable[[], Batch], dict[str, Any], dict[str, Any]]] = [
        ("mistral-bf16", "MistralForCausalLM", "MistralConfig", _tokens(2, 2048, 32000), {**small, "intermediate_size": 3584, "num_key_value_heads": 4, "sliding_window": 512}, dict(precision="bf16")),
        ("gemma2-bf16", "Gemma2ForCausalLM", "Gemma2Config", _tokens(2, 512, 256000), {**small, "intermediate_size": 4096, "num_key_value_heads": 8, "head_dim": 64}, dict(precision="bf16")),
        ("phi3-autocast", "Phi3ForCausalLM", "Phi3Config", _tokens(2, 1024, 32064), {**small, "intermediate_size": 4096, "pad_token_id": 0}, dict(precision="autocast")),
        ("opt-fp32", "OPTForCausalLM", "OPTConfig", _tokens(4, 512, 50272), {**small, "ffn_dim": 4096, "word_embed_proj_dim": 1024}, dict(optimizer="adamw-loop")),
        ("gpt-neox-autocast", "GPTNeoXForCausalLM", "GPTNeoXConfig", _tokens(4, 512, 50432), {**small, "intermediate_size": 4096}, dict(precision="autocast", recompute=True)),
        ("falcon-bf16", "FalconForCausalLM", "FalconConfig", _tokens(4, 512, 65024), small, dict(precision="bf16", optimizer="adamw-fused")),
        ("bloom-fp32", "BloomForCausalLM", "BloomConfig", _tokens(2, 512, 50000), dict(hidden_size=1024, n_layer=6, n_head=16, use_cache=False, vocab_size=50000), {}),
        ("qwen2-moe-bf16", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _tokens(4, 512, 32000), {**small, "num_key_value_heads": 8, "vocab_size": 32000, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 2048, "num_experts": 16}, dict(precision="bf16")),
        ("olmo2-bf16", "Olmo2ForCausalLM", "Olmo2Config", _tokens(4, 1024, 50304), {**small, "intermediate_size": 4096, "pad_token_id": 0}, dict(precision="bf16", optimizer="sgd")),
        ("roberta-autocast", "RobertaForMaskedLM", "RobertaConfig", _tokens(16, 256, 50265, padded=True), {}, dict(precision="autocast")),
        ("distilbert-fp32", "DistilBertForMaskedLM", "DistilBertConfig", _tokens(32, 256, 30522, padded=True), {}, dict(optimizer="rmsprop")),
        ("deberta-v2-fp32", "DebertaV2ForMaskedLM", "DebertaV2Config", _tokens(8, 256, 32000, padded=True), dict(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072, vocab_size=32000, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=-1), {}),
        ("electra-bf16", "ElectraForMaskedLM", "ElectraConfig", _tokens(32, 256, 30522, padded=True), {}, dict(precision="bf16", optimizer="nadam")),
        ("dinov2-autocast", "Dinov2ForImageClassification", "Dinov2Config", _images(32, 224), dict(num_labels=1000), dict(precision="autocast")),
        ("beit-fp32", "BeitForImageClassification", "BeitConfig", _images(16, 224), dict(num_labels=1000), {}),
        ("segformer-fp32", "SegformerForSemanticSegmentation", "SegformerConfig", _masks(4, 512, 19), dict(num_labels=19), {}),
        ("mobilenet-v2-fp32", "MobileNetV2ForImageClassification", "MobileNetV2Config", _images(64, 224), dict(num_labels=1000), dict(optimizer="sgd")),
        ("regnet-autocast", "RegNetForImageClassification", "RegNetConfig", _images(64, 224), dict(num_labels=1000), dict(precision="autocast")),
        ("convnextv2-fp32", "ConvNextV2ForImageClassification", "ConvNextV2Config", _images(32, 224), dict(num_labels=1000), {}),
        ("swinv2-autocast", "Swinv2ForImageClassification", "Swinv2Config", _images(16, 256), dict(num_labels=1000, image_size=256, window_size=8), dict(precision="autocast")),
        ("bart-bf16", "BartForConditionalGeneration", "BartConfig", _tokens(8, 256, 50265), dict(d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12, use_cache=False), dict(precision="bf16")),
    ]  # fmt: skip
    cases = [
        _transformers(name, name.split("-")[0], model, config, batch, settings, **fields)
        for name, model, config, batch, settings, fields in rows
    ]
    cases.append(Case(name="lstm-fp32", family="LSTM", build=networks.RecurrentLM, batch=_tokens(32, 256, 10000)))
    mlp_batch = lambda: {"inputs": torch.randn(4096, 4096), "labels": torch.randint(0, 1000, (4096,))}  # noqa: E731
    cases.append(Case(name="mlp-fp32", family="MLP", build=networks.MixerMLP, batch=mlp_batch, optimizer="sgd-plain"))
    cases.append(
        Case(name="mlp-autocast", family="MLP", build=networks.MixerMLP, batch=mlp_batch, precision="autocast")
    )
    return cases
