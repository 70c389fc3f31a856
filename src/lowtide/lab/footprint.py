"""KernelFootprint: stands in a trace for updates through Lowtide's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide.optim.matrix_rules import Adafactor
from lowtide.optim.matrix_table import num_partials
from lowtide.optim.parameter_state import new_state
from lowtide.optim.precision import numerics_of
from lowtide.optim.rules import require_rule


class KernelFootprint(Optimizer):
    """Keeps the state that the kernels keep, and makes the workspace that a matrix rule's kernels need for a moment.

    Args:
        params: The parameters.
        make: The optimizer whose rule the kernels would run.
        precision: As `lowtide.manage` takes it.
        moments: Likewise.
    """

    def __init__(
        self, params: Iterable[Tensor], *, make: Callable[[Iterable[Tensor]], Optimizer], precision: str, moments: str
    ) -> None:
        parameters = list(params)
        # As defaults, so that whoever makes one of these for each parameter finds them.
        super().__init__(parameters, {"make": make, "precision": precision, "moments": moments})
        self._imitated = make(parameters)
        self._numerics = numerics_of(precision, moments)[1]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's own do
        """Make the state of parameters that have their first gradient."""
        del closure
        for group, imitated in zip(self.param_groups, self._imitated.param_groups, strict=True):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                rule = require_rule(self._imitated, {**imitated, "params": ()})
                if isinstance(rule, Adafactor):
                    torch.empty(num_partials(parameter.shape), dtype=torch.float32, device=parameter.device)
                if not self.state[parameter]:
                    tensors = new_state(parameter, rule, self._numerics).all_tensors()
                    self.state[parameter] = {str(number): tensor for number, tensor in enumerate(tensors)}
