"""The device kernel's launches, counted in place of Triton's: nothing is updated, and no Triton is needed."""

from __future__ import annotations

import sys
import types

import pytest
from torch import Tensor

from lowtide.optim.device.table import Variant

Launches = list[tuple[Variant, int, int]]
"""The variant, the pieces and the tiles of each."""


def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """A list that each launch is added to from now on."""
    seen: Launches = []

    def launch(variant: Variant, table: Tensor, floats: Tensor, factor: object, num_tiles: int) -> None:
        assert len(table) == len(floats)
        seen.append((variant, len(table), num_tiles))

    module = types.ModuleType("lowtide.optim.device.triton")
    module.launch = launch  # type: ignore[attr-defined]  # a module of the test's
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen
