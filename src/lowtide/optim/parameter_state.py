"""ParameterState: what an update keeps beside one parameter, flat and in the order of the weight's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from lowtide.optim.huge_pages import advise_huge_pages
from lowtide.optim.precision import rounding_for, state_names
from lowtide.optim.update_types import BLOCK, UNSIGNED, ElementwiseRule, Moments, Numerics, Rounding

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


def new_state(weight: torch.Tensor, rule: ElementwiseRule, numerics: Numerics) -> ParameterState:
    """Before the first update: all zero, and the master is the weight itself."""
    num_elements, device = weight.numel(), weight.device
    tensors: dict[str, torch.Tensor] = {}
    for name in state_names(rule):
        tensors |= _empty_moment(name, num_elements, numerics.moments, device)
    rounding = rounding_for(weight, numerics)
    remainder = _zeros(num_elements, torch.int16, device) if rounding is Rounding.EXACT else None
    master = weight.detach().as_strided((num_elements,), (1,)).float() if rounding is Rounding.MASTER else None
    return ParameterState(tensors=tensors, remainder=remainder, master=master)


def complete(state: ParameterState, weight: torch.Tensor, rule: ElementwiseRule, numerics: Numerics) -> None:
    """Add what a setting that was changed since asks for: a momentum, amsgrad's maximum."""
    for name in state_names(rule):
        if name not in state.tensors:
            state.tensors |= _empty_moment(name, weight.numel(), numerics.moments, weight.device)


def _empty_moment(name: str, num_elements: int, moments: Moments, device: torch.device) -> dict[str, torch.Tensor]:
    if moments is Moments.INT8:
        code = torch.uint8 if name in UNSIGNED else torch.int8
        scales = _zeros(-(-num_elements // BLOCK), torch.float32, device)
        return {name: _zeros(num_elements, code, device), f"{name}{SCALE}": scales}
    return {name: _zeros(num_elements, torch.float32 if moments is Moments.FP32 else torch.bfloat16, device)}


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memory = torch.empty(num_elements, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(memory)  # before it is touched
    return memory.zero_()
