"""State that is loaded into a managed optimizer is checked: it must be of this optimizer and this model.

What the optimizer keeps is found by asking it: with the saved settings it takes one step on a small tensor of each kind of
parameter. Where it cannot, there is nothing to compare with, and torch loads what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide import compat
from lowtide.errors import OptimizerStateError
from lowtide.optim.state import STEP, check_form
from lowtide.runtime.updates.proof import apart, set_to_train

_LARGEST_PROBE = 4


def check_loaded_settings(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse a state of the right form whose settings are another optimizer's: one that has no state shows by them alone.

    Raises:
        OptimizerStateError: They are. Nothing was written yet.
    """
    kind = type(optimizer).__name__
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        # Each by itself is harmless: a scheduler adds settings, and an older version may have had fewer.
        missing = [name for name, value in optimizer.defaults.items() if name not in saved and _is_number(value)]
        unknown = [str(name) for name in saved if name not in group and name not in optimizer.defaults]
        if missing and unknown:
            raise OptimizerStateError(
                f"param group {index} of the state has {', '.join(unknown)}, which {kind} does not know, and not "
                f"{', '.join(missing)}, which it needs: it was saved by another optimizer; load it into that one, or start "
                "without it"
            )


def check_loaded_state(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse a state that is of another model or optimizer; nothing was written yet.

    Raises:
        OptimizerStateError: It is. The message names the first parameter that differs.
    """
    check_form(state_dict, [len(group["params"]) for group in optimizer.param_groups])
    kept: dict[tuple[int, torch.dtype, int], dict[str, Any] | None] = {}
    with apart(optimizer) as copied:
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
            for number, (parameter, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
                entries = state_dict["state"].get(key)
                if not entries:
                    continue
                kind = (index, parameter.dtype, parameter.dim())
                if kind not in kept:
                    kept[kind] = _kept_state(copied, {**group, **saved}, parameter)
                known = kept[kind]
                if known is not None:
                    name = f"parameter {number} of param group {index}"
                    _check_entries(type(optimizer).__name__, name, entries, known, parameter)


def _kept_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any] | None:
    """What a step on a small tensor leaves behind; None where it cannot be taken."""
    with compat.without_modes(), torch.no_grad():
        probe = torch.zeros(_probe_shape(parameter), dtype=parameter.dtype, device="cpu")
        probe.grad = torch.zeros_like(probe)
        settings = {
            name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
        }
        state: dict[torch.Tensor, dict[str, Any]] = {probe: {}}
        shadow = compat.shallow_optimizer(optimizer, [{**settings, "params": [probe]}], state)
        try:
            set_to_train(shadow)
            compat.step_without_hooks(shadow)
        except Exception:  # a user's own optimizer may raise anything; then there is nothing to compare with
            return None
    return state[probe]


def _check_entries(
    kind: str, name: str, entries: Mapping[str, Any], known: Mapping[str, Any], parameter: torch.Tensor
) -> None:
    # One that is None is not there: SGD writes down a momentum that it does not have.
    missing = [entry for entry, value in known.items() if value is not None and entry not in entries]
    if missing:
        raise OptimizerStateError(
            f"the state of {name!r} has {', '.join(sorted(map(str, entries)))}; {kind} with these settings keeps "
            f"{', '.join(known)}: it was saved by another optimizer or with other options; load it into that one, or start "
            "without it",
            parameter=name,
        )
    for entry, value in known.items():
        found = entries.get(entry)
        # What is not of the parameter's shape, such as sums of rows, the optimizer alone knows the shape of.
        if entry == STEP or not isinstance(value, torch.Tensor) or not isinstance(found, torch.Tensor):
            continue
        if value.shape == _probe_shape(parameter) and found.shape != parameter.shape:
            raise OptimizerStateError(
                f"{entry} of {name!r} has shape {tuple(found.shape)} in the state, and the parameter has shape "
                f"{tuple(parameter.shape)}; the state is of another model: load it into that one, or start without it",
                parameter=name,
            )


def _is_number(value: object) -> bool:
    """Whether a setting is a number, or a tuple of them: no step can be taken without it."""
    return isinstance(value, int | float | tuple | torch.Tensor) and not isinstance(value, bool)


def _probe_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(min(size, _LARGEST_PROBE) for size in parameter.shape)
