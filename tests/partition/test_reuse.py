"""Dead buffers that results take over: never at the price of a higher peak, but for a step's direct successor."""

from __future__ import annotations

from lowtide.partition.lifetimes import Moment, moments
from lowtide.partition.program import Program, Step, Work
from lowtide.partition.reuse import with_reuse


def planned(*steps: Step, sizes: dict[str, int], outputs: set[str]) -> list[Moment]:
    program = Program(inputs=("x",), steps=steps, outputs=frozenset(outputs), sizes={"x": 1, **sizes})
    return with_reuse(program, moments(program, kept=["x"]))


def product(name: str, *reads: str) -> Step:
    return Step(name, reads, (name,), Work.KERNEL, operator="aten.mm")


def test_the_next_step_takes_over_what_has_just_ended() -> None:
    found = planned(
        product("a", "x"), product("b", "a"), product("c", "b"), sizes={"a": 8, "b": 4, "c": 8}, outputs={"c"}
    )
    assert [moment.ends for moment in found] == [(), (), ("b",)]
    assert found[2].replaces == {"c": "a"}
    assert found[2].begins == ()


def test_a_later_one_only_below_the_peak() -> None:
    def replaced(peak: int) -> dict[str, str]:
        steps = (
            product("a", "x"),
            product("b", "a"),
            product("wide", "b"),
            product("c", "wide"),
            product("top", "c"),
        )
        sizes = {"a": 8, "b": 2, "wide": 20, "c": 8, "top": peak}
        return dict(planned(*steps, sizes=sizes, outputs={"top"})[3].replaces)

    # Through "wide" 30 bytes would live with what has ended, and without it 28 at most.
    assert replaced(peak=8) == {}
    assert replaced(peak=30) == {"c": "a"}


def test_kernels_that_bring_their_results_along_take_nothing_over_and_leave_theirs_behind() -> None:
    attention = Step("t", ("a",), ("t",), Work.KERNEL, operator="aten._scaled_dot_product_cudnn_attention")
    found = planned(
        product("a", "x"),
        product("b", "a"),
        attention,
        product("d", "t"),
        product("e", "d"),
        sizes={"a": 8, "b": 1, "t": 8, "d": 1, "e": 8},
        outputs={"b", "e"},
    )
    assert found[2].replaces == {}
    assert found[4].replaces == {"e": "t"}


def test_inputs_are_given_back() -> None:
    program = Program(
        inputs=("x",),
        steps=(product("a", "x"), product("b", "a")),
        outputs=frozenset({"b"}),
        sizes=dict.fromkeys("xab", 4),
    )
    found = with_reuse(program, moments(program))
    assert found[0].ends == ("x",)
    assert found[1].replaces == {}
