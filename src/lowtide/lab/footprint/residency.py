"""FootprintResidency: opens and closes groups in a trace, whose parameters look nowhere: they have no memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from lowtide.errors import BudgetError
from lowtide.memory.chunk import Chunk, StoredGroup
from lowtide.memory.mover import Copied, Ticket
from lowtide.memory.store import ChunkStore
from lowtide.runtime.parameters.group import ManagedGroup


class FootprintResidency:
    """What `Residency` is in a session. Also the store's listener, and its books.

    `store` is set right after both are made: each of the two needs the other. `tell` is told of errors before they are raised.
    """

    store: ChunkStore

    def __init__(self, groups: Iterable[ManagedGroup], tell: Callable[[BaseException], None]) -> None:
        self.groups = {group.name: group for group in groups}
        self._tell = tell

    def open(self, group: ManagedGroup) -> None:
        """Bring the group to the device.

        Raises:
            BudgetError: The window does not hold it beside those that are open; a session would refuse it too.
        """
        try:
            self.store.open(group.name)
        except BudgetError as error:
            self._tell(error)
            raise

    def open_all(self, groups: Sequence[ManagedGroup]) -> None:
        """All of them."""
        for group in groups:
            self.open(group)

    def close(self, group: ManagedGroup, at: Ticket | None = None) -> None:
        """One use less."""
        self.store.close(group.name, at)
        if not group.stored.num_open:
            self.forget_old_copy(group)

    def forget_old_copy(self, group: ManagedGroup) -> None:
        """Where the host is changing the weights, a copy on the device is the old one."""
        is_changing = any(chunk.host_work is not None for chunk in group.stored.chunks)
        if is_changing and not group.is_resident and not group.stored.num_open:
            self.store.drop(group.name)

    def keep_writes(self, group: ManagedGroup) -> None:
        """A forward that writes to its own weights takes no memory for it."""

    def keep_write(self, group: ManagedGroup, chunk: Chunk) -> None:
        """Nor does a hook."""

    def write_back(self, group: ManagedGroup, chunk: Chunk) -> None:
        """The computation changed an open chunk."""
        del group
        self.store.write_back(chunk)

    def settle_held(self) -> None:
        """Nobody looks."""

    def guard(self, group: ManagedGroup) -> None:
        """Nobody looks."""

    def rest(self) -> None:
        """Nobody looks."""

    def rebuild(self) -> None:
        """A trace that broke off is over."""

    # -- told by the store ---------------------------------------------------------------------------------------------

    def charge(self, num_bytes: int, owner: str) -> None:
        """A trace has room for everything."""

    def credit(self, num_bytes: int, owner: str) -> None:
        """A trace has room for everything."""

    def may_fetch_ahead(self, group: StoredGroup) -> bool:
        """Nobody writes to weights without memory."""
        return True

    def clear(self, owners: Collection[str]) -> None:
        """A trace has room for everything."""

    def before_fetch(self, chunk: Chunk) -> None:
        """There are no bytes that could be the wrong ones."""

    def on_copy(self, chunk: Chunk, copied: Copied, reason: str) -> None:
        """Copies are not counted."""

    def on_present(self, chunk: Chunk, at: Ticket) -> None:
        """The mover has taken the memory."""

    def on_absent(self, chunk: Chunk, at: Ticket) -> None:
        """The mover has given it back."""

    def on_wait(self, group: StoredGroup, reached: Ticket, copied: Sequence[Copied]) -> None:
        """Nothing is waited for."""
