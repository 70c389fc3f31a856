"""Kernels that become one: which, where they stand then, and what ends earlier by it."""

from __future__ import annotations

from dataclasses import replace

from lowtide.partition.joining import LOST_PER_SHARED, MAX_DISTANCE, behind, in_order, join
from lowtide.partition.liveness import find_peak
from lowtide.partition.program import Program, Step, Work

SIZE = 64


def pointwise(name: str, *reads: str, extent: int = SIZE) -> Step:
    return Step(name, reads, (name,), Work.POINTWISE, extent=extent)


def kernel(name: str, *reads: str) -> Step:
    return Step(name, reads, (name,), Work.KERNEL)


def column_sum(name: str, *reads: str) -> Step:
    return Step(name, reads, (name,), Work.REDUCTION, extent=SIZE, over_rows=False)


def program(*steps: Step, outputs: tuple[str, ...]) -> Program:
    names = {name for step in steps for name in (*step.reads, *step.writes)}
    made = {name for step in steps for name in step.writes}
    return Program(
        inputs=tuple(sorted(names - made)),
        steps=steps,
        outputs=frozenset(outputs),
        sizes=dict.fromkeys(names, SIZE),
    )


def test_readers_of_one_buffer_become_one_kernel() -> None:
    joined = join(program(pointwise("a", "x"), kernel("k", "a"), pointwise("b", "x"), outputs=("k", "b")))
    assert [(step.name, step.writes) for step in joined.steps] == [("a", ("a", "b")), ("k", ("k",))]
    assert joined.steps[0].reads == ("x",)


def test_what_they_read_ends_earlier_and_what_they_write_begins_earlier() -> None:
    steps = (pointwise("a", "x"), kernel("k", "a"), kernel("m", "k"), pointwise("b", "x"))
    apart = program(*steps, outputs=("m", "b"))
    # Apart: x, a, k at first, later x, m, b. Together: x, a, b.
    assert find_peak(apart).num_bytes == 3 * SIZE
    assert find_peak(join(apart)).num_bytes == 3 * SIZE
    assert find_peak(apart).step != find_peak(join(apart)).step


def test_what_only_they_exchange_is_not_written() -> None:
    joined = join(program(pointwise("a", "x"), pointwise("b", "a", "x"), outputs=("b",)))
    assert [(step.reads, step.writes) for step in joined.steps] == [(("x",), ("b",))]


def test_nothing_is_joined_across_a_third() -> None:
    """b waits for k, and k for a."""
    steps = (pointwise("a", "x"), kernel("k", "a"), pointwise("b", "x", "k"))
    assert join(program(*steps, outputs=("b",))).steps == steps


def test_two_pairs_do_not_wait_for_each_other() -> None:
    """Either pair alone could be joined; both would be a circle."""
    steps = (
        pointwise("a", "x"),
        pointwise("c", "y"),
        kernel("k", "a"),
        kernel("m", "c"),
        pointwise("b", "y", "k"),
        pointwise("d", "x", "m"),
    )
    joined = join(program(*steps, outputs=("b", "d")))
    assert len(joined.steps) == len(steps) - 1
    assert in_order(joined.steps) == list(joined.steps)


def test_kernels_of_their_own_other_extents_and_columns_stay_apart() -> None:
    for other in (kernel("b", "x"), pointwise("b", "x", extent=SIZE // 2), column_sum("b", "x")):
        assert len(join(program(pointwise("a", "x"), other, outputs=("a", "b"))).steps) == 2
    assert len(join(program(column_sum("a", "x"), column_sum("b", "x"), outputs=("a", "b"))).steps) == 1


def test_results_that_each_could_write_over_keep_them_apart_unless_they_share_enough() -> None:
    steps = (kernel("p", "w"), kernel("q", "w"), pointwise("a", "p", "s"), pointwise("b", "q", "s"))
    apart = program(*steps, outputs=("a", "b"))
    assert len(join(apart).steps) == 3
    little = replace(apart, sizes={**apart.sizes, "s": 1})
    wide = SIZE * LOST_PER_SHARED
    large = replace(little, steps=tuple(replace(step, extent=wide) for step in steps))
    assert len(join(large).steps) == 4


def test_what_both_read_is_not_written_over() -> None:
    [joined] = join(program(pointwise("a", "x"), pointwise("b", "x", "y"), outputs=("a", "b"))).steps
    assert joined.turned == {"x"}


def test_far_apart_steps_stay_apart() -> None:
    def num_steps(between: int) -> int:
        others = [kernel(f"k{number}", "w") for number in range(between)]
        steps = (pointwise("a", "x"), *others, pointwise("b", "x"))
        return len(join(program(*steps, outputs=("a", "b"))).steps)

    assert num_steps(MAX_DISTANCE - 1) == MAX_DISTANCE
    assert num_steps(MAX_DISTANCE) == MAX_DISTANCE + 2


def test_long_chains() -> None:
    count = 5000
    assert behind([count - 1], [[index - 1] if index else [] for index in range(count)]) == list(range(count))


def test_a_reader_is_never_too_far_from_what_it_reads() -> None:
    between = [kernel(f"k{index}", f"y{index}") for index in range(MAX_DISTANCE + 1)]
    outputs = ("mean", "late", *(step.name for step in between))
    reading = (pointwise("mean", "x"), *between, pointwise("late", "x", "mean"))
    assert join(program(*reading, outputs=outputs)).steps[0].writes == ("mean", "late")
    beside = (pointwise("mean", "x"), *between, pointwise("late", "x"))
    assert join(program(*beside, outputs=outputs)).steps == beside
