"""StepContext: what a traced step runs inside of, where something else than torch holds its weights (a session, say)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from lowtide.memory.mover import Mover
from lowtide.tracing.recorder import Life, StorageRecorder
from lowtide.tracing.step_trace import Category

COPY_STREAM = 1
"""Has a pool of its own in the allocator, as every stream but the computation's has."""


class DeviceMemory:
    """Memory of the traced device that no operator makes.

    Args:
        recorder: Of the trace; what is taken appears there like any storage.
        mover: Carries tensors of the trace between the device and the host.
        tell: Is told of an error before it is raised: in autograd's thread it would be lost.
    """

    def __init__(self, recorder: StorageRecorder, mover: Mover, tell: Callable[[BaseException], None]) -> None:
        self._recorder, self.mover = recorder, mover
        self.device = mover.device
        self.tell = tell

    def take(self, num_bytes: int, name: str) -> Life:
        """A buffer for weights, from the pool of the copies' stream."""
        life = self._recorder.allocate(num_bytes, (num_bytes,), "uint8", category=Category.WEIGHTS, stream=COPY_STREAM)
        life.rename(name, "chunk")
        return life

    def give_back(self, life: Life) -> None:
        """The buffer goes back to that pool."""
        self._recorder.free(life)


class StepContext(Protocol):
    """Travels to the tracing process with the model, so it is made of plain data."""

    @property
    def num_warm_up_steps(self) -> int:
        """After how many steps all further ones are alike."""

    def placed(self, model: nn.Module) -> Collection[nn.Parameter]:
        """The parameters whose memory is theirs: the trace takes none for them."""

    def around(self, model: nn.Module, memory: DeviceMemory) -> AbstractContextManager[object]:
        """Entered once the model has its activation policies, before the first step."""
