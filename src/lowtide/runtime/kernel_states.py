"""KernelStates: what the own kernels keep for each parameter, and torch's form of it.

State lies flat and in the chosen formats. `optimizer.state_dict()` has torch's own form: the moments in fp32, in the
parameter's shape, and a master where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lowtide import compat
from lowtide.optim.rules import require_rule
from lowtide.optim.state import (
    MASTER,
    MOMENTS,
    LoadTarget,
    ParameterState,
    SavedState,
    check_form,
    from_torch_state,
    read_state_dict,
    to_torch_state,
)
from lowtide.optim.update_types import Numerics
from lowtide.runtime.paged_state import Pages


class KernelStates:
    """See the module's docstring.

    Args:
        optimizer: The user's.
        numerics: Which numbers the updates work on.
        pages: Where states lie that visit the device; None without any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, numerics: Numerics, pages: Pages | None) -> None:
        self.optimizer = optimizer
        self.numerics = numerics
        self.pages = pages
        self.by_parameter: dict[int, ParameterState] = {}
        """By the `id` of the parameter, which the optimizer keeps alive."""
        self._accepted: list[tuple[LoadTarget, SavedState]] = []
        self._before: dict[torch.Tensor, Any] | None = None
        """What the optimizer had of its own, for as long as it may be given back untouched."""

    def fill(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch's `state_dict` gave, with the states in fp32 and the masters; all updates must have been made."""
        state: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if id(parameter) in self.by_parameter:
                    state[key] = self._in_torchs_form(parameter)
        return {**state_dict, "state": state}

    def in_torchs_form(self) -> dict[torch.Tensor, dict[str, Any]]:
        """What `fill` writes, by parameter."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {each: self._in_torchs_form(each) for each in parameters if id(each) in self.by_parameter}

    def _in_torchs_form(self, parameter: torch.Tensor) -> dict[str, Any]:
        """On the host, one parameter at a time: expanded state may not fit the device."""
        if self.pages is not None:
            self.pages.settle()
        state = self.by_parameter[id(parameter)]
        weight = parameter.detach()
        with compat.without_modes():
            here = state.with_tensors([tensor.cpu() for tensor in state.all_tensors()])
            return to_torch_state(weight.cpu(), here, self.numerics)

    def accept(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Check a state that is about to be loaded, torch's own or `fill`'s; what is left of it for torch to load.

        Raises:
            OptimizerStateError: It is of another model or optimizer. Nothing was changed.
        """
        check_form(state_dict, [len(group["params"]) for group in self.optimizer.param_groups])
        names = {id(value): name for value, name in named_parameters(self.optimizer)}
        groups: list[list[LoadTarget]] = []
        for group, loaded in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            # The settings that torch is about to load say what is kept: amsgrad's maximum, a momentum.
            rule = require_rule(self.optimizer, {**group, **loaded, "params": group["params"]})
            groups.append([LoadTarget(name=names[id(value)], weight=value, rule=rule) for value in group["params"]])
        with compat.without_modes():
            saved = read_state_dict(state_dict, groups)
        self._accepted = [
            (target, entries)
            for targets, found in zip(groups, saved, strict=True)
            for target, entries in zip(targets, found, strict=True)
        ]
        return {**state_dict, "state": {}}

    def load_accepted(self) -> None:
        """Take over the states that `accept` has checked; they are made on the host, and `place_state` brings them."""
        accepted, self._accepted, self.by_parameter = self._accepted, [], {}
        if self.pages is not None:
            self.pages.clear()
        for target, entries in accepted:
            if not entries.num_steps and not entries.tensors:
                continue
            weight = target.weight.detach()
            with compat.without_modes(), torch.no_grad():
                copied = torch.empty_strided(weight.size(), weight.stride(), dtype=weight.dtype, device="cpu").copy_(
                    weight
                )
                on_host = replace(target, weight=copied)
                self.by_parameter[id(target.weight)] = from_torch_state(on_host, entries, self.numerics)
                if entries.master is not None:
                    weight.copy_(copied)

    def take_over(self) -> None:
        """What the optimizer has of its own from before, loaded or stepped: it goes on from there."""
        if self.optimizer.state:
            self._before = dict(self.optimizer.state)
            self.accept(self.optimizer.state_dict())
            self.load_accepted()
            self.optimizer.state.clear()

    def keep(self) -> None:
        """The session has begun: what was taken over is not needed as it was."""
        self._before = None

    def hand_back(self) -> None:
        """Give the optimizer its state in the form that its own step works on: of the type of each parameter.

        Before the session has begun it is what was taken over, as it was. Where this breaks off, a second call goes on with
        the states that are left.
        """
        if self._before is not None:
            self.optimizer.state.update(self._before)
            self.by_parameter, self._before = {}, None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self.by_parameter:
                    continue
                entries = self._in_torchs_form(parameter)
                entries.pop(MASTER, None)
                entries.pop(MOMENTS, None)
                self.optimizer.state[parameter] = {
                    name: value if name == "step" else value.to(parameter.dtype) for name, value in entries.items()
                }
                del self.by_parameter[id(parameter)]
        self.by_parameter = {}
        if self.pages is not None:
            self.pages.close()


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
    """With names for messages: an optimizer does not know the model's."""
    return [
        (parameter, f"parameter {number} of param group {index}")
        for index, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    ]
