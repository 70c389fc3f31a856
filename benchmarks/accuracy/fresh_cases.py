"""The steps of the `fresh` suite: architectures, sizes and precisions that no other list has, each measured in its own process.

Two lists, each committed with its predictions before any of it was measured: `fresh`, from whose measurements rules were mended
afterwards, and `fresh2`, which came after the mends. A case that turns out badly stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.accuracy import networks
from benchmarks.accuracy.cases import Batch, Case, _hugging_face, _images, _masks, _tokens


def _noise(batch: int, size: int, channels: int = 4) -> Callable[[], Batch]:
    def make() -> Batch:
        shape = (batch, channels, size, size)
        return {"noisy": torch.randn(shape), "level": torch.linspace(0, 1, batch), "noise": torch.randn(shape)}

    return make


def _waveform(batch: int, samples: int, frames: int, tokens: int = 64) -> Callable[[], Batch]:
    def make() -> Batch:
        return {"waveform": torch.randn(batch, samples), "labels": torch.randint(0, tokens, (batch, frames))}

    return make


def _clips(batch: int, frames: int, size: int) -> Callable[[], Batch]:
    def make() -> Batch:
        return {"clip": torch.randn(batch, 3, frames, size, size), "labels": torch.randint(0, 400, (batch,))}

    return make


def _spectrogram(batch: int, frames: int, length: int, vocabulary: int) -> Callable[[], Batch]:
    def make() -> Batch:
        labels = torch.randint(0, vocabulary, (batch, length))
        return {"input_features": torch.randn(batch, 80, frames), "labels": labels}

    return make


def _causal(config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    return _hugging_face(f"{config}ForCausalLM", f"{config}Config", use_cache=False, **settings)


def _classifier(config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    return _hugging_face(f"{config}ForImageClassification", f"{config}Config", num_labels=1000, **settings)


def _bert(**settings: Any) -> Callable[[], torch.nn.Module]:
    return _hugging_face("BertForMaskedLM", "BertConfig", **settings)


def _efficientnet() -> Callable[[], torch.nn.Module]:
    return _classifier("EfficientNet", **SMALL_EFFICIENTNET)


def _roberta() -> Callable[[], torch.nn.Module]:
    return _hugging_face("RobertaForMaskedLM", "RobertaConfig", num_hidden_layers=8)


def _bart() -> Callable[[], torch.nn.Module]:
    return _hugging_face("BartForConditionalGeneration", "BartConfig", **SMALL_BART)


def _translation(vocabulary: int, width: int, layers: int) -> Callable[[], torch.nn.Module]:
    return partial(networks.TranslationTransformer, vocabulary, width, layers)


def _tagger(
    width: int, layers: int, kind: type[torch.nn.RNNBase], dropout: float = 0.0
) -> Callable[[], torch.nn.Module]:
    return partial(networks.RecurrentTagger, 12000, width, layers, kind=kind, dropout=dropout)


def _whisper() -> Callable[[], torch.nn.Module]:
    return _hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **SMALL_WHISPER)


def _gpt2(layers: int, width: int, heads: int) -> Callable[[], torch.nn.Module]:
    return _hugging_face("GPT2LMHeadModel", "GPT2Config", n_layer=layers, n_embd=width, n_head=heads, use_cache=False)


FP32: dict[str, Any] = dict(precision="fp32")
BF16: dict[str, Any] = dict(precision="bf16")
AUTOCAST: dict[str, Any] = dict(precision="autocast")
LAST: dict[str, Any] = dict(channels_last=True)
SGD: dict[str, Any] = dict(optimizer="sgd")
FUSED: dict[str, Any] = dict(optimizer="adamw-fused")

BASIC = dict(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
DEEP = dict(depths=[3, 4, 23, 3])
SMALL_LLAMA = dict(
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=6,
    num_attention_heads=12,
    num_key_value_heads=6,
    vocab_size=24000,
)
EXPERTS = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    vocab_size=20000,
)
GATED_T5 = dict(
    d_model=640,
    d_kv=64,
    d_ff=1792,
    num_layers=4,
    num_heads=10,
    feed_forward_proj="gated-gelu",
    use_cache=False,
    decoder_start_token_id=0,
)
WIDE_BERT = dict(hidden_size=1024, num_hidden_layers=5, num_attention_heads=16, intermediate_size=4096)
SMALL_WHISPER = dict(
    d_model=384,
    encoder_layers=4,
    decoder_layers=4,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    encoder_ffn_dim=1536,
    decoder_ffn_dim=1536,
    use_cache=False,
)
SMALL_SWIN = dict(image_size=224, embed_dim=64, depths=[2, 2, 4, 2], num_heads=[2, 4, 8, 16])
SMALL_VIT = dict(hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536, image_size=192)
LARGE_PATCHES = dict(hidden_size=768, num_hidden_layers=8, patch_size=32, image_size=384)
SMALL_EFFICIENTNET = dict(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
NARROW_CONVNEXT = dict(depths=[2, 2, 6, 2], hidden_sizes=[64, 128, 256, 512])


BASIC_34 = dict(layer_type="basic", depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 256, 512])
WIDE_CONVNEXT = dict(depths=[2, 2, 4, 2], hidden_sizes=[128, 256, 512, 1024])
NARROW_REGNET = dict(hidden_sizes=[96, 192, 432, 1008], depths=[2, 6, 8, 2], groups_width=48)
SMALL_OPT = dict(
    hidden_size=640,
    ffn_dim=2560,
    num_hidden_layers=6,
    num_attention_heads=10,
    vocab_size=32000,
    word_embed_proj_dim=640,
)
SMALL_QWEN2 = dict(
    hidden_size=704,
    intermediate_size=1920,
    num_hidden_layers=5,
    num_attention_heads=11,
    num_key_value_heads=1,
    vocab_size=28000,
)
SMALL_BART = dict(
    d_model=512,
    encoder_layers=4,
    decoder_layers=3,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=1536,
    vocab_size=30000,
    use_cache=False,
)
SMALL_DEIT = dict(hidden_size=448, num_hidden_layers=7, num_attention_heads=7, intermediate_size=1792)

Row = tuple[str, str, Callable[[], torch.nn.Module], Callable[[], Batch], dict[str, Any]]


def fresh() -> list[Case]:
    """The first list."""
    rows: list[Row] = [
        ("UNet", "autocast-last", partial(networks.UNet, 48), _masks(6, 192, 8), AUTOCAST | LAST),
        ("UNet", "fp32-last-sgd", partial(networks.UNet, 32), _masks(12, 160, 8), FP32 | LAST | SGD),
        ("UNet", "bf16-shallow", partial(networks.UNet, 64, 3), _masks(4, 320, 8), BF16),
        ("Diffusion UNet", "fp32", networks.DiffusionUNet, _noise(8, 64), FP32),
        ("Diffusion UNet", "autocast", partial(networks.DiffusionUNet, 192), _noise(8, 48), AUTOCAST),
        ("Diffusion UNet", "autocast-last-fused", networks.DiffusionUNet, _noise(12, 64), AUTOCAST | LAST | FUSED),
        ("ResNet", "18-fp32", _classifier("ResNet", **BASIC), _images(96, 160), FP32),
        ("ResNet", "50-autocast-last", _classifier("ResNet"), _images(48, 192), AUTOCAST | LAST),
        ("ResNet", "101-bf16-last-sgd", _classifier("ResNet", **DEEP), _images(20, 224), BF16 | LAST | SGD),
        ("RegNet", "fp32-sgd", _classifier("RegNet"), _images(24, 192), FP32 | SGD),
        ("RegNet", "bf16-last", _classifier("RegNet"), _images(40, 224), BF16 | LAST),
        ("DenseNet", "fp32-sgd", networks.DenseNet, _images(24, 192), FP32 | SGD),
        ("DenseNet", "autocast-last", networks.DenseNet, _images(32, 192), AUTOCAST | LAST),
        ("ConvNeXt", "narrow-fp32", _classifier("ConvNext", **NARROW_CONVNEXT), _images(24, 192), FP32),
        ("ConvNeXt", "autocast-last", _classifier("ConvNext"), _images(24, 192), AUTOCAST | LAST),
        ("MobileNetV2", "autocast-last", _classifier("MobileNetV2"), _images(64, 192), AUTOCAST | LAST),
        ("EfficientNet", "fp32", _classifier("EfficientNet", **SMALL_EFFICIENTNET), _images(20, 224), FP32),
        ("3-d convolutions", "fp32", networks.VideoNet, _clips(4, 16, 64), FP32),
        ("3-d convolutions", "autocast-sgd", networks.VideoNet, _clips(6, 16, 80), AUTOCAST | SGD),
        ("LSTM", "fp32", partial(networks.RecurrentLM, 16000, 512, 3), _tokens(64, 128, 16000), FP32),
        ("LSTM", "autocast", partial(networks.RecurrentLM, 12000, 768, 3), _tokens(48, 160, 12000), AUTOCAST),
        ("LSTM", "bf16-fused", partial(networks.RecurrentLM, 20000, 1280, 2), _tokens(40, 128, 20000), BF16 | FUSED),
        ("GRU", "fp32", networks.RecurrentTagger, _tokens(64, 256, 12000), FP32),
        ("GRU", "bf16", partial(networks.RecurrentTagger, 12000, 896, 2), _tokens(64, 192, 12000), BF16),
        ("GPT-2", "autocast", _gpt2(8, 640, 10), _tokens(6, 384, 50257), AUTOCAST),
        ("GPT-2", "autocast-recompute-fused", _gpt2(6, 1024, 16), _tokens(4, 768, 50257), AUTOCAST | FUSED | dict(recompute=True)),
        ("GPT-2", "autocast-small", _gpt2(6, 512, 8), _tokens(2, 512, 50257), AUTOCAST),
        ("Llama", "fp32", _causal("Llama", **SMALL_LLAMA), _tokens(3, 640, 24000), FP32),
        ("Llama", "autocast-recompute", _causal("Llama", **SMALL_LLAMA), _tokens(6, 640, 24000), AUTOCAST | dict(recompute=True)),
        ("T5", "autocast", _hugging_face("T5ForConditionalGeneration", "T5Config", **GATED_T5), _tokens(6, 384, 32128), AUTOCAST),
        ("BERT", "autocast-padded", _bert(**WIDE_BERT), _tokens(24, 128, 30522, padded=True), AUTOCAST),
        ("BERT", "fp32-sgd", _bert(num_hidden_layers=6), _tokens(12, 192, 30522), FP32 | SGD),
        ("Mixtral", "autocast", _causal("Mixtral", **EXPERTS), _tokens(4, 384, 20000), AUTOCAST),
        ("ViT", "fp32-small", _classifier("ViT", **SMALL_VIT), _images(64, 192), FP32),
        ("ViT", "autocast-large-patches", _classifier("ViT", **LARGE_PATCHES), _images(32, 384), AUTOCAST),
        ("Swin", "fp32-small", _classifier("Swin", **SMALL_SWIN), _images(32, 224), FP32),
        ("Swin", "autocast-small", _classifier("Swin", **SMALL_SWIN), _images(40, 224), AUTOCAST),
        ("nn.Transformer", "autocast", partial(networks.TranslationTransformer, 8000, 384, 4), _tokens(24, 192, 8000), AUTOCAST),
        ("Whisper", "fp32", _whisper(), _spectrogram(4, 3000, 96, 51865), FP32),
        ("Whisper", "autocast", _whisper(), _spectrogram(8, 3000, 128, 51865), AUTOCAST),
        ("Speech transformer", "fp32", networks.SpeechTransformer, _waveform(4, 64000, 199), FP32),
        ("Speech transformer", "autocast", networks.SpeechTransformer, _waveform(8, 48000, 149), AUTOCAST),
        ("MLP-Mixer", "fp32-sgd", networks.PatchMixer, _images(48, 224), FP32 | SGD),
        ("MLP-Mixer", "autocast", partial(networks.PatchMixer, 192, 16, 640, 8), _images(64, 192), AUTOCAST),
    ]  # fmt: skip
    return _cases(rows)


def fresh2() -> list[Case]:
    """The second list."""
    rows: list[Row] = [
        ("UNet", "fp32-deep", partial(networks.UNet, 40), _masks(6, 224, 8), FP32),
        ("UNet", "autocast-wide-sgd", partial(networks.UNet, 96, 3), _masks(5, 176, 8), AUTOCAST | SGD),
        ("Diffusion UNet", "bf16-last", partial(networks.DiffusionUNet, 64), _noise(20, 64), BF16 | LAST),
        ("ResNet", "34-fp32-sgd", _classifier("ResNet", **BASIC_34), _images(48, 192), FP32 | SGD),
        ("ResNet", "50-bf16", _classifier("ResNet"), _images(40, 208), BF16),
        ("RegNet", "autocast-narrow", _classifier("RegNet", **NARROW_REGNET), _images(56, 192), AUTOCAST),
        ("DenseNet", "bf16-last-sgd", partial(networks.DenseNet, 24), _images(48, 176), BF16 | LAST | SGD),
        ("ConvNeXt", "bf16-wide", _classifier("ConvNext", **WIDE_CONVNEXT), _images(24, 208), BF16),
        ("MobileNetV2", "fp32-last", _classifier("MobileNetV2"), _images(40, 176), FP32 | LAST),
        ("EfficientNet", "autocast-fused", _efficientnet(), _images(40, 192), AUTOCAST | FUSED),
        ("MobileViT", "fp32", _classifier("MobileViT"), _images(10, 256), FP32),
        ("BiT", "autocast", _classifier("Bit", depths=[2, 3, 4, 2]), _images(24, 192), AUTOCAST),
        ("3-d convolutions", "bf16", networks.VideoNet, _clips(5, 12, 96), BF16),
        ("LSTM", "fp32-deep-sgd", partial(networks.RecurrentLM, 9000, 640, 4), _tokens(48, 160, 9000), FP32 | SGD),
        ("LSTM", "autocast-both-ways", _tagger(640, 2, torch.nn.LSTM, 0.2), _tokens(56, 224, 12000), AUTOCAST),
        ("GRU", "autocast", partial(networks.RecurrentTagger, 12000, 768, 2), _tokens(48, 256, 12000), AUTOCAST),
        ("RNN", "bf16", _tagger(1024, 3, torch.nn.RNN), _tokens(64, 192, 12000), BF16),
        ("OPT", "autocast", _causal("OPT", **SMALL_OPT), _tokens(5, 512, 32000), AUTOCAST),
        ("Qwen2", "fp32", _causal("Qwen2", **SMALL_QWEN2), _tokens(4, 448, 28000), FP32),
        ("RoBERTa", "bf16-padded", _roberta(), _tokens(20, 160, 50265, padded=True), BF16),
        ("BART", "autocast-sgd", _bart(), _tokens(6, 320, 30000), AUTOCAST | SGD),
        ("DeiT", "autocast", _classifier("DeiT", **SMALL_DEIT), _images(56, 224), AUTOCAST),
        ("nn.Transformer", "fp32-fused", _translation(10000, 448, 3), _tokens(20, 208, 10000), FP32 | FUSED),
        ("Speech transformer", "bf16", networks.SpeechTransformer, _waveform(6, 56000, 174), BF16),
    ]  # fmt: skip
    return _cases(rows)


def _cases(rows: list[Row]) -> list[Case]:
    return [
        Case(name=f"{family.lower().replace(' ', '-')}-{tag}", family=family, build=build, batch=batch, **fields)
        for family, tag, build, batch, fields in rows
    ]
