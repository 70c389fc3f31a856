"""Models by name: a built-in one, any Hugging Face config, or any Python factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lowtide import config as config_file
from lowtide.errors import ConfigError, UnknownNameError
from lowtide.models import factory, huggingface
from lowtide.models.batches import BatchForm, ImageBatch, TokenBatch
from lowtide.models.deep_one import DeepOne, DeepOneConfig
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.models.meta_build import build_on_meta, finish
from lowtide.models.recompute import enable_recompute
from lowtide.models.resnet import ResNet, ResNetConfig
from lowtide.models.source import ModelSource
from lowtide.models.table import BUILT_INS, BuiltIn, Config
from lowtide.plain_text import Plain


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
