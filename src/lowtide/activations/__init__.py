"""Activations: what becomes of what a forward saves, losses that never hold the logits, layers too large for the device.

The rooms `losses` and `tiling` are imported when one of their names is first asked for: a session needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lowtide.activations.apply import ActivationStats, Applied, apply
from lowtide.activations.host_embedding import HostEmbedding, put_on_host
from lowtide.activations.policy import (
    CompileBudget,
    Keep,
    Offload,
    Policies,
    Policy,
    Recompute,
    Selective,
    policy_of,
    resolve,
)

if TYPE_CHECKING:
    from lowtide.activations.losses.chunked_loss import ChunkedHead, linear_cross_entropy
    from lowtide.activations.losses.huggingface import chunked_head
    from lowtide.activations.losses.settings import LossSettings
    from lowtide.activations.tiling.cross_entropy import tiled_cross_entropy
    from lowtide.activations.tiling.layers import TiledEmbedding, TiledLinear, tile, tile_groups, untile
    from lowtide.activations.tiling.sequence import tile_sequence

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

_ROOMS = {
    "losses.chunked_loss": ("ChunkedHead", "linear_cross_entropy"),
    "losses.huggingface": ("chunked_head",),
    "losses.settings": ("LossSettings",),
    "tiling.cross_entropy": ("tiled_cross_entropy",),
    "tiling.layers": ("TiledEmbedding", "TiledLinear", "tile", "tile_groups", "untile"),
    "tiling.sequence": ("tile_sequence",),
}


def __getattr__(name: str) -> object:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
