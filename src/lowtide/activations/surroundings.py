"""What a run depends on besides its inputs, random numbers and autocast, so that it can be run again just so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The settings of one device type."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype
    uses_cache: bool

    def again(self) -> torch.amp.autocast:
        """A context with these settings."""
        return torch.amp.autocast(
            self.device_type, dtype=self.dtype, enabled=self.is_enabled, cache_enabled=self.uses_cache
        )


class Surroundings:
    """Those of the moment at which it is made.

    Args:
        inputs: Of the run: on whose devices random numbers may be drawn.
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._device_type = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        self._host_state = torch.get_rng_state()
        self._devices: list[int] = []
        self._device_states: list[torch.Tensor] = []
        if self._device_type == "cuda":
            devices, self._device_states = get_device_states(*tensors)
            self._devices = list(devices)
        self._autocasts = [
            Autocast(
                device_type=kind,
                is_enabled=torch.is_autocast_enabled(kind),
                dtype=torch.get_autocast_dtype(kind),
                uses_cache=torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys((self._device_type, "cpu"))
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run in these surroundings; those of now come back afterwards."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices))
            torch.set_rng_state(self._host_state)
            if self._devices:
                set_device_states(self._devices, self._device_states, device_type=self._device_type)
            for autocast in self._autocasts:
                stack.enter_context(autocast.again())
            yield
