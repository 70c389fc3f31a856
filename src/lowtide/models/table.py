"""The built-in models: every size as data.

Parameter counts (checked by a test) are those of the published checkpoints, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lowtide.models.deep_one import DeepOneConfig, NormKind
from lowtide.models.gpt import GPTConfig
from lowtide.models.llama import LlamaConfig
from lowtide.models.resnet import ResNetConfig

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
