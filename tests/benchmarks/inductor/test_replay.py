"""Bytes that are read off generated code, against a count by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.inductor.replay import BLOCK_BYTES, Event, Extent, peak_bytes, read_events
from benchmarks.inductor.reuse import kept_for_reuse

EXAMPLE = """

def benchmark_compiled_module(times=10, repeat=10):
    primals_1 = rand_strided((256, ), (1, ), device='cuda:0', dtype=torch.float32)
    mm = rand_strided((2, 128), (256, 1), device='cuda:0', dtype=torch.bfloat16)
    tangents_1 = rand_strided((), (), device='cuda:0', dtype=torch.int64)
"""
CODE = (
    """
def call(args):
    primals_1, mm, tangents_1 = args
    args.clear()
    assert_size_stride(primals_1, (256, ), (1, ))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        stream0 = get_raw_stream(0)
        buf0 = empty_strided_cuda((2, 128), (128, 1), torch.float32)
        triton_poi.run(primals_1, mm, buf0, tangents_1, 256, stream=stream0)
        del mm, tangents_1
        del primals_1
        buf1 = empty_strided_cuda((512, ), (1, ), torch.bfloat16)
        buf2 = reinterpret_tensor(buf0, (256, ), (1, ), 0); del buf0  # reuse
        buf3 = torch.ops.aten._scaled_dot_product_efficient_attention.default(buf2, buf1)
        del buf1
        buf4 = buf3[0]
        assert_size_stride(buf4, (512, ), (1, ), 'torch.ops.aten')
        buf5 = buf3[1]
        assert_size_stride(buf5, (200, ), (1, ), 'torch.ops.aten')
        del buf3
        buf6 = buf4; del buf4  # reuse
        del buf2
        del buf5
    return (buf6, )
"""
    + EXAMPLE
)


def moments(events: Iterable[Event]) -> list[int]:
    """Blocks in use after each event."""
    used, found = 0, []
    for event in events:
        used += event.num_bytes
        found.append(used // BLOCK_BYTES)
    return found


def test_buffers_come_and_go_as_the_code_says() -> None:
    # The argument in bf16 reaches over 384 elements, of which 256 are its own. Weights and tangents stay.
    assert moments(read_events(CODE, "float32")) == [2, 4, 5, 7, 5, 7, 11, 13, 11, 9, 7]
    assert peak_bytes(read_events(CODE, "float32")) == 13 * BLOCK_BYTES


def test_what_operators_return_is_of_the_type_that_is_said_but_for_sums() -> None:
    assert moments(read_events(CODE, "bfloat16"))[6:8] == [9, 11]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("del buf5", "buf9 = torch.ops.aten.one.default(buf6)", "is not known here: buf9 = torch.ops.aten.one"),
        ("del buf5", "buf9 = buf8; del buf8  # reuse", "is not known here: buf9 = buf8"),
        ("del buf5", "for number in range(2): buf9 = buf6", "is not known here: for number in range"),
        ("mm, tangents_1 = args", "mm, scale, tangents_1 = args", "is not known here: primals_1, mm, scale"),
        ("        assert_size_stride(buf5, (200, ), (1, ), 'torch.ops.aten')\n", "", "how large buf5 are"),
    ],
)
def test_what_is_not_known_is_an_error(old: str, new: str, message: str) -> None:
    assert CODE.count(old) == 1
    with pytest.raises(ValueError, match=message):
        read_events(CODE.replace(old, new), "float32")


def life(buffer: int, extent: Extent, **kind: bool) -> tuple[Event, Event]:
    made = Event(buffer, extent, comes=True, **kind)
    return made, Event(buffer, extent, comes=False, is_argument=made.is_argument)


FLOATS, HALVES, FEWER = Extent("float32", 256), Extent("bfloat16", 512), Extent("float32", 255)


def test_a_buffer_that_goes_is_kept_for_the_next_of_its_type_and_size() -> None:
    comes, goes = life(0, FLOATS, is_planned=True)
    between = life(1, HALVES, is_planned=True)  # as many bytes
    smaller = life(2, FEWER, is_planned=True)  # as many blocks
    again, gone = life(3, FLOATS, is_planned=True)
    kept = kept_for_reuse([comes, goes, *between, *smaller, again, gone])
    assert kept == [comes, *between, *smaller, Event(0, FLOATS, comes=False)]


def test_of_several_that_wait_the_last_is_taken() -> None:
    first, second, third = (life(number, FLOATS, is_planned=True) for number in range(3))
    kept = kept_for_reuse([first[0], second[0], first[1], second[1], third[0]])
    assert [event.buffer for event in kept if not event.comes] == [0]


def test_nobody_takes_the_place_of_an_argument_and_results_of_operators_take_nobodys() -> None:
    argument, result = life(0, FLOATS, is_argument=True), life(1, FLOATS)
    planned = life(2, FLOATS, is_planned=True)
    events = [*argument, *planned, *result]
    assert kept_for_reuse(events) == events
    # But a planned one takes the place of a result.
    assert kept_for_reuse([*result, *planned]) == [result[0], Event(1, FLOATS, comes=False)]


lives = st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 6)), max_size=30)


def events_of(buffers: Sequence[tuple[int, bool, int]]) -> list[Event]:
    """Each made after the one before, with its size and whether it is planned; it goes when so many more have been made."""
    events: list[Event] = []
    for number, (size, is_planned, _) in enumerate(buffers):
        for earlier, (its_size, _, lasts) in enumerate(buffers[:number]):
            if earlier + lasts == number:
                events.append(Event(earlier, Extent("float32", 128 * its_size), comes=False))
        events.append(Event(number, Extent("float32", 128 * size), comes=True, is_planned=is_planned))
    return events


@given(lives)
def test_reuse_only_keeps_buffers_longer(buffers: list[tuple[int, bool, int]]) -> None:
    events = events_of(buffers)
    kept = kept_for_reuse(events)
    assert peak_bytes(kept) >= peak_bytes(events)
    assert sum(event.num_bytes for event in kept) == sum(event.num_bytes for event in events)
    # Each goes once, after it came.
    alive: set[int] = set()
    for event in kept:
        assert (event.buffer in alive) is not event.comes
        alive ^= {event.buffer}
    # And nothing is left to keep.
    assert kept_for_reuse(kept) == kept
