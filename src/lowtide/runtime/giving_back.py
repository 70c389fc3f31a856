"""What `close` gives back besides the managed parameters: buffers, unmanaged parameters, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def return_rest(moved: Iterable[tuple[nn.Module, str, torch.device]]) -> None:
    """Buffers and unmanaged parameters go back to where they were."""
    for module, name, device in moved:
        buffer, parameter = module._buffers.get(name), module._parameters.get(name)
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
        elif parameter is not None:
            parameter.data = parameter.data.to(device)


def bring_state_to_parameters(optimizer: torch.optim.Optimizer | None) -> None:
    """State lies beside its parameter, as a plain optimizer expects it. Step counts stay where torch keeps them."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step" and value.device != parameter.device:
                    state[key] = value.to(parameter.device)
