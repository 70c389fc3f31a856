"""Whether repetitions that differ are counted."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.lab.repeats import count_different, layer_with, main
from lowtide.models.deep_one import DeepOneConfig

SMALL = DeepOneConfig(vocab_size=64, context_length=8, num_layers=2, hidden_size=32, intermediate_size=40, num_heads=2)


def test_a_layer_on_the_host_repeats_itself() -> None:
    repeats, different = count_different(layer_with(SMALL, torch.device("cpu")), 0.2)
    assert repeats >= 1
    assert different == 0


def test_one_bit_of_one_gradient_counts() -> None:
    calls = 0

    def flickers() -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        return [torch.ones(3), torch.full((3,), 1.0 + (calls % 3 == 0) * torch.finfo(torch.float32).eps)]

    repeats, different = count_different(flickers, 0.2)
    assert repeats == calls - 1 > 3
    assert different == calls // 3


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["repeats", "--out", "unused"])
    with pytest.raises(SystemExit, match="sees no CUDA device"):
        main()
