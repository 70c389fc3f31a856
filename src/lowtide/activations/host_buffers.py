"""HostBuffers: host memory that stashed tensors borrow, and that waits for the next step.

Note [What is kept]
Locking costs half a second per GiB, and a step needs as many buffers as the one before: so what is given back is kept, and
serves requests of down to half its size. But batches have other lengths each step, and buffers of every size that ever
came would add up: where a request has to allocate, kept buffers go until no more is held than was ever in use at once.

Not for several threads: the stash has a lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch

from lowtide.errors import BudgetError
from lowtide.memory.layout import ALIGNMENT_BYTES
from lowtide.memory.mover import Mover

MAX_SLACK = 2
"""A buffer of up to so many times the bytes asked for will do."""


class HostBuffers:
    """See the module's docstring.

    Args:
        mover: Makes the buffers, and the copies that may be under way in those that were given back.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._kept: list[torch.Tensor] = []
        """By size, those of one size first in, first out."""
        self._sizes: list[int] = []
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """By identity of the view that was handed out: the view, the whole buffer and the bytes asked for."""
        self._needed_bytes = self._most_needed_bytes = 0
        self.lent_bytes = 0
        """In buffers that were taken and not given back."""

    @property
    def held_bytes(self) -> int:
        """In kept buffers."""
        return sum(self._sizes)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of so many bytes, with whatever is in it. Give this very tensor back."""
        needed_bytes = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        self._most_needed_bytes = max(self._most_needed_bytes, self._needed_bytes + needed_bytes)
        index = bisect_left(self._sizes, needed_bytes)
        if index < len(self._sizes) and self._sizes[index] <= MAX_SLACK * needed_bytes:
            del self._sizes[index]
            whole = self._kept.pop(index)
        else:
            whole = self._allocated(needed_bytes)
        view = whole.narrow(0, 0, num_bytes)
        self._lent[id(view)] = (view, whole, needed_bytes)
        self._needed_bytes += needed_bytes
        self.lent_bytes += whole.numel()
        return view

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep what `take` gave for a later one; copies may still be under way in it."""
        _, whole, needed_bytes = self._lent.pop(id(buffer))
        self._needed_bytes -= needed_bytes
        self.lent_bytes -= whole.numel()
        index = bisect_right(self._sizes, whole.numel())
        self._sizes.insert(index, whole.numel())
        self._kept.insert(index, whole)

    def clear(self) -> None:
        """Free what is kept, once the copies are done."""
        self._free(len(self._kept))

    def close(self) -> None:
        """Free what is lent as well: nobody is left who would give it back."""
        for view, _, _ in list(self._lent.values()):
            self.give_back(view)
        self.clear()

    def _allocated(self, needed_bytes: int) -> torch.Tensor:
        surplus_bytes = self.held_bytes + self.lent_bytes + needed_bytes - self._most_needed_bytes
        num_freed = 0
        while surplus_bytes > 0 and num_freed < len(self._kept):
            num_freed += 1
            surplus_bytes -= self._sizes[-num_freed]
        self._free(num_freed)
        try:
            return self._mover.host_buffer(needed_bytes)
        except BudgetError:
            if not self._kept:
                raise
            self.clear()
            return self._mover.host_buffer(needed_bytes)

    def _free(self, num_buffers: int) -> None:
        """The largest: so the fewest go."""
        if not num_buffers:
            return
        # What was given back unread may still be written to, and what was read ahead read from.
        self._mover.drain()
        for _ in range(num_buffers):
            self._sizes.pop()
            self._mover.free_host_buffer(self._kept.pop())
