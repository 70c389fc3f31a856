"""Chunk stores made of sizes alone, with everything that happens in them written down."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from lowtide.errors import BudgetError
from lowtide.memory.chunk import LEGAL, Chunk, ChunkSpec, ChunkState, StoredGroup, lay_out
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Copied, Ticket
from lowtide.memory.store import ChunkStore
from tests.memory.small_layouts import group


class WatchedChunk(Chunk):
    """Refuses every change of state that the table does not name, by whatever way it comes."""

    _state: ChunkState | None = None

    @property
    def state(self) -> ChunkState:
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: ChunkState) -> None:
        assert self._state is None or state in LEGAL[self._state], f"{self._state} to {state}"
        self._state = state


class Log:
    """What the store told its listener."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.present: set[str] = set()
        self.held: set[str] = set()
        """Groups whose bytes on the host somebody may change without a word."""

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        self.events.append((reason, chunk.spec.name))

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        return group.name not in self.held

    def before_fetch(self, chunk: Chunk) -> None:
        pass

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        assert chunk.spec.name not in self.present
        self.present.add(chunk.spec.name)

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        self.present.remove(chunk.spec.name)

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        self.events.append(("wait", group.name))

    def take(self) -> list[tuple[str, ...]]:
        events, self.events = self.events, []
        return events


class Counter:
    """Books with a limit of their own."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.by_owner: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self.by_owner.values())

    def charge(self, num_bytes: int, owner: str) -> None:
        if self.used_bytes + num_bytes > self.limit_bytes:
            raise BudgetError(
                "full",
                tier="device",
                needed_bytes=num_bytes,
                free_bytes=self.limit_bytes - self.used_bytes,
                budget_bytes=self.limit_bytes,
            )
        self.by_owner[owner] = self.by_owner.get(owner, 0) + num_bytes

    def credit(self, num_bytes: int, owner: str) -> None:
        self.by_owner[owner] -= num_bytes
        assert self.by_owner[owner] >= 0, owner

    def clear(self, owners: Collection[str]) -> None:
        for owner in owners:
            self.by_owner.pop(owner, None)


class LateWork:
    """An update on the host that happens when somebody waits for it; `finish` is the worker being quick.

    It adds to what is there, so that it is wrong after a copy that is missing or comes too late.
    """

    def __init__(self, chunk: Chunk, change: int) -> None:
        self._chunk, self._change, self._is_done = chunk, change, False
        self._copies = self.copies_of(chunk)
        self.error: Exception | None = None

    @staticmethod
    def copies_of(chunk: Chunk) -> list[Copied]:
        """Copies that read or write the host's bytes, and must be over before the update changes them."""
        return [copied for copied in (chunk.fetched, chunk.written) if copied is not None]

    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        self.finish()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        if not self._is_done:
            self._is_done = True
            for copied in self._copies:
                copied.ended.wait()
            assert self._chunk.host is not None
            add(self._chunk.host, self._change)


LARGEST = 251
"""Bytes stay below it, so that none is ever like poison."""


def add(buffer: torch.Tensor, change: int) -> None:
    buffer.copy_((buffer.int() + change) % LARGEST)


def make_chunk(spec: ChunkSpec, mover: EmulatedMover, value: int, *, is_resident: bool = False) -> Chunk:
    host = torch.full((spec.nbytes,), value, dtype=torch.uint8)
    device = mover.device_buffer(spec.nbytes)
    chunk = WatchedChunk(spec, host, device)
    if is_resident:
        device.copy_(host)
        chunk.become(ChunkState.RESIDENT)
    else:
        mover.shrink(device, [])
    return chunk


class SmallStore:
    """A store over groups of these many 512-byte pages per chunk; chunk bytes start as 1, 2, 3 and so on."""

    def __init__(
        self,
        pages: Mapping[str, Sequence[int]],
        *,
        window_pages: int,
        depth: int = 0,
        resident: Sequence[str] = (),
        mover: EmulatedMover | None = None,
        books: Sequence[Counter] | None = None,
    ) -> None:
        self.mover = mover or EmulatedMover()
        self.log = Log()
        self.books = list(books) if books is not None else [Counter()]
        layout = lay_out(
            [group(name, [512 * size for size in sizes]) for name, sizes in pages.items()], chunk_bytes=512
        )
        values = iter(range(1, 200))
        groups = [
            StoredGroup(
                spec,
                [
                    make_chunk(chunk, self.mover, next(values), is_resident=spec.name in resident)
                    for chunk in layout.chunks_of(spec.name)
                ],
            )
            for spec in layout.groups
        ]
        self.store = ChunkStore(
            groups,
            self.mover,
            self.books,
            window_bytes=512 * window_pages,
            prefetch_depth=depth,
            listener=self.log,
        )

    def chunk(self, name: str, index: int = 0) -> Chunk:
        return self.store.groups[name].chunks[index]

    def use(self, *names: str) -> None:
        """Open and close these one after the other."""
        for name in names:
            self.store.open(name)
            self.store.close(name)

    def learn(self, *names: str) -> None:
        """Use them as one cycle, take everything off again and forget what was written down."""
        self.use(*names)
        self.store.order.end_cycle()
        self.store.drop_all()
        self.log.take()

    @property
    def on_device(self) -> set[str]:
        return {name for name, found in self.store.groups.items() if all(chunk.is_on_device for chunk in found.chunks)}
