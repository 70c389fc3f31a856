"""How many bytes of state an optimizer keeps beside each byte of a parameter, found by asking it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lowtide import compat
from lowtide.errors import UnsupportedOptimizerError
from lowtide.optim.rules import require_rule
from lowtide.optim.state import state_bytes
from lowtide.optim.update_types import Numerics
from lowtide.runtime.chunk_proof import apart, prove, set_to_train

_LARGEST_PROBE = 32
"""Elements of a probe along each dimension: many enough that the rows and columns of a factored state count little."""


def state_bytes_per_parameter_byte(optimizer: torch.optim.Optimizer | None, numerics: Numerics | None = None) -> float:
    """2 for Adam, 0 for SGD without momentum, and so on; the largest over all trained parameters, so that no chunk's
    state takes more than was foreseen.

    With `numerics`, by the formats of the own kernels: 5 for Adam on bf16 weights with exact rounding, whose moments take
    8 bytes and whose remainder takes 2. Without them the optimizer's own class takes one step on a small tensor for each
    kind of parameter that it has. State that is there already is not touched. The count of steps, one number, is not
    counted.

    Raises:
        UnsupportedOptimizerError: It cannot take a step on one tensor alone.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(8, 8))
        >>> state_bytes_per_parameter_byte(torch.optim.AdamW([weight]))
        2.0
        >>> state_bytes_per_parameter_byte(torch.optim.SGD([weight], lr=0.1))
        0.0
    """
    if optimizer is None:
        return 0.0
    if numerics is not None:
        return _ratio_of_formats(optimizer, numerics)
    return max((ratio for _, ratio in _ratios(optimizer)), default=0.0)


def state_bytes_by_parameter(optimizer: torch.optim.Optimizer, numerics: Numerics | None) -> dict[int, int]:
    """Bytes of state beside each trained parameter that the optimizer holds, by its `id`, each by its own param group.

    Raises:
        UnsupportedOptimizerError: It cannot take a step on one tensor alone.
    """
    if numerics is None:
        return {id(parameter): math.ceil(parameter.nbytes * ratio) for parameter, ratio in _ratios(optimizer)}
    found: dict[int, int] = {}
    for group in optimizer.param_groups:
        rule = require_rule(optimizer, group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                found[id(parameter)] = state_bytes(parameter.shape, parameter.dtype, rule, numerics)
    return found


def _ratios(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, float]]:
    """Each trained parameter, and the ratio of its kind: one probe for all of a kind."""
    ratios: dict[tuple[int, torch.dtype, int], float] = {}
    with apart(optimizer) as copied:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                kind = (index, parameter.dtype, parameter.dim())
                if parameter.requires_grad and kind not in ratios:
                    try:
                        ratios[kind] = _ratio(copied, index, group, parameter)
                    except UnsupportedOptimizerError:
                        held = optimizer.state.get(parameter)
                        if not held:
                            prove(optimizer, [torch.device("cpu")])  # says more, where no chunk could be updated either
                            raise
                        # Its constructor made what its step cannot do without.
                        ratios[kind] = _bytes_in(held) / max(1, parameter.nbytes)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield parameter, ratios[index, parameter.dtype, parameter.dim()]


def _ratio_of_formats(optimizer: torch.optim.Optimizer, numerics: Numerics) -> float:
    """Of each kind of parameter together: one number beside a tensor of one element would pass for the whole model's."""
    held: dict[tuple[int, torch.dtype, int], tuple[int, int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        rule = require_rule(optimizer, group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                kind = (index, parameter.dtype, parameter.dim())
                state, weights = held.get(kind, (0, 0))
                state += state_bytes(parameter.shape, parameter.dtype, rule, numerics)
                held[kind] = (state, weights + parameter.nbytes)
    return max((state / max(1, weights) for state, weights in held.values()), default=0.0)


def _ratio(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any], parameter: torch.Tensor) -> float:
    shape = tuple(min(size, _LARGEST_PROBE) for size in parameter.shape)
    probe = torch.zeros(shape, dtype=parameter.dtype)
    probe.grad = torch.zeros_like(probe)
    settings = {
        # Not the user's own tensors: a learning rate may lie on the device.
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    state: dict[torch.Tensor, dict[str, Any]] = {probe: {}}
    try:
        shadow = compat.shallow_optimizer(optimizer, [{**settings, "params": [probe]}], state)
        set_to_train(shadow)
        compat.step_without_hooks(shadow)
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} could not take a step on one {probe.dtype} tensor of shape {shape} alone (param "
            f"group {index}), so the size of its state is unknown: {type(error).__name__}: {error}; give a plan made by "
            "make_plan, which does not need it"
        ) from error
    return _bytes_in(state[probe]) / max(1, probe.nbytes)


def _bytes_in(state: Mapping[str, Any]) -> int:
    """Bytes of one parameter's state, without the count of its steps."""
    return sum(value.nbytes for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step")
