"""Which results are never written, rule by rule, and what that does to whoever reads them."""

from __future__ import annotations

import pytest

from lowtide.partition.fusion import fuse
from lowtide.partition.liveness import find_peak
from lowtide.partition.program import Program, Step, Work

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
