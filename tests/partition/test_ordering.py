"""The order of kernels: possible, never of a higher peak than the graph's own, and lower where a lower one is easy to find."""

from __future__ import annotations

import random

import pytest

from lowtide.partition.liveness import find_peak
from lowtide.partition.ordering import reorder
from lowtide.partition.program import Program, Step, Work


def program(*steps: tuple[str, tuple[str, ...], int], inputs: dict[str, int], outputs: set[str]) -> Program:
    return Program(
        inputs=tuple(inputs),
        steps=tuple(Step(name, reads, (name,), Work.KERNEL) for name, reads, _ in steps),
        outputs=frozenset(outputs),
        sizes={**inputs, **{name: size for name, _, size in steps}},
    )


def test_large_results_are_used_up_one_after_the_other() -> None:
    """As traced both large results are made before the first is reduced."""
    traced = program(
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
    traced = program(("a", ("x",), 1), ("b", ("x",), 1), inputs={"x": 1}, outputs={"a", "b"})
    assert reorder(traced, ()) == traced


def test_saved_inputs_that_can_end_are_used_up_first() -> None:
    traced = program(
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
    traced = program(*steps, inputs={"x": 5, "y": 50}, outputs=outputs)
    found = reorder(traced, {"y"})
    there = {"x", "y"}
    for step in found.steps:
        assert set(step.reads) <= there
        there |= set(step.writes)
    assert len(found.steps) == len(traced.steps)
    assert find_peak(found, kept=["x"]).num_bytes <= find_peak(traced, kept=["x"]).num_bytes
