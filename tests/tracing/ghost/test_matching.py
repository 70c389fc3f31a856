"""Hungarian matching on ghosts: as many pairs as the real one finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowtide.tracing.ghost.matching import NOTE
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


@pytest.mark.parametrize("shape", [(10, 3), (3, 10), (4, 4), (5, 0)])
def test_as_many_pairs_as_for_real(ghosts: GhostProcess, shape: tuple[int, int]) -> None:
    from scipy.optimize import linear_sum_assignment

    def step(lab: Lab) -> tuple[list[int], list[int], list[str]]:
        from scipy.optimize import linear_sum_assignment

        rows, columns = linear_sum_assignment(lab.ghost(*shape).cpu())
        return rows.tolist(), columns.tolist(), list(lab.mode.notes)

    rows, columns, notes = ghosts(step)
    real_rows, _ = linear_sum_assignment(np.random.default_rng(0).random(shape))
    assert len(rows) == len(columns) == len(real_rows)
    assert len(set(rows)) == len(set(columns)) == len(rows)
    assert notes == [NOTE]


def test_known_costs_are_matched_for_real(ghosts: GhostProcess) -> None:
    costs = torch.tensor([[4.0, 1.0], [2.0, 9.0]])

    def step(lab: Lab) -> list[int]:
        from scipy.optimize import linear_sum_assignment

        return list(linear_sum_assignment(lab.known(costs))[1].tolist())

    assert ghosts(step) == [1, 0]
