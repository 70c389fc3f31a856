"""Bytes that are read off generated code, against a count by hand and against every buffer's own life."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.inductor.replay import Event, kept_for_reuse, peak_of, read_events

K = 512
CODE = """
def call(args):
    primals_1, mm, tangents_1 = args
    args.clear()
    assert_size_stride(primals_1, (256, ), (1, ))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((2, 128), (128, 1), torch.float32)
        triton_poi.run(primals_1, mm, buf0, 256, stream=stream0)
        del mm
        del primals_1
        buf1 = empty_strided_cuda((128, ), (1, ), torch.float32)
        buf2 = reinterpret_tensor(buf0, (256, ), (1, ), 0); del buf0  # reuse
        buf3 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(buf2, buf1)
        del buf1
        buf4 = buf3[0]
        assert_size_stride(buf4, (512, ), (1, ), 'torch.ops.aten')
        buf5 = buf3[1]
        assert_size_stride(buf5, (), (), 'torch.ops.aten')
        del buf3
        buf6 = buf4; del buf4  # reuse
        del buf2
        buf7 = empty_strided_cuda((1, 100), (100, 1), torch.float32)
        buf8 = empty_strided_cuda((256, ), (1, ), torch.float32)
    return (buf6, buf7, buf8)


def benchmark_compiled_module(times=10, repeat=10):
    primals_1 = rand_strided((256, ), (1, ), device='cuda:0', dtype=torch.float32)
    mm = rand_strided((2, 100), (128, 1), device='cuda:0', dtype=torch.bfloat16)
    tangents_1 = rand_strided((), (), device='cuda:0', dtype=torch.float32)
"""


def test_buffers_come_and_go_as_the_code_says() -> None:
    # Weights and tangents stay; 100 of 128 columns end before the last row does.
    used = [2, 3, 4, 6, 5, 6, 10, 11, 10, 8, 9, 11]
    moments, total = [], 0
    for event in read_events(CODE, "float32"):
        total += event.num_bytes
        moments.append(total // K)
    assert moments == used


def test_what_operators_return_is_of_the_type_that_is_said() -> None:
    as_float, as_half = (peak_of(read_events(CODE, dtype)).num_bytes for dtype in ("float32", "bfloat16"))
    assert as_float - as_half == 2 * K


def test_a_buffer_that_goes_is_kept_for_the_next_of_its_size() -> None:
    # buf1 is given to buf7, so that it is there while nobody needs it, beside what attention returns; buf2 is given to buf8.
    kept = kept_for_reuse(read_events(CODE, "float32"))
    moments, total = [], 0
    for event in kept:
        total += event.num_bytes
        moments.append(total // K)
    assert moments == [2, 3, 4, 6, 5, 6, 10, 11]


lives = st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 6)), max_size=30)


def events_of(buffers: Sequence[tuple[int, bool, int]]) -> list[Event]:
    """Buffer by buffer, each made after the one before, with its size and whether inductor plans it; it goes when so many more
    have been made."""
    events: list[Event] = []
    for number in range(len(buffers)):
        for earlier, (size, _, life) in enumerate(buffers[:number]):
            if earlier + life == number:
                events.append(Event(earlier, -size * K, number))
        size, is_planned, _ = buffers[number]
        events.append(Event(number, size * K, number, is_planned=is_planned))
    return events


@given(lives)
def test_reuse_only_keeps_buffers_longer(buffers: list[tuple[int, bool, int]]) -> None:
    events = events_of(buffers)
    kept = kept_for_reuse(events)
    assert peak_of(kept).num_bytes >= peak_of(events).num_bytes
    assert sum(event.num_bytes for event in kept) == sum(event.num_bytes for event in events)
    # One that was kept is not made again, and goes once.
    assert len({event.buffer for event in kept if event.num_bytes > 0}) == sum(event.num_bytes > 0 for event in kept)
    gone = [event.buffer for event in kept if event.num_bytes < 0]
    assert len(gone) == len(set(gone))
    # Where nothing is planned nothing is kept.
    assert kept_for_reuse(events_of([(size, False, life) for size, _, life in buffers])) == events_of(
        [(size, False, life) for size, _, life in buffers]
    )


def test_reuse_by_inductor_itself_leaves_nothing_to_keep() -> None:
    """As in what torch 2.8 generates: its records are equal in both."""
    planned = "empty_strided_cuda((1, 100), (100, 1), torch.float32)"
    code = CODE.replace("        del buf1\n", "").replace("        del buf2\n", "")
    code = code.replace(planned, "buf1; del buf1  # reuse")
    code = code.replace("buf8 = empty_strided_cuda((256, ), (1, ), torch.float32)", "buf8 = buf2; del buf2  # reuse")
    events = read_events(code, "float32")
    assert kept_for_reuse(events) == events
    assert peak_of(events).num_bytes == peak_of(kept_for_reuse(read_events(CODE, "float32"))).num_bytes
