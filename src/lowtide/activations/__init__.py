"""Activations: what becomes of what a forward saves, losses that never hold the logits, layers too large for the device."""

from __future__ import annotations

from lowtide.activations.apply import ActivationStats, Applied, apply
from lowtide.activations.chunked_loss import ChunkedHead, linear_cross_entropy
from lowtide.activations.chunked_settings import LossSettings
from lowtide.activations.host_embedding import HostEmbedding, put_on_host
from lowtide.activations.huggingface_head import chunked_head
from lowtide.activations.policy import CompileBudget, Keep, Offload, Policies, Policy, Recompute, Selective, policy_of
from lowtide.activations.resolve import resolve
from lowtide.activations.tiled_cross_entropy import tiled_cross_entropy
from lowtide.activations.tiled_layers import TiledEmbedding, TiledLinear
from lowtide.activations.tiled_mlp import tile_sequence
from lowtide.activations.tiled_model import tile, tile_groups, untile

__all__ = [
    "ActivationStats",
    "Applied",
    "ChunkedHead",
    "CompileBudget",
    "HostEmbedding",
    "Keep",
    "LossSettings",
    "Offload",
    "Policies",
    "Policy",
    "Recompute",
    "Selective",
    "TiledEmbedding",
    "TiledLinear",
    "apply",
    "chunked_head",
    "linear_cross_entropy",
    "policy_of",
    "put_on_host",
    "resolve",
    "tile",
    "tile_groups",
    "tile_sequence",
    "tiled_cross_entropy",
    "untile",
]
