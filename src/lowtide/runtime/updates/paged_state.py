"""Pages: optimizer state that lies on the host and visits the device for each update.

Note [The order of a visit]
Device memory for a visitor is taken by the computation, in its order, and filled by a copy that comes after that point
and after the copy that brought the state home the last time. The update waits for it. Then the state goes home, after
the update; the mover keeps the visitor alive until that copy is done. So a state is never in two places with two values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from lowtide import compat
from lowtide.memory.mover import Mover, Ticket
from lowtide.optim.rules import Rule
from lowtide.optim.state import ParameterState, new_state
from lowtide.optim.update_types import Numerics
from lowtide.planning.timeline import Reason
from lowtide.runtime.statistics.recording import Recorder

_ALIGNMENT = 512


@dataclass(slots=True)
class _Visitor:
    state: ParameterState
    memory: torch.Tensor
    """Its bytes on the device, laid out as at home."""
    arrived: Ticket


class Pages:
    """The states that visit.

    Args:
        mover: Makes the copies.
        recorder: Is told of them.
        on_host_memory: Told of memory that is the host's: an emulated device must not count it.
    """

    def __init__(self, mover: Mover, recorder: Recorder, on_host_memory: Callable[[torch.Tensor], None]) -> None:
        self._mover = mover
        self._recorder = recorder
        self._on_host_memory = on_host_memory
        self._memory: dict[int, torch.Tensor] = {}
        """By the `id` of a state: its bytes on the host, one tensor after the other, so that a visit is one copy."""
        self._states: list[ParameterState] = []
        """Kept, so that an `id` stays its own."""
        self._home: dict[int, Ticket] = {}
        """When it was home again."""
        self._visitors: dict[int, _Visitor] = {}

    def new(self, weight: torch.Tensor, rule: Rule, numerics: Numerics) -> ParameterState:
        """State before the first update, in locked memory of the host."""
        with compat.without_modes(), torch.no_grad():
            state = new_state(weight.detach().cpu(), rule, numerics)
            self._lock_memory(state)
        return state

    def adopt(self, state: ParameterState) -> None:
        """Take over a state that was loaded: bring it to locked memory of the host."""
        with compat.without_modes(), torch.no_grad():
            state.move_to(torch.device("cpu"))
            self._lock_memory(state)

    def prefetch(self, states: Iterable[ParameterState]) -> None:
        """Send states on their way to the device: their updates are near."""
        for state in states:
            if id(state) not in self._visitors:
                self._visitors[id(state)] = self._bring(state)

    def take(self, state: ParameterState) -> ParameterState:
        """The state on the device, for one update, until `give_back`."""
        if id(state) not in self._visitors:
            self._visitors[id(state)] = self._bring(state)
        visitor = self._visitors[id(state)]
        self._mover.compute_after(visitor.arrived)
        return visitor.state

    def give_back(self, state: ParameterState) -> None:
        """The update is made: the state goes home."""
        visitor = self._visitors.pop(id(state))
        copied = self._mover.to_host(self._memory[id(state)], visitor.memory, [self._mover.now()])
        self._recorder.on_state(copied, Reason.PAGE_OUT, visitor.memory.nbytes)
        self._home[id(state)] = copied.ended

    def dismiss(self) -> None:
        """Let the states on the device leave without a change: no update needs them."""
        for visitor in self._visitors.values():
            # The copy writes into memory that is about to be free.
            self._mover.compute_after(visitor.arrived)
        self._visitors.clear()

    def settle(self) -> None:
        """Wait until all states are home."""
        for ticket in self._home.values():
            ticket.wait()
        self._home.clear()

    def clear(self) -> None:
        """Free the host's memory of all states; they must not be used any more."""
        self.dismiss()
        self._mover.drain()
        for memory in self._memory.values():
            self._mover.free_host_buffer(memory)
        self._memory.clear()
        self._home.clear()
        self._states.clear()

    def close(self) -> None:
        """The session is over."""
        self.clear()

    def _bring(self, state: ParameterState) -> _Visitor:
        home = self._memory[id(state)]
        after = [self._home[id(state)]] if id(state) in self._home else []
        memory = torch.empty_like(home, device=self._mover.device)
        copied = self._mover.to_device(memory, home, [self._mover.now(), *after])
        self._recorder.on_state(copied, Reason.PAGE_IN, home.nbytes)
        return _Visitor(state.with_tensors(_laid_out(state, memory)), memory, copied.ended)

    def _lock_memory(self, state: ParameterState) -> None:
        if (old := self._memory.pop(id(state), None)) is not None:
            self._mover.drain()
            self._mover.free_host_buffer(old)
        memory = self._mover.host_buffer(sum(map(_padded_bytes, state.all_tensors())))
        self._on_host_memory(memory)
        homes = _laid_out(state, memory)
        for home, tensor in zip(homes, state.all_tensors(), strict=True):
            home.copy_(tensor)
        state.replace_tensors(homes)
        self._memory[id(state)] = memory
        self._states.append(state)


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _laid_out(state: ParameterState, memory: torch.Tensor) -> list[torch.Tensor]:
    """Tensors like the state's, one after the other in flat bytes."""
    found: list[torch.Tensor] = []
    offset = 0
    for tensor in state.all_tensors():
        found.append(memory[offset : offset + tensor.nbytes].view(tensor.dtype))
        offset += _padded_bytes(tensor)
    return found
