"""Models by name: a built-in one, any Hugging Face config, or any Python factory.

The built-in models are a table of sizes. Parameter counts (checked by a test) are those of the published checkpoints,
where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from lowtide import config as config_file
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.models import factory, huggingface
from lowtide.models.batches import BatchForm, ImageBatch, TokenBatch
from lowtide.models.deep_one import DeepOne, DeepOneConfig, NormKind
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.models.resnet import ResNet, ResNetConfig
from lowtide.models.source import ModelSource, build_on_meta, enable_recompute, finish
from lowtide.plain_text import Plain

Config = GPTConfig | LlamaConfig | DeepOneConfig | ResNetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """One row of the table."""

    config: Config
    default_batch: int
    default_length: int | None = None
    """Tokens of a usual sequence; None for images."""
    about: str
    """One line for people: which published model it is."""


def _gpt2(num_layers: int, hidden_size: int, num_heads: int, about: str) -> BuiltIn:
    config = GPTConfig(
        vocab_size=50257, context_length=1024, num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads
    )
    return BuiltIn(config=config, default_batch=8, default_length=1024, about=about)


def _llama3(
    num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int, about: str, *, tied: bool = False
) -> BuiltIn:
    config = LlamaConfig(
        vocab_size=128256,
        context_length=131072,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=8,
        tied=tied,
        rope_theta=500_000.0,
    )
    return BuiltIn(config=config, default_batch=4, default_length=2048, about=about)


def _deep_one(norm: NormKind, about: str) -> BuiltIn:
    config = DeepOneConfig(
        vocab_size=8000,
        context_length=768,
        num_layers=32,
        hidden_size=2048,
        intermediate_size=5400,
        num_heads=16,
        norm=norm,
    )
    return BuiltIn(config=config, default_batch=4, default_length=768, about=about)


BUILT_INS: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "gpt-tiny": BuiltIn(
            # 256 tokens, so that any text trains as its bytes; no dropout, so that two runs can be compared loss by
            # loss.
            config=GPTConfig(
                vocab_size=256, context_length=128, num_layers=4, hidden_size=128, num_heads=4, dropout=0.0
            ),
            default_batch=8,
            default_length=128,
            about="a GPT over bytes that trains on a laptop in seconds",
        ),
        "gpt2": _gpt2(12, 768, 12, "GPT-2, 124M"),
        "gpt2-medium": _gpt2(24, 1024, 16, "GPT-2 medium, 355M"),
        "gpt2-large": _gpt2(36, 1280, 20, "GPT-2 large, 774M"),
        "gpt2-xl": _gpt2(48, 1600, 25, "GPT-2 XL, 1.56B"),
        "llama-tiny": BuiltIn(
            config=LlamaConfig(
                vocab_size=256,
                context_length=128,
                num_layers=4,
                hidden_size=128,
                intermediate_size=384,
                num_heads=4,
                num_kv_heads=2,
            ),
            default_batch=8,
            default_length=128,
            about="a Llama over bytes that trains on a laptop in seconds",
        ),
        "llama-1b": _llama3(16, 2048, 8192, 32, "Llama 3.2 1B", tied=True),
        "llama-3b": _llama3(28, 3072, 8192, 24, "Llama 3.2 3B", tied=True),
        "llama-8b": _llama3(32, 4096, 14336, 32, "Llama 3.1 8B"),
        "llama-13b": BuiltIn(
            config=LlamaConfig(
                vocab_size=32000,
                context_length=4096,
                num_layers=40,
                hidden_size=5120,
                intermediate_size=13824,
                num_heads=40,
                num_kv_heads=40,
            ),
            default_batch=4,
            default_length=2048,
            about="Llama 2 13B",
        ),
        # Meta published none of about this size; the layers are those of InternLM2 20B, with Llama 3's vocabulary.
        "llama-20b": _llama3(48, 6144, 16384, 48, "20.3B between Llama 2 13B and Llama 3.1 70B, not a published model"),
        "llama-70b": _llama3(80, 8192, 28672, 64, "Llama 3.1 70B"),
        "deep-one-tiny": BuiltIn(
            config=DeepOneConfig(
                vocab_size=256, context_length=96, num_layers=4, hidden_size=128, intermediate_size=336, num_heads=4
            ),
            default_batch=4,
            default_length=96,
            about="Deep One, small enough for a laptop",
        ),
        "deep-one-1.6b": _deep_one(
            NormKind.SEPARATE, "the Peak Memory experiment's model, norms as torch 2.8 ran them"
        ),
        "deep-one-1.6b-fused-norm": _deep_one(NormKind.FUSED, "the same with the fused norm of torch 2.9 and later"),
        "resnet-50": BuiltIn(config=ResNetConfig(blocks=(3, 4, 6, 3)), default_batch=64, about="ResNet-50 v1.5"),
    }
)


def resolve_model(spec: str, *, recompute: bool = False, settings: Mapping[str, Plain] | None = None) -> ModelSource:
    """The model that `spec` names, ready to be built.

    Args:
        spec: A built-in name (`gpt2`, `llama-8b`, ... see `built_in_names`), `hf:` and a folder, a config.json or a
        model id in
            the local cache, or `package.module:factory`.
        recompute: Have each layer recomputed in the backward, as the model's `gradient_checkpointing_enable` does.
        settings: Fields of a built-in model's config that are to differ, such as `{"norm": "fused"}`.

    Raises:
        UnknownNameError: There is no such model.
        ConfigError: A setting is not of its config or does not fit, or the model is none of the built-in ones.

    Example:
        >>> source = resolve_model("llama-8b")
        >>> sum(p.numel() for p in source.build(torch.bfloat16).parameters())
        8030261248
    """
    if spec in BUILT_INS:
        return _resolve_built_in(spec, _changed(BUILT_INS[spec], settings or {}), recompute=recompute)
    if settings and ":" in spec:
        raise ConfigError(
            f"model_settings has {', '.join(settings)}: only built-in models have settings, and {spec!r} is none; leave them "
            "out, and change its own config or factory",
            key="model_settings",
        )
    if spec.startswith(huggingface.PREFIX):
        return huggingface.resolve_huggingface(spec, recompute=recompute)
    if ":" in spec:
        return factory.resolve_factory(spec, recompute=recompute)
    raise UnknownNameError("model", spec, BUILT_INS)


def built_in_names() -> tuple[str, ...]:
    """The names of the built-in models, by family and then size."""
    return tuple(BUILT_INS)


def build_from_config(config: Config) -> nn.Module:
    """The reference model of a config, wherever torch's default device is."""
    match config:
        case GPTConfig():
            return GPT(config)
        case LlamaConfig():
            return Llama(config)
        case DeepOneConfig():
            return DeepOne(config)
        case ResNetConfig():
            return ResNet(config)


