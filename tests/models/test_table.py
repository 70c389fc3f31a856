from __future__ import annotations

import pytest
import torch

from lowtide.models.registry import build_from_config
from lowtide.models.table import BUILT_INS

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
