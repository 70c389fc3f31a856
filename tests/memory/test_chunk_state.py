from __future__ import annotations

import itertools

import pytest

from lowtide.errors import ChunkStateError
from lowtide.memory.chunk_state import LEGAL, ON_DEVICE, ChunkState, move

MOVES = {
    ("host", "fetching"),
    ("host", "resident"),
    ("fetching", "in use"),
    ("fetching", "host"),
    ("in use", "idle"),
    ("in use", "dirty"),
    ("idle", "in use"),
    ("idle", "host"),
    ("idle", "resident"),
    ("dirty", "writing back"),
    ("writing back", "idle"),
    ("writing back", "in use"),
    ("writing back", "dirty"),
    ("resident", "host"),
}


@pytest.mark.parametrize(("now", "to"), list(itertools.product(ChunkState, ChunkState)))
def test_every_move_is_allowed_or_refused(now: ChunkState, to: ChunkState) -> None:
    if (now.value, to.value) in MOVES:
        assert move("layers.0/0", now, to) is to
    else:
        with pytest.raises(ChunkStateError, match=f"layers.0/0 cannot go from {now.value!r} to {to.value!r}"):
            move("layers.0/0", now, to)


def test_the_error_says_what_would_be_allowed() -> None:
    with pytest.raises(ChunkStateError, match="from 'in use' it may become dirty, idle"):
        move("a/0", ChunkState.IN_USE, ChunkState.HOST)


def test_what_is_in_use_or_out_of_date_on_the_host_never_leaves() -> None:
    for state in (ChunkState.IN_USE, ChunkState.DIRTY, ChunkState.WRITING_BACK):
        assert ChunkState.HOST not in LEGAL[state]


def test_nothing_is_read_before_it_has_arrived() -> None:
    assert ChunkState.IN_USE not in LEGAL[ChunkState.HOST]
    assert LEGAL[ChunkState.DIRTY] == {ChunkState.WRITING_BACK}


def test_every_state_can_be_left_and_reached() -> None:
    assert set(LEGAL) == set(ChunkState)
    assert set().union(*LEGAL.values()) == set(ChunkState)
    assert set(ChunkState) - {ChunkState.HOST} == ON_DEVICE
