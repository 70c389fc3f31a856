"""ParameterState: what an update keeps beside one parameter, flat and in the order of the weight's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from lowtide.optim.matrix_rules import Adafactor, Rule, names_of_states, statistic_sizes
from lowtide.optim.precision import kept_bytes, moment_bytes, rounding_for
from lowtide.optim.update_types import BLOCK, UNSIGNED, Moments, Numerics, Rounding, Sgd

SCALE = "_scale"
"""After the name of an 8-bit state: its scales."""


@dataclass(slots=True, kw_only=True)
class ParameterState:
    """Of one parameter, on the device of its update."""

    step: int = 0
    """Updates so far."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """States by name, and the scales of 8-bit ones under `NAME_scale`."""
    remainder: torch.Tensor | None = None
    master: torch.Tensor | None = None
    lacks_momentum: bool = False
    """Whether steps were taken, and none with a momentum: as at the first step, SGD takes the next gradient itself for it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the states that are there, without their scales."""
        return tuple(name for name in self.tensors if not name.endswith(SCALE))

    def all_tensors(self) -> list[torch.Tensor]:
        """Every tensor of it, always in the same order."""
        kept = [tensor for tensor in (self.remainder, self.master) if tensor is not None]
        return [*self.tensors.values(), *kept]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Others in the place of `all_tensors`."""
        rest = iter(tensors)
        self.tensors = {name: next(rest) for name in self.tensors}
        self.remainder = None if self.remainder is None else next(rest)
        self.master = None if self.master is None else next(rest)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ParameterState:
        """The same state elsewhere, in these tensors."""
        other = replace(self)
        other.replace_tensors(tensors)
        return other

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(tensor.nbytes for tensor in self.all_tensors())

    @property
    def device(self) -> torch.device:
        """Where it lies; the host where it has nothing."""
        return next((tensor.device for tensor in self.all_tensors()), torch.device("cpu"))

    def move_to(self, device: torch.device) -> None:
        """Bring all of it to another device."""
        self.replace_tensors([tensor.to(device) for tensor in self.all_tensors()])


def new_state(weight: torch.Tensor, rule: Rule, numerics: Numerics) -> ParameterState:
    """Before the first update: all zero, and the master is the weight itself."""
    num_elements, device = weight.numel(), weight.device
    tensors: dict[str, torch.Tensor] = {}
    for name in names_of_states(rule, weight.shape):
        tensors |= _empty_state(name, weight, rule, numerics.moments)
    rounding = rounding_for(weight, numerics)
    remainder = _zeros(num_elements, torch.int16, device) if rounding is Rounding.EXACT else None
    master = weight.detach().as_strided((num_elements,), (1,)).float() if rounding is Rounding.MASTER else None
    return ParameterState(tensors=tensors, remainder=remainder, master=master)


def state_bytes(shape: Sequence[int], dtype: torch.dtype, rule: Rule, numerics: Numerics) -> int:
    """Bytes of the state of a parameter: what its rule keeps, and what its rounding keeps.

    Example:
        >>> state_bytes((32, 64), torch.bfloat16, Adafactor(lr=1e-3), Numerics())  # 2 * 2048 + 4 * (32 + 64)
        4480
    """
    num_elements = math.prod(shape)
    kept = kept_bytes(num_elements, dtype, numerics)
    if isinstance(rule, Adafactor):
        return kept + 4 * sum(statistic_sizes(shape).values())
    return kept + len(names_of_states(rule, shape)) * moment_bytes(num_elements, numerics.moments)


def complete(state: ParameterState, weight: torch.Tensor, rule: Rule, numerics: Numerics) -> None:
    """Add what a setting that was changed since asks for: a momentum, amsgrad's maximum."""
    for name in names_of_states(rule, weight.shape):
        if name not in state.tensors:
            state.lacks_momentum = state.lacks_momentum or (isinstance(rule, Sgd) and state.step > 0)
            state.tensors |= _empty_state(name, weight, rule, numerics.moments)


def _empty_state(name: str, weight: torch.Tensor, rule: Rule, moments: Moments) -> dict[str, torch.Tensor]:
    num_elements, device = weight.numel(), weight.device
    if isinstance(rule, Adafactor):
        return {name: _zeros(statistic_sizes(weight.shape)[name], torch.float32, device)}
    if moments is Moments.INT8:
        code = torch.uint8 if name in UNSIGNED else torch.int8
        scales = _zeros(-(-num_elements // BLOCK), torch.float32, device)
        return {name: _zeros(num_elements, code, device), f"{name}{SCALE}": scales}
    return {name: _zeros(num_elements, torch.float32 if moments is Moments.FP32 else torch.bfloat16, device)}


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # In pages as they come: large ones, which begin at the same offset for every tensor of an update, made it 12% slower
    # (`benchmarks.optim.host_kernel`).
    return torch.zeros(num_elements, dtype=dtype, device=device)
