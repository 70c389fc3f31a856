"""The peak of a program, against the definition of being alive and against sums written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.tracing.compiled.program import Effect, Program, Step, Work, effects, find_peak, with_reuse


def is_alive(program: Program, buffer: str, index: int, kept: frozenset[str]) -> bool:
    """Whether a buffer is there while step `index` runs: it has begun, and somebody from here on wants it."""
    begins = next((i for i, step in enumerate(program.steps) if buffer in step.writes), -1)
    if begins > index:
        return False
    wanted = any(buffer in step.reads for step in program.steps[index:])
    return wanted or begins == index or buffer in program.outputs or buffer in kept


def brute_force_peak(program: Program, kept: frozenset[str]) -> int:
    sums = [sum(program.sizes[buffer] for buffer in program.inputs)]
    for index in range(len(program.steps)):
        sums.append(sum(size for buffer, size in program.sizes.items() if is_alive(program, buffer, index, kept)))
    return max(sums)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, frozenset[str]]:
    inputs = tuple(f"input{number}" for number in range(draw(st.integers(1, 4))))
    known, steps = list(inputs), []
    for number in range(draw(st.integers(0, 8))):
        reads = draw(st.lists(st.sampled_from(known), unique=True, max_size=4))
        writes = tuple(f"b{number}.{part}" for part in range(draw(st.integers(0, 2))))
        steps.append(Step(f"step{number}", tuple(reads), writes, draw(st.sampled_from(Work))))
        known += writes
    sizes = {buffer: draw(st.integers(0, 5)) for buffer in known}
    outputs = frozenset(draw(st.lists(st.sampled_from(known), unique=True)))
    kept = frozenset(draw(st.lists(st.sampled_from(inputs), unique=True)))
    return Program(inputs=inputs, steps=tuple(steps), outputs=outputs, sizes=sizes), kept


@given(programs())
def test_the_peak_is_that_of_the_definition(drawn: tuple[Program, frozenset[str]]) -> None:
    program, kept = drawn
    assert find_peak(program, kept=kept).num_bytes == brute_force_peak(program, kept)


@given(programs())
def test_writing_in_place_saves_and_never_below_what_stays(drawn: tuple[Program, frozenset[str]]) -> None:
    program, kept = drawn
    plain, in_place = find_peak(program, kept=kept), find_peak(program, kept=kept, donated=program.inputs)
    assert in_place.num_bytes <= plain.num_bytes
    assert in_place.num_bytes >= sum(program.sizes[buffer] for buffer in {*program.outputs, *kept})


def chain(work: Work, *, outputs: str = "c") -> Program:
    """a (10) makes b (10), b makes c (10)."""
    return Program(
        inputs=("a",),
        steps=(Step("first", ("a",), ("b",), work), Step("second", ("b",), ("c",), work)),
        outputs=frozenset(outputs),
        sizes={"a": 10, "b": 10, "c": 10},
    )


def test_a_kernel_holds_what_it_reads_and_writes() -> None:
    assert find_peak(chain(Work.KERNEL)).num_bytes == 20
    assert find_peak(chain(Work.KERNEL), kept=["a"]).num_bytes == 30
    assert find_peak(chain(Work.KERNEL, outputs="abc")).num_bytes == 30


def test_a_pointwise_step_writes_over_what_it_is_the_last_to_read() -> None:
    assert find_peak(chain(Work.POINTWISE), donated=["a"]).num_bytes == 10
    assert find_peak(chain(Work.POINTWISE), donated=[]).num_bytes == 20
    assert find_peak(chain(Work.KERNEL), donated=["a"]).num_bytes == 20
    assert find_peak(chain(Work.POINTWISE), kept=["a"], donated=["a"]).num_bytes == 20
    assert find_peak(chain(Work.POINTWISE, outputs="bc"), donated=["a"]).num_bytes == 20


def test_what_is_seen_turned_is_not_written_over() -> None:
    step = Step("only", ("a",), ("b",), Work.POINTWISE, turned=frozenset("a"))
    program = Program(inputs=("a",), steps=(step,), outputs=frozenset("b"), sizes={"a": 10, "b": 10})
    assert find_peak(program, donated=["a"]).num_bytes == 20


def test_one_input_serves_one_result_of_its_size() -> None:
    step = Step("only", ("a", "b"), ("c", "d"), Work.POINTWISE)
    sizes = {"a": 10, "b": 3, "c": 10, "d": 10}
    program = Program(inputs=("a", "b"), steps=(step,), outputs=frozenset("cd"), sizes=sizes)
    assert find_peak(program, donated=program.inputs).num_bytes == 10 + 3 + 10


def test_the_step_of_the_peak_is_named() -> None:
    assert find_peak(chain(Work.KERNEL)).step == "first"
    assert find_peak(chain(Work.KERNEL), kept=["a"]).step == "second"
    empty = Program(inputs=("a",), steps=(), outputs=frozenset(), sizes={"a": 7})
    assert find_peak(empty).step == "start"
    assert find_peak(empty).num_bytes == 7


def planned(*steps: Step, sizes: dict[str, int], outputs: set[str]) -> list[Effect]:
    program = Program(inputs=("x",), steps=steps, outputs=frozenset(outputs), sizes={"x": 1, **sizes})
    return with_reuse(program, effects(program, kept=["x"]))


def product(name: str, *reads: str) -> Step:
    return Step(name, reads, (name,), Work.KERNEL, operator="aten.mm")


def test_the_next_step_takes_over_what_has_just_ended() -> None:
    found = planned(
        product("a", "x"), product("b", "a"), product("c", "b"), sizes={"a": 8, "b": 4, "c": 8}, outputs={"c"}
    )
    assert [effect.ends for effect in found] == [(), (), ("b",)]
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
    found = with_reuse(program, effects(program))
    assert found[0].ends == ("x",)
    assert found[1].replaces == {}
