"""KernelOptimizer: updates chunks through Lowtide's own kernels, in the numerics that the user asked for.

The settings are those of the user's torch optimizer, live; its own step is not run. State lies flat, in the order of the
weight's memory, beside the update: on the device or on the host. `optimizer.state_dict()` has torch's form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from lowtide.optim import device_kernel, host_kernel, reference
from lowtide.optim.formats import update_key
from lowtide.optim.parameter_state import ParameterState, new_state
from lowtide.optim.precision import rounding_for
from lowtide.optim.rules import require_rule
from lowtide.optim.torch_state import LoadTarget, SavedState, from_torch_state, read_state_dict, to_torch_state
from lowtide.optim.update_types import Numerics, Piece, Rounding
from lowtide.runtime.chunk_optimizer import ChunkOptimizer, Settings, Update
from lowtide.runtime.paged_state import Pages


class KernelOptimizer(ChunkOptimizer):
    """See the module's docstring; stands where a `ChunkOptimizer` does.

    Args:
        optimizer: The user's: its class says the rule, its param groups the settings.
        numerics: Which numbers the update works on.
        pages: Where states lie that visit the device; None without any.
        paged: `id`s of the parameters whose states do.

    Raises:
        UnsupportedOptimizerError: There is no kernel for its rule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numerics: Numerics,
        *,
        pages: Pages | None = None,
        paged: Collection[int] = (),
    ) -> None:
        self.optimizer = optimizer
        self.numerics = numerics
        self.pages = pages
        self._paged = frozenset(paged)
        self.states: dict[int, ParameterState] = {}
        """By the `id` of the parameter, which the optimizer keeps alive."""
        self._group_of: dict[int, int] = {}
        self._number_of: dict[int, int] = {}
        self._accepted: list[tuple[LoadTarget, SavedState]] = []
        self.refresh_groups()
        for group in optimizer.param_groups:
            require_rule(optimizer, group)

    def refresh_groups(self) -> None:
        """Read again which parameter is in which group."""
        super().refresh_groups()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._number_of = {id(parameter): number for number, parameter in enumerate(parameters)}

    def claim_state(self, updates: Sequence[Update]) -> None:
        """Make the states exist, in the thread that owns the dictionary."""
        for update in updates:
            if id(update.parameter) not in self.states:
                group = self.optimizer.param_groups[self._group_of[id(update.parameter)]]
                rule = require_rule(self.optimizer, {**group, "params": ()})
                make = self.pages.new if self._visits(update.parameter) and self.pages is not None else new_state
                self.states[id(update.parameter)] = make(update.target, rule, self.numerics)

    def forget_empty_state(self) -> None:
        """Torch's own dictionary is not used."""

    def run(self, updates: Sequence[Update], settings: Settings) -> None:
        """One step on these tensors."""
        self.claim_state(updates)
        factor = _factor(updates[0].target.device, settings)
        if factor is None:
            return
        rules = [require_rule(self.optimizer, {**group, "params": ()}) for group in settings.groups]
        pieces: dict[Rounding, list[Piece]] = {}
        visits: list[ParameterState] = []
        for update in updates:
            state = home = self.states[id(update.parameter)]
            if self.pages is not None and self._visits(update.parameter):
                state = self.pages.take(home)
                visits.append(home)
            state.step = home.step = home.step + 1
            rounding = rounding_for(update.target, self.numerics)
            pieces.setdefault(rounding, []).append(
                Piece(
                    weight=_flat(update.target),
                    gradient=_flat_beside(update.target),
                    state=state.tensors,
                    rule=rules[self._group_of[id(update.parameter)]],
                    step=state.step,
                    remainder=state.remainder,
                    master=state.master,
                    key=update_key(self.numerics.seed, self._number_of[id(update.parameter)], state.step),
                )
            )
        for rounding, group in pieces.items():
            kernel = _kernel(group[0].weight.device)
            kernel(group, rounding=rounding, moments=self.numerics.moments, gradient_factor=factor)
        for home in visits:
            assert self.pages is not None
            self.pages.give_back(home)

    def prefetch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Their updates on the device are near: send visiting states on their way."""
        if self.pages is not None:
            self.pages.prefetch(
                self.states[id(parameter)]
                for parameter in parameters
                if self._visits(parameter) and id(parameter) in self.states
            )

    def dismiss(self) -> None:
        """A backward is over; what was prefetched and not used leaves."""
        if self.pages is not None:
            self.pages.dismiss()

    def _visits(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._paged

    def place_state(self, parameter: torch.Tensor, device: torch.device) -> None:
        """Move a parameter's state to where its update runs."""
        state = self.states.get(id(parameter))
        if state is None:
            return
        if self.pages is not None and self._visits(parameter):
            self.pages.adopt(state)
        else:
            state.move_to(device)

    # -- torch's form of the state -------------------------------------------------------------------------------------

    def fill(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch's `state_dict` gave, with the states in fp32 and the masters; all updates must have been made."""
        if self.pages is not None:
            self.pages.settle()
        state: dict[int, dict[str, torch.Tensor]] = {}
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            rule = require_rule(self.optimizer, group)
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if id(parameter) in self.states:
                    here = self.states[id(parameter)]
                    state[key] = to_torch_state(parameter.detach().to(here.device), here, rule, self.numerics)
        return {**state_dict, "state": state}

    def accept(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Check a state that is about to be loaded, torch's own or `fill`'s; what is left of it for torch to load.

        Raises:
            OptimizerStateError: It is of another model or optimizer. Nothing was changed.
        """
        names = {id(value): name for value, name in self._names()}
        groups = [
            [
                LoadTarget(name=names[id(parameter)], weight=parameter, rule=require_rule(self.optimizer, group))
                for parameter in group["params"]
            ]
            for group in self.optimizer.param_groups
        ]
        saved = read_state_dict(state_dict, groups)
        self._accepted = [
            (target, entries)
            for targets, found in zip(groups, saved, strict=True)
            for target, entries in zip(targets, found, strict=True)
        ]
        return {**state_dict, "state": {}}

    def load_accepted(self) -> None:
        """Take over the states that `accept` has checked."""
        self.states = {
            id(target.weight): from_torch_state(target, entries, self.numerics)
            for target, entries in self._accepted
            if entries.num_steps or entries.tensors
        }
        self._accepted = []

    def hand_back(self) -> None:
        """Give the optimizer its state in the form that its own step works on: of the type of each parameter."""
        state_dict = self.fill(self.optimizer.state_dict())
        for entries in state_dict["state"].values():
            entries.pop("master", None)
        self.optimizer.load_state_dict(state_dict)
        self.states = {}
        if self.pages is not None:
            self.pages.close()

    def _names(self) -> list[tuple[torch.Tensor, str]]:
        return [
            (parameter, f"parameter {number} of param group {index}")
            for index, group in enumerate(self.optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        ]


def _kernel(device: torch.device) -> Callable[..., None]:
    if device.type != "cpu":
        return device_kernel.update
    return host_kernel.update if host_kernel.is_available() else reference.update


def _factor(device: torch.device, settings: Settings) -> float | torch.Tensor | None:
    """What gradients are multiplied by: the clipping, and the inverse of a scaler's scale; None where the step is skipped."""
    found, scale = settings.scaler.get("found_inf"), settings.scaler.get("grad_scale")
    if found is not None and float(found):
        return None
    factor: float | torch.Tensor = 1.0
    if settings.clip is not None:
        factor = settings.clip.on_host() if device.type == "cpu" else settings.clip.on_device
    return factor if scale is None else factor / float(scale)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of their memory; weights are dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _flat_beside(weight: torch.Tensor) -> torch.Tensor:
    """The weight's gradient in the order of the weight's memory."""
    gradient = weight.grad
    assert gradient is not None
    if gradient.stride() != weight.stride():
        gradient = torch.empty_strided(
            weight.size(), weight.stride(), dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    return _flat(gradient)
