"""Hungarian matching in the loss of detection models, on costs that depend on weights.

`scipy.optimize.linear_sum_assignment` wants numbers, but how many pairs it returns follows from the shape of the costs alone, and
so do all shapes that come after it. On ghosts the pairs are the first rows with the first columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize

from lowtide.tracing.ghost.tensor import Ghost

NOTE = "the loss matches predictions with targets by costs that depend on weights: some matching of the right size was taken"


def accept_ghosts(note: Callable[[str], None]) -> None:
    """Make scipy's matching take ghosts in this process; `note` hears of it when it does."""
    original = scipy.optimize.linear_sum_assignment

    @functools.wraps(original)
    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> Any:
        if not isinstance(cost_matrix, Ghost) or cost_matrix.value() is not None:
            return original(cost_matrix, maximize)
        note(NOTE)
        pairs = min(cost_matrix.shape)
        return np.arange(pairs), np.arange(pairs)

    scipy.optimize.linear_sum_assignment = linear_sum_assignment
