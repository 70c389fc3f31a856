"""Models by name: a built-in one, any Hugging Face config, or any Python factory.

The built-in models are a table of sizes. Parameter counts (checked by a test) are those of the published checkpoints,
where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide import config as config_file
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.models import factory, huggingface
from lowtide.models.batches import BatchForm, ImageBatch, TokenBatch, parse_sizes
from lowtide.models.deep_one import DeepOne, DeepOneConfig, NormKind
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.models.resnet import ResNet, ResNetConfig
from lowtide.models.source import ModelSource, build_on_meta, finish
from lowtide.plain_text import Plain

Config = GPTConfig | LlamaConfig | DeepOneConfig | ResNetConfig
_KINDS: Mapping[type, tuple[str, Callable[[Any], nn.Module]]] = {
    GPTConfig: ("gpt", GPT),
    LlamaConfig: ("llama", Llama),
    DeepOneConfig: ("deep-one", DeepOne),
    ResNetConfig: ("resnet", ResNet),
}
"""The family and the class of each kind of config."""


class BuiltIn(NamedTuple):
    """One row of the table."""

    config: Config
    batch: str
    """The text of a usual batch."""


def _gpt(layers: int, hidden: int, heads: int, **others: Any) -> GPTConfig:
    """A GPT of these sizes; what is not said is GPT-2's."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads}
    return GPTConfig(**{"vocab_size": 50257, "context_length": 1024, **sizes, **others})


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int = 8, **others: Any) -> LlamaConfig:
    """A Llama of these sizes; what is not said is Llama 3's."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads}
    usual = {"vocab_size": 128256, "context_length": 131072, "num_kv_heads": kv_heads, "rope_theta": 500_000.0}
    return LlamaConfig(**{**usual, **sizes, **others})


def _deep_one(layers: int, hidden: int, inner: int, heads: int, **others: Any) -> DeepOneConfig:
    """A Deep One of these sizes; what is not said is the experiment's."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_heads": heads}
    return DeepOneConfig(**{"vocab_size": 8000, "context_length": 768, **sizes, **others})


_BYTES = {"vocab_size": 256, "context_length": 128}
"""256 tokens, so that any text trains as its bytes, on a laptop in seconds."""
_LLAMA_2 = {"vocab_size": 32000, "context_length": 4096, "rope_theta": 10_000.0}

BUILT_INS: Mapping[str, BuiltIn] = MappingProxyType(
    {
        # No dropout, so that two runs can be compared loss by loss.
        "gpt-tiny": BuiltIn(_gpt(4, 128, 4, dropout=0.0, **_BYTES), "8x128"),
        "gpt2": BuiltIn(_gpt(12, 768, 12), "8x1024"),
        "gpt2-medium": BuiltIn(_gpt(24, 1024, 16), "8x1024"),
        "gpt2-large": BuiltIn(_gpt(36, 1280, 20), "8x1024"),
        "gpt2-xl": BuiltIn(_gpt(48, 1600, 25), "8x1024"),
        "llama-tiny": BuiltIn(_llama(4, 128, 384, 4, 2, rope_theta=10_000.0, **_BYTES), "8x128"),
        # Llama 3.2 has 1B and 3B, 3.1 has 8B and 70B, 2 has 13B.
        "llama-1b": BuiltIn(_llama(16, 2048, 8192, 32, tied=True), "4x2048"),
        "llama-3b": BuiltIn(_llama(28, 3072, 8192, 24, tied=True), "4x2048"),
        "llama-8b": BuiltIn(_llama(32, 4096, 14336, 32), "4x2048"),
        "llama-13b": BuiltIn(_llama(40, 5120, 13824, 40, 40, **_LLAMA_2), "4x2048"),
        # Meta published none of about this size; the layers are those of InternLM2 20B, with Llama 3's vocabulary.
        "llama-20b": BuiltIn(_llama(48, 6144, 16384, 48), "4x2048"),
        "llama-70b": BuiltIn(_llama(80, 8192, 28672, 64), "4x2048"),
        "deep-one-tiny": BuiltIn(_deep_one(4, 128, 336, 4, vocab_size=256, context_length=96), "4x96"),
        # The Peak Memory experiment's model with norms as torch 2.8 ran them, and with the fused norm of 2.9 and later.
        "deep-one-1.6b": BuiltIn(_deep_one(32, 2048, 5400, 16), "4x768"),
        "deep-one-1.6b-fused-norm": BuiltIn(_deep_one(32, 2048, 5400, 16, norm=NormKind.FUSED), "4x768"),
        "resnet-50": BuiltIn(ResNetConfig(blocks=(3, 4, 6, 3)), "64"),
    }
)


def resolve_model(spec: str, *, recompute: bool = False, settings: Mapping[str, Plain] | None = None) -> ModelSource:
    """The model that `spec` names, ready to be built.

    Args:
        spec: A built-in name (`gpt2`, `llama-8b`, ... see `built_in_names`), `hf:` and a folder, a config.json or a
            model id in the local cache, or `package.module:factory`.
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
        return _resolve_built_in(spec, settings or {}, recompute=recompute)
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
    if Path(spec, "config.json").is_file():
        raise ConfigError(
            f"{spec!r} is the folder of a Hugging Face model: give {huggingface.PREFIX}{spec}", key="model"
        )
    raise UnknownNameError("model", spec, BUILT_INS)


def built_in_names() -> tuple[str, ...]:
    """The names of the built-in models, by family and then size."""
    return tuple(BUILT_INS)


def build_from_config(config: Config) -> nn.Module:
    """The reference model of a config, wherever torch's default device is."""
    return _KINDS[type(config)][1](config)


def _resolve_built_in(name: str, settings: Mapping[str, Plain], *, recompute: bool) -> ModelSource:
    row = BUILT_INS[name]
    config = config_file.from_plain(type(row.config), {**config_file.to_plain(row.config), **settings})
    row = row._replace(config=config)
    form = _batch_form(row)
    return ModelSource(
        name=name,
        family=_KINDS[type(row.config)][0],
        default_batch=form.default,
        build=partial(_build, name, row.config, recompute),
        make_batch=form,
    )


def _build(name: str, config: Config, recompute: bool, dtype: torch.dtype | None) -> nn.Module:
    model = build_on_meta(partial(build_from_config, config), name=name)
    return finish(model, dtype, recompute=recompute, name=name)


def _batch_form(row: BuiltIn) -> BatchForm:
    config = row.config
    batch, *length = parse_sizes(row.batch, accepted="the table's")
    if isinstance(config, ResNetConfig):
        side = config.image_size
        return ImageBatch(num_classes=config.num_classes, default_batch=batch, num_channels=3, height=side, width=side)
    return TokenBatch(
        vocab_size=config.vocab_size,
        default_batch=batch,
        default_length=length[0],
        # Only learned positions run out.
        max_length=config.context_length if isinstance(config, GPTConfig) else None,
    )
