"""Which results are never written, rule by rule, and what that does to whoever reads them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lowtide.tracing.compiled.program import Program, Step, Work, find_peak
from lowtide.tracing.compiled.schedule import LOST_PER_SHARED, MAX_DISTANCE, behind, fuse, in_order, join, reorder

P, R, K = Work.POINTWISE, Work.REDUCTION, Work.KERNEL


def program(*steps: Step, inputs: str = "abcdefghij", outputs: str = "z", size: int = 10) -> Program:
    names = {*inputs, *outputs, *(buffer for step in steps for buffer in (*step.reads, *step.writes))}
    return Program(
        inputs=tuple(inputs), steps=steps, outputs=frozenset(outputs), sizes=dict.fromkeys(sorted(names), size)
    )


def step(reads: str, write: str, work: Work = P) -> Step:
    return Step(write, tuple(reads), (write,), work)


def written(fused: Program) -> dict[str, str]:
    return {step.writes[0]: "".join(step.reads) for step in fused.steps}


def test_a_pointwise_chain_is_one_kernel() -> None:
    assert written(fuse(program(step("a", "x"), step("xb", "y"), step("y", "z")))) == {"z": "ab"}


def test_a_result_of_several_pointwise_readers_is_computed_in_each() -> None:
    apart = program(step("ab", "x"), step("xc", "y"), step("y", "w", K), step("xw", "z"))
    assert written(fuse(apart)) == {"y": "abc", "w": "y", "z": "abw"}


def test_what_a_kernel_reads_is_written() -> None:
    assert written(fuse(program(step("a", "x"), step("x", "z", K)))) == {"x": "a", "z": "x"}


@pytest.mark.parametrize("on_host", [False, True])
def test_what_a_kernel_reads_late_is_written_late(on_host: bool) -> None:
    # y computes x inside; z comes after k, and reads what was written for it.
    steps = (step("ab", "x"), step("xc", "y"), step("y", "w", K), step("xw", "k", K), step("xk", "z"))
    fused = fuse(program(*steps), on_host=on_host)
    order = [only.writes[0] for only in fused.steps]
    assert order == (["x", "y", "w", "k", "z"] if on_host else ["y", "w", "x", "k", "z"])
    assert written(fused)["y"] == ("xc" if on_host else "abc")
    assert written(fused)["z"] == "xk"


def test_what_a_kernel_writes_is_written() -> None:
    assert written(fuse(program(step("a", "x", K), step("x", "z")))) == {"x": "a", "z": "x"}


def test_outputs_are_written() -> None:
    assert written(fuse(program(step("a", "x"), step("x", "z"), outputs="xz"))) == {"x": "a", "z": "x"}


def test_a_reduction_is_written_and_computes_what_it_reads() -> None:
    assert written(fuse(program(step("ab", "x"), step("x", "m", R), step("xm", "z")))) == {"m": "ab", "z": "abm"}


@pytest.mark.parametrize(("reads", "is_written"), [("abcd", False), ("abcde", True)])
def test_several_readers_do_not_read_more_than_four_buffers_for_it(reads: str, is_written: bool) -> None:
    fused = fuse(program(step(reads, "x"), step("x", "y"), step("y", "w", K), step("xw", "z")))
    assert ("x" in written(fused)) == is_written


@pytest.mark.parametrize(("reads", "is_written"), [("abcdefgh", False), ("abcdefghi", True)])
def test_one_reader_does_not_read_more_than_eight(reads: str, is_written: bool) -> None:
    assert ("x" in written(fuse(program(step(reads, "x"), step("x", "z"))))) == is_written


def test_reads_are_counted_through_what_is_not_written() -> None:
    # x reads a, b, c and y reads x, d, e: five written buffers, for two readers.
    steps = (step("abc", "x"), step("xde", "y"), step("y", "v"), step("v", "w", K), step("yw", "z"))
    assert written(fuse(program(*steps)))["y"] == "abcde"


def test_what_an_unwritten_result_is_computed_from_lives_on() -> None:
    # Unfused, a and b end at x; fused they live until z, which is the last to need x.
    steps = (step("ab", "x"), step("c", "y", K), step("xy", "z"))
    plain = program(*steps, inputs="abc")
    assert find_peak(plain).num_bytes == 40
    fused = fuse(plain)
    assert written(fused) == {"y": "c", "z": "aby"}
    # At y: a, b, c, y; at z: a, b, y, z.
    assert find_peak(fused).num_bytes == 40
    assert find_peak(fused, donated=fused.inputs).num_bytes == 40


def test_a_constant_is_never_written() -> None:
    assert written(fuse(program(step("", "ones"), step("a", "y", K), Step("z", ("ones", "y"), ("z",), P)))) == {
        "y": "a",
        "z": "y",
    }


def test_on_the_host_an_exponential_is_not_computed_twice() -> None:
    heavy = Step("x", ("a",), ("x",), P, is_heavy=True)
    # Through y, which is computed from it and read twice.
    steps = (heavy, step("xb", "y"), step("y", "v"), step("v", "w", K), step("yw", "z"))
    assert "y" not in written(fuse(program(*steps)))
    assert written(fuse(program(*steps), on_host=True))["y"] == "ab"
    once = (heavy, step("xb", "z"))
    assert written(fuse(program(*once), on_host=True)) == {"z": "ab"}


def test_what_is_seen_turned_stays_so() -> None:
    turning = Step("x", ("a", "b"), ("x",), P, turned=frozenset("a"))
    (only,) = fuse(program(turning, step("xc", "z"))).steps
    assert only.turned == {"a"}
    seen_turned = Step("z", ("x", "c"), ("z",), P, turned=frozenset("x"))
    (only,) = fuse(program(step("ab", "x"), seen_turned)).steps
    assert only.turned == {"a", "b"}


SIZE = 64


def pointwise(name: str, *reads: str, extent: int = SIZE) -> Step:
    return Step(name, reads, (name,), Work.POINTWISE, extent=extent)


def kernel(name: str, *reads: str) -> Step:
    return Step(name, reads, (name,), Work.KERNEL)


def column_sum(name: str, *reads: str) -> Step:
    return Step(name, reads, (name,), Work.REDUCTION, extent=SIZE, over_rows=False)


def kernels_program(*steps: Step, outputs: tuple[str, ...]) -> Program:
    names = {name for step in steps for name in (*step.reads, *step.writes)}
    made = {name for step in steps for name in step.writes}
    return Program(
        inputs=tuple(sorted(names - made)),
        steps=steps,
        outputs=frozenset(outputs),
        sizes=dict.fromkeys(names, SIZE),
    )


def test_readers_of_one_buffer_become_one_kernel() -> None:
    joined = join(kernels_program(pointwise("a", "x"), kernel("k", "a"), pointwise("b", "x"), outputs=("k", "b")))
    assert [(step.name, step.writes) for step in joined.steps] == [("a", ("a", "b")), ("k", ("k",))]
    assert joined.steps[0].reads == ("x",)


def test_what_they_read_ends_earlier_and_what_they_write_begins_earlier() -> None:
    steps = (pointwise("a", "x"), kernel("k", "a"), kernel("m", "k"), pointwise("b", "x"))
    apart = kernels_program(*steps, outputs=("m", "b"))
    # Apart: x, a, k at first, later x, m, b. Together: x, a, b.
    assert find_peak(apart).num_bytes == 3 * SIZE
    assert find_peak(join(apart)).num_bytes == 3 * SIZE
    assert find_peak(apart).step != find_peak(join(apart)).step


def test_what_only_they_exchange_is_not_written() -> None:
    joined = join(kernels_program(pointwise("a", "x"), pointwise("b", "a", "x"), outputs=("b",)))
    assert [(step.reads, step.writes) for step in joined.steps] == [(("x",), ("b",))]


def test_nothing_is_joined_across_a_third() -> None:
    """b waits for k, and k for a."""
    steps = (pointwise("a", "x"), kernel("k", "a"), pointwise("b", "x", "k"))
    assert join(kernels_program(*steps, outputs=("b",))).steps == steps


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
    joined = join(kernels_program(*steps, outputs=("b", "d")))
    assert len(joined.steps) == len(steps) - 1
    assert in_order(joined.steps) == list(joined.steps)


def test_kernels_of_their_own_other_extents_and_columns_stay_apart() -> None:
    for other in (kernel("b", "x"), pointwise("b", "x", extent=SIZE // 2), column_sum("b", "x")):
        assert len(join(kernels_program(pointwise("a", "x"), other, outputs=("a", "b"))).steps) == 2
    assert len(join(kernels_program(column_sum("a", "x"), column_sum("b", "x"), outputs=("a", "b"))).steps) == 1


def test_results_that_each_could_write_over_keep_them_apart_unless_they_share_enough() -> None:
    steps = (kernel("p", "w"), kernel("q", "w"), pointwise("a", "p", "s"), pointwise("b", "q", "s"))
    apart = kernels_program(*steps, outputs=("a", "b"))
    assert len(join(apart).steps) == 3
    little = replace(apart, sizes={**apart.sizes, "s": 1})
    wide = SIZE * LOST_PER_SHARED
    large = replace(little, steps=tuple(replace(step, extent=wide) for step in steps))
    assert len(join(large).steps) == 4


def test_what_both_read_is_not_written_over() -> None:
    [joined] = join(kernels_program(pointwise("a", "x"), pointwise("b", "x", "y"), outputs=("a", "b"))).steps
    assert joined.turned == {"x"}


def test_far_apart_steps_stay_apart() -> None:
    def num_steps(between: int) -> int:
        others = [kernel(f"k{number}", "w") for number in range(between)]
        steps = (pointwise("a", "x"), *others, pointwise("b", "x"))
        return len(join(kernels_program(*steps, outputs=("a", "b"))).steps)

    assert num_steps(MAX_DISTANCE - 1) == MAX_DISTANCE
    assert num_steps(MAX_DISTANCE) == MAX_DISTANCE + 2


def test_long_chains() -> None:
    count = 5000
    assert behind([count - 1], [[index - 1] if index else [] for index in range(count)]) == list(range(count))


def test_a_reader_is_never_too_far_from_what_it_reads() -> None:
    between = [kernel(f"k{index}", f"y{index}") for index in range(MAX_DISTANCE + 1)]
    outputs = ("mean", "late", *(step.name for step in between))
    reading = (pointwise("mean", "x"), *between, pointwise("late", "x", "mean"))
    assert join(kernels_program(*reading, outputs=outputs)).steps[0].writes == ("mean", "late")
    beside = (pointwise("mean", "x"), *between, pointwise("late", "x"))
    assert join(kernels_program(*beside, outputs=outputs)).steps == beside


def ordered_program(*steps: tuple[str, tuple[str, ...], int], inputs: dict[str, int], outputs: set[str]) -> Program:
    return Program(
        inputs=tuple(inputs),
        steps=tuple(Step(name, reads, (name,), Work.KERNEL) for name, reads, _ in steps),
        outputs=frozenset(outputs),
        sizes={**inputs, **{name: size for name, _, size in steps}},
    )


def test_large_results_are_used_up_one_after_the_other() -> None:
    """As traced both large results are made before the first is reduced."""
    traced = ordered_program(
        ("large", ("x",), 100),
        ("other", ("x",), 100),
        ("small", ("large",), 1),
        ("little", ("other",), 1),
        inputs={"x": 10},
        outputs={"small", "little"},
    )
    assert find_peak(traced, kept=["x"]).num_bytes == 10 + 201
    assert find_peak(reorder(traced, ()), kept=["x"]).num_bytes == 10 + 102


def test_of_equals_the_graph_s_own_order() -> None:
    traced = ordered_program(("a", ("x",), 1), ("b", ("x",), 1), inputs={"x": 1}, outputs={"a", "b"})
    assert reorder(traced, ()) == traced


def test_saved_inputs_that_can_end_are_used_up_first() -> None:
    traced = ordered_program(
        ("wide", ("x",), 50),
        ("made", ("saved",), 1),
        ("last", ("wide", "made"), 1),
        inputs={"x": 1, "saved": 60},
        outputs={"last"},
    )
    assert reorder(traced, {"saved"}).steps[0].name == "made"
    assert find_peak(reorder(traced, {"saved"}), kept=["x"]).num_bytes == 62


@pytest.mark.parametrize("seed", range(20))
def test_orders_are_possible_and_no_worse(seed: int) -> None:
    chance = random.Random(seed)
    steps = []
    for number in range(25):
        known = ["x", "y", *(name for name, _, _ in steps)]
        reads = tuple(chance.sample(known, k=min(len(known), chance.randint(1, 3))))
        steps.append((f"s{number}", reads, chance.randint(0, 100)))
    read = {name for _, reads, _ in steps for name in reads}
    outputs = {name for name, _, _ in steps if name not in read}
    traced = ordered_program(*steps, inputs={"x": 5, "y": 50}, outputs=outputs)
    found = reorder(traced, {"y"})
    there = {"x", "y"}
    for step in found.steps:
        assert set(step.reads) <= there
        there |= set(step.writes)
    assert len(found.steps) == len(traced.steps)
    assert find_peak(found, kept=["x"]).num_bytes <= find_peak(traced, kept=["x"]).num_bytes


KINDS = (Work.KERNEL, Work.POINTWISE, Work.POINTWISE, Work.REDUCTION)
SIZES = (4, 64, 1024)


def random_program(chance: random.Random) -> Program:
    inputs = tuple(f"input {index}" for index in range(chance.randint(1, 4)))
    buffers, steps = list(inputs), []
    for index in range(chance.randint(2, 30)):
        work = chance.choice(KINDS)
        reads = tuple(chance.sample(buffers, min(len(buffers), chance.randint(0, 4))))
        writes = tuple(f"{index}.{part}" for part in range(chance.randint(1, 3) if work is Work.KERNEL else 1))
        turned = frozenset(buffer for buffer in reads if chance.random() < 0.3)
        is_heavy, over_rows = chance.random() < 0.2, chance.random() < 0.8
        extent = chance.choice((8, 8, 64))
        steps.append(
            Step(f"step {index}", reads, writes, work, turned, is_heavy=is_heavy, extent=extent, over_rows=over_rows)
        )
        buffers += writes
    outputs = frozenset(chance.sample(buffers, chance.randint(1, min(5, len(buffers)))))
    return Program(
        inputs=inputs,
        steps=tuple(steps),
        outputs=outputs,
        sizes={buffer: chance.choice(SIZES) for buffer in buffers},
    )


def sources(program: Program) -> dict[str, frozenset[str]]:
    """The inputs that each output is computed from; fails where a step reads what is not there, or writes what is."""
    known = {buffer: frozenset([buffer]) for buffer in program.inputs}
    for step in program.steps:
        found = frozenset[str]().union(*(known[buffer] for buffer in step.reads))
        assert not set(step.writes) & known.keys()
        known |= dict.fromkeys(step.writes, found)
    return {buffer: known[buffer] for buffer in program.outputs}


def kernels(program: Program) -> list[str]:
    return sorted(step.name for step in program.steps if step.work is Work.KERNEL)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_outputs_come_from_the_same_inputs(seed: int, on_host: bool) -> None:
    program = random_program(random.Random(seed))
    fused = fuse(program, on_host=on_host)
    assert sources(fused) == sources(program)
    joined = join(fused)
    for later in (joined, reorder(joined, ())):
        # A joined step reads for all of its results.
        assert all(found >= sources(program)[buffer] for buffer, found in sources(later).items())
        assert kernels(later) == kernels(program)
