"""A stack of equal blocks, and a mode that counts the bytes of all living storages that it saw being made."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.memory.emulated_mover import EmulatedMover

WIDTH = 64
ROWS = 256
INPUT_BYTES = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        out: Tensor = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Stack(nn.Module):
    def __init__(self, num_blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack(num_blocks: int) -> Stack:
    """With the same weights each time."""
    torch.manual_seed(3)
    return Stack(num_blocks)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a step with a fixed seed."""
    model.zero_grad()
    torch.manual_seed(5)
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_equal(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


class LiveBytes(compat.WatchingMode):
    """Counts what operators make, until it dies."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        # What an operator is given and nobody has seen was there before: weights, buffers.
        self._note((args, kwargs), is_new=False)
        out = func(*args, **(kwargs or {}))
        self._note(out, is_new=True)
        return out

    def _note(self, value: object, *, is_new: bool) -> None:
        for leaf in compat.flatten(value)[0]:
            if isinstance(leaf, Tensor) and (storage := compat.plain_storage(leaf)) is not None:
                self._note_storage(storage, storage.nbytes() if is_new else 0)

    def _note_storage(self, storage: torch.UntypedStorage, size: int) -> None:
        known = self._known.get(id(storage))
        if known is not None and known() is storage:
            return

        def gone(reference: object) -> None:
            self.live_bytes -= size

        self._known[id(storage)] = weakref.ref(storage, gone)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class OutsideMover(EmulatedMover):
    """Its host memory is not counted."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        with compat.without_modes():
            return super().host_buffer(num_bytes)
