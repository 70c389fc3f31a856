"""The states of a chunk and the table of legal moves between them. Every change of state goes through `move`."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from lowtide.errors import ChunkStateError


class ChunkState(enum.StrEnum):
    """Which bytes of a chunk exist where. N is the chunk's size."""

    HOST = "host"
    """N on the host, which holds the truth; nothing on the device."""
    FETCHING = "fetching"
    """N on the host, N on the device being filled; nobody may read the device's yet."""
    IN_USE = "in use"
    """N on the host, the same N on the device, read by an open window: must not leave."""
    IDLE = "idle"
    """N on the host, the same N on the device, read by nobody: leaves by being dropped."""
    DIRTY = "dirty"
    """N on the device hold the truth, N on the host are out of date: must be written back before it leaves."""
    WRITING_BACK = "writing back"
    """N on the device hold the truth and are being copied to N on the host."""
    RESIDENT = "resident"
    """N on the device hold the truth; the host has no weights of it."""


LEGAL: Mapping[ChunkState, frozenset[ChunkState]] = {
    ChunkState.HOST: frozenset({ChunkState.FETCHING, ChunkState.RESIDENT}),
    # Back to HOST: fetched for nothing, because another group was needed first or the host's weights changed.
    ChunkState.FETCHING: frozenset({ChunkState.IN_USE, ChunkState.HOST}),
    ChunkState.IN_USE: frozenset({ChunkState.IDLE, ChunkState.DIRTY}),
    ChunkState.IDLE: frozenset({ChunkState.IN_USE, ChunkState.HOST, ChunkState.RESIDENT}),
    ChunkState.DIRTY: frozenset({ChunkState.WRITING_BACK}),
    # To DIRTY: changed once more in the same window, by a hook of the user's and by an update; a second copy follows the first.
    ChunkState.WRITING_BACK: frozenset({ChunkState.IDLE, ChunkState.IN_USE, ChunkState.DIRTY}),
    ChunkState.RESIDENT: frozenset({ChunkState.HOST}),
}

ON_DEVICE = frozenset(set(ChunkState) - {ChunkState.HOST})
"""States in which the chunk has bytes on the device."""


def move(chunk: str, now: ChunkState, to: ChunkState) -> ChunkState:
    """The new state, if the table allows it.

    Example:
        >>> move("layers.0/0", ChunkState.HOST, ChunkState.FETCHING)
        <ChunkState.FETCHING: 'fetching'>
    """
    if to not in LEGAL[now]:
        legal = ", ".join(sorted(LEGAL[now]))
        raise ChunkStateError(
            f"chunk {chunk} cannot go from {now.value!r} to {to.value!r}: from {now.value!r} it may become {legal}. "
            "This is a fault of Lowtide's; please report it with the plan"
        )
    return to
