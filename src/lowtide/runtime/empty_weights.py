"""empty_weights: build a model whose parameters have no memory yet, while its buffers are real."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def empty_weights() -> Iterator[None]:
    """Inside, parameters of new modules are on the meta device: building takes no time and no memory.

    Buffers keep their values, unlike under `torch.device("meta")`: what a model computes once (frequencies of a rotary
    embedding) is not in any weight file. One Parameter under several names, a tied one, stays one. `manage(...,
    weights=FILE)` fills the parameters, group by group. Only one thread may build models meanwhile: torch's registration
    of parameters is exchanged for all.

    Example:
        >>> with empty_weights():
        ...     layer = nn.BatchNorm1d(3)
        >>> layer.weight.device.type, layer.running_var.device.type
        ('meta', 'cpu')
    """
    register = nn.Module.register_parameter
    # Weak: a parameter with values must go as soon as its empty one has taken its place.
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def empty_one(parameter: nn.Parameter) -> nn.Parameter:
        source, empty = made.get(id(parameter), (None, None))
        if source is None or empty is None or source() is not parameter:
            empty = nn.Parameter(torch.empty_like(parameter.data, device="meta"), requires_grad=parameter.requires_grad)
            made[id(parameter)] = weakref.ref(parameter), empty
        return empty

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # One that is empty already comes from another module: the two are tied by being the same object.
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            module._parameters[name] = empty_one(parameter)

    # Exchanged on purpose, and put back below: there is no hook that could replace what is registered.
    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