def _changed(row: BuiltIn, settings: Mapping[str, Plain]) -> BuiltIn:
    if not settings:
        return row
    return replace(
        row, config=config_file.from_plain(type(row.config), {**config_file.to_plain(row.config), **settings})
    )


def _resolve_built_in(name: str, row: BuiltIn, *, recompute: bool) -> ModelSource:
    form = _batch_form(row)
    return ModelSource(
        name=name,
        family=_family(row.config),
        default_batch=form.default,
        build=partial(_build, name, row.config, recompute),
        make_batch=form,
    )


def _build(name: str, config: Config, recompute: bool, dtype: torch.dtype | None) -> nn.Module:
    model = finish(build_on_meta(partial(build_from_config, config), name=name), dtype)
    if recompute:
        enable_recompute(model, name=name)
    return model


def _family(config: Config) -> str:
    match config:
        case GPTConfig():
            return "gpt"
        case LlamaConfig():
            return "llama"
        case DeepOneConfig():
            return "deep-one"
        case ResNetConfig():
            return "resnet"


def _batch_form(row: BuiltIn) -> BatchForm:
    config = row.config
    if isinstance(config, ResNetConfig):
        return ImageBatch(
            num_classes=config.num_classes,
            default_batch=row.default_batch,
            num_channels=3,
            height=config.image_size,
            width=config.image_size,
        )
    assert row.default_length is not None, "a text model's row has a default length"
    return TokenBatch(
        vocab_size=config.vocab_size,
        default_batch=row.default_batch,
        default_length=row.default_length,
        # Only learned positions run out.
        max_length=config.context_length if isinstance(config, GPTConfig) else None,
    )
