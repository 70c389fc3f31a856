"""Chunks: the table of their states, and views of their bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide.errors import ChunkStateError
from lowtide.memory.chunk import LEGAL, ON_DEVICE, ChunkState, ParameterSpec, StoredGroup, lay_out, move, view_of
from lowtide.memory.emulated_mover import EmulatedMover
from tests.memory.small_layouts import group
from tests.memory.stores import LateWork, make_chunk

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


def spec(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ParameterSpec:
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    return ParameterSpec(name="w", shape=shape, stride=stride, dtype=dtype, requires_grad=True, nbytes=num_bytes)


def test_a_view_shares_the_bytes_and_keeps_the_strides() -> None:
    flat = torch.zeros(1024, dtype=torch.uint8)
    view = view_of(flat, 512, spec((2, 3), (1, 2)))
    assert view.stride() == (1, 2)
    view.copy_(torch.arange(6.0).view(2, 3))
    assert flat[512 : 512 + 24].view(torch.float32).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert not flat[:512].any()
    assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_a_view_counts_from_where_the_buffer_starts_in_its_storage() -> None:
    flat = torch.zeros(2048, dtype=torch.uint8).narrow(0, 1024, 1024)
    view_of(flat, 512, spec((4,), (1,), torch.bfloat16)).fill_(1.0)
    assert flat[512:520].any()
    assert not flat[:512].any()


def test_a_view_between_two_elements_is_refused() -> None:
    with pytest.raises(AssertionError, match="w would start at byte 6"):
        view_of(torch.zeros(64, dtype=torch.uint8), 6, spec((1,), (1,)))


def test_a_view_survives_that_its_memory_goes_and_comes() -> None:
    mover = EmulatedMover()
    flat = mover.device_buffer(512)
    view = view_of(flat, 0, spec((4,), (1,)))
    mover.shrink(flat, [])
    mover.grow(flat)
    assert view.isnan().all()
    flat.zero_()
    assert view.tolist() == [0.0] * 4


def chunk_of(mover: EmulatedMover) -> StoredGroup:
    layout = lay_out([group("a", [512, 512])], chunk_bytes=512)
    return StoredGroup(layout.groups[0], [make_chunk(found, mover, 1) for found in layout.chunks])


def test_a_group_is_resident_when_all_its_chunks_are() -> None:
    stored = chunk_of(EmulatedMover())
    first, second = stored.chunks
    assert stored.name == "a"
    first.become(ChunkState.RESIDENT)
    assert not stored.is_resident
    second.become(ChunkState.RESIDENT)
    assert stored.is_resident


def test_memory_is_free_when_all_that_reads_it_is_done() -> None:
    mover = EmulatedMover()
    chunk = chunk_of(mover).chunks[0]
    assert chunk.pending_device_reads == []
    assert chunk.host is not None
    mover.grow(chunk.device)
    chunk.fetched = mover.to_device(chunk.device, chunk.host)
    chunk.written = mover.to_host(chunk.host, chunk.device)
    chunk.last_use = mover.now()
    assert chunk.pending_device_reads == [chunk.last_use, chunk.fetched.ended, chunk.written.ended]


@pytest.mark.parametrize("state", list(ChunkState))
def test_which_states_have_bytes_on_the_device(state: ChunkState) -> None:
    chunk = chunk_of(EmulatedMover()).chunks[0]
    chunk._state = state  # type: ignore[attr-defined]  # by no legal move
    assert chunk.is_on_device is (state in ON_DEVICE)


def test_to_settle_is_to_wait_for_the_update_and_the_copy_back() -> None:
    mover = EmulatedMover()
    chunk = chunk_of(mover).chunks[0]
    assert chunk.host is not None
    mover.grow(chunk.device)
    chunk.device.fill_(9)
    chunk.written = mover.to_host(chunk.host, chunk.device)
    chunk.host_work = LateWork(chunk, 5)
    chunk.settle_host()
    assert chunk.host_work is None
    assert set(chunk.host.tolist()) == {14}
