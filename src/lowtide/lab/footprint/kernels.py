"""KernelFootprint: stands in a trace for updates through Lowtide's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lowtide.optim.device import table as device_table
from lowtide.optim.device.table import WORKSPACE_BYTES, num_partials
from lowtide.optim.rules import require_rule
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import Adafactor, Numerics, Rounding, rounding_for
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.updates.kernel_optimizer import follow_writes


class KernelFootprint(ChunkOptimizer):
    """Keeps the state that the kernels keep, and makes what they need for a moment: tables, and room for partial sums.

    Args:
        optimizer: The user's, whose rule the kernels would run.
        numerics: Which numbers the update works on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, numerics: Numerics) -> None:
        super().__init__(optimizer)
        self._numerics = numerics
        self._states: dict[int, ParameterState] = {}

    def undo_of(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
        """As `KernelOptimizer`: its updates have a gate."""
        del parameters
        return lambda: None

    @torch.no_grad()
    def run(self, updates: Sequence[Update], settings: Settings) -> None:
        """What one call of the kernels takes: as `KernelOptimizer.run`."""
        rules = [require_rule(self.optimizer, {**group, "params": ()}) for group in settings.groups]
        pieces: list[Tensor] = []
        wholes: list[Tensor] = []
        copies: list[Tensor] = []
        for update in updates:
            weight, rule = update.target, rules[self._group_of[id(update.parameter)]]
            state = self._states.get(id(update.parameter))
            if state is None:
                state = self._states[id(update.parameter)] = new_state(weight, rule, self._numerics)
                tensors = dict(enumerate(state.all_tensors()))
                self.optimizer.state[update.parameter] = {str(number): tensor for number, tensor in tensors.items()}
            if rounding_for(weight, self._numerics) is Rounding.MASTER:
                follow_writes(weight, state)
            if weight.grad is not None and weight.grad.stride() != weight.stride():
                copies.append(torch.empty_like(weight, dtype=weight.grad.dtype))
            (wholes if isinstance(rule, Adafactor) else pieces).append(weight)
        if pieces:
            _tables(pieces, len(device_table.COLUMNS), device_table.NUM_FLOATS)
        held: tuple[Tensor, ...] = ()
        for batch in _batches(wholes):
            num_sums = len(batch) + sum(num_partials(weight.shape) for weight in batch)
            sums = torch.empty(num_sums, dtype=torch.float32, device=batch[0].device)
            # A batch lets go of its own when the next one has taken its memory.
            held = (sums, *_tables(batch, len(device_table.MATRIX_COLUMNS), len(device_table.MATRIX_FLOATS)))
        del held, copies


def _tables(weights: Sequence[Tensor], num_columns: int, num_floats: int) -> tuple[Tensor, Tensor]:
    device, rows = weights[0].device, len(weights)
    integers = torch.empty(rows, num_columns, dtype=torch.int64, device=device)
    return integers, torch.empty(rows, num_floats, dtype=torch.float32, device=device)


def _batches(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """As `device_table.batches_of` shares launches, as far as shapes and types tell: addresses may split them further."""
    by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for weight in weights:
        if weight.numel():
            by_kind.setdefault((weight.dtype, weight.dim() > 1), []).append(weight)
    for alike in by_kind.values():
        together: list[Tensor] = []
        num_bytes = 0
        for weight in alike:
            needed = 4 * (1 + num_partials(weight.shape))
            if together and num_bytes + needed > WORKSPACE_BYTES:
                yield together
                together, num_bytes = [], 0
            together.append(weight)
            num_bytes += needed
        yield together
