"""Optimizers that step another one: accelerate's, Lookahead, SAM. The one inside is managed, which they go on calling."""

from __future__ import annotations

import types

import torch

from lowtide.errors import UnsupportedOptimizerError
from lowtide.planning.plan import Schedule


def unwrapped(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> torch.optim.Optimizer:
    """The optimizer that updates the parameters: a wrapper's own, which the wrapper goes on calling.

    What the wrapper does beside that it does in the loop's thread, before or after the inner step, as in plain torch.

    Raises:
        UnsupportedOptimizerError: There are several inside, over other parameters than its own, or it would not call the
            managed step.
    """
    name = type(optimizer).__name__
    inner = {key: value for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)}
    inner |= {
        f"{key}[{place!r}]": each
        for key, value in vars(optimizer).items()
        if isinstance(value, list | tuple | dict)
        for place, each in (value.items() if isinstance(value, dict) else enumerate(value))
        if isinstance(each, torch.optim.Optimizer)
    }
    if not inner:
        return optimizer
    path, found = next(iter(inner.items()))
    kind = type(found).__name__
    if len({id(each) for each in inner.values()}) > 1 or not _parameters(optimizer) <= _parameters(found):
        raise UnsupportedOptimizerError(
            f"{name} steps other optimizers ({', '.join(type(each).__name__ for each in inner.values())}) beside its own "
            "parameters, and a session has one; make one optimizer with a param group for each"
        )
    if any(isinstance(value, types.MethodType) and value.__self__ is found for value in vars(optimizer).values()):
        raise UnsupportedOptimizerError(
            f"{name} has kept the step of the {kind} in it from before, as accelerate does with a GradScaler, and would go "
            f"past the session; manage the {kind} first, and make the {name} of it (accelerator.prepare) afterwards"
        )
    if schedule is Schedule.IN_BACKWARD and not _only_delegates(optimizer):
        raise UnsupportedOptimizerError(
            f"{name} does more in its step than the {kind} in it, and with the schedule 'in_backward' the weights have moved "
            f"when that begins; use the schedule 'deferred', or manage and step the {kind} (optimizer.{path}) alone"
        )
    return unwrapped(found, schedule)


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(each) for group in getattr(optimizer, "param_groups", ()) for each in group["params"]}


def _only_delegates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the wrapper is one that is known to do nothing of its own."""
    return (type(optimizer).__module__, type(optimizer).__name__) == ("accelerate.optimizer", "AcceleratedOptimizer")
