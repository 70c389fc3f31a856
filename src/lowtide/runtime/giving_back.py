"""What `close` does besides giving managed parameters back: settling, buffers, unmanaged parameters, optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from lowtide.runtime.engine import Engine
from lowtide.runtime.host_worker import HostWorker


def settle_for_good(engine: Engine, worker: HostWorker) -> Exception | None:
    """Settle what can be settled, and end the worker; the first error, for when everything has been given back."""
    errors: list[Exception] = []

    def attempt(settle: Callable[[], None]) -> bool:
        try:
            settle()
        except Exception as error:
            errors.append(error)
            return False
        return True

    attempt(engine.check_broken)
    worker.close()
    # In any case: whatever was left half made, wherever that was.
    attempt(engine.put_in_order)
    engine.mover.drain()
    for unit in engine.units.values():
        # A failed update is forgotten once it has been reported: what follows it gets its turn.
        for _ in range(len(unit.group.chunks) + 1):
            if attempt(partial(engine.settle_unit, unit)):
                break
        for bound in unit.bounds:
            while not attempt(bound.settle_gradient):
                pass
    attempt(worker.check)
    attempt(partial(engine.gradient_watch.check, waits=True))
    engine.mover.drain()
    first = errors[0] if errors else None
    errors.clear()  # the errors' own frames see this list: a cycle would keep what they hold
    return first


def return_rest(moved: Iterable[tuple[nn.Module, str, torch.device]]) -> None:
    """Buffers and unmanaged parameters go back to where they were."""
    for module, name, device in moved:
        buffer, parameter = module._buffers.get(name), module._parameters.get(name)
        if buffer is not None:
            module._buffers[name] = buffer.to(device)
        elif parameter is not None:
            parameter.data = parameter.data.to(device)


def bring_state_to_parameters(optimizer: torch.optim.Optimizer | None) -> None:
    """State lies beside its parameter, as a plain optimizer expects it. Step counts lie where torch keeps them."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        # Kernels that read the count read it on the device; else it is a number on the host.
        stays = () if group.get("capturable") or group.get("fused") else ("step",)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key not in stays and value.device != parameter.device:
                    state[key] = value.to(parameter.device)
