"""Sessions share a device: what they may reserve together."""

from __future__ import annotations

import pytest

from lowtide.memory.device_limit import allowed_share


@pytest.mark.parametrize(
    ("budgets", "share"),
    [([], 1.0), ([None], 1.0), ([25], 0.25), ([25, 50], 0.75), ([25, None], 1.0), ([80, 80], 1.0)],
)
def test_the_sum_of_the_budgets(budgets: list[int | None], share: float) -> None:
    assert allowed_share(budgets, 100) == share
