from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.tracing.place import Place, place_of, where
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder


def step() -> tuple[StepTrace, dict[str, int]]:
    """One step that passes through every place, and the event of each."""
    builder = TraceBuilder()
    weight = builder.allocate(MiB, Category.WEIGHTS, module="head")
    state = builder.allocate(MiB, Category.OPTIMIZER, module="head")
    events: dict[str, int] = {}

    def run(name: str, module: str, category: Category, *uses: int, source: str = "") -> None:
        builder.op(name, module=module, source=source)
        for allocation in uses:
            builder.use(allocation)
        builder.allocate(MiB, category)
        events[name] = len(events)

    builder.enter(Phase.FORWARD)
    run("forward", "head", Category.ACTIVATIONS, weight)
    builder.enter(Phase.LOSS)
    run("loss", "Net", Category.ACTIVATIONS, source="net.py:9")
    builder.enter(Phase.BACKWARD)
    run("loss backward", "Net", Category.TEMPORARIES, source="net.py:9")
    run("recompute", "head", Category.ACTIVATIONS, weight)
    run("backward", "head", Category.GRADIENTS, weight)
    run("state", "Net", Category.TEMPORARIES, weight, state)
    run("beside state", "Net", Category.TEMPORARIES)
    run("later backward", "Net", Category.TEMPORARIES, source="net.py:3")
    builder.enter(Phase.UPDATE)
    run("update", "AdamW", Category.TEMPORARIES, weight, state)
    return replace(builder.build(), settings={"update": "in_backward"}), events


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("forward", Place.FORWARD, "in the forward of head"),
        ("loss", Place.LOSS, "at the loss"),
        ("loss backward", Place.LOSS_BACKWARD, "in the backward of the loss"),
        ("recompute", Place.RECOMPUTE, "in the backward, where head is recomputed"),
        ("backward", Place.BACKWARD, "in the backward of head"),
        ("state", Place.UPDATE_IN_BACKWARD, "in an update inside the backward"),
        ("beside state", Place.UPDATE_IN_BACKWARD, "in an update inside the backward"),
        ("later backward", Place.BACKWARD, "in the backward of Net"),
        ("update", Place.UPDATE, "in the update"),
    ],
)
def test_every_place_is_recognised(name: str, place: Place, words: str) -> None:
    trace, events = step()
    assert place_of(trace, events[name]) is place
    assert where(trace, events[name]) == words


def test_before_the_step() -> None:
    trace, _ = step()
    assert (place_of(trace, -1), where(trace, -1)) == (Place.START, "before the step begins")


def test_a_deferred_update_has_no_update_in_the_backward() -> None:
    trace, events = step()
    assert place_of(replace(trace, settings={"update": "deferred"}), events["state"]) is Place.BACKWARD


def test_the_second_backward_of_an_accumulation_starts_anew_at_the_loss() -> None:
    builder = TraceBuilder()
    weight = builder.allocate(MiB, Category.WEIGHTS)
    for _ in range(2):
        for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            builder.enter(phase)
            builder.op("aten.mm")
            if phase is Phase.FORWARD:
                builder.use(weight)
            builder.allocate(MiB, Category.TEMPORARIES)
        builder.op("aten.mm")
        builder.use(weight)
        builder.allocate(MiB, Category.GRADIENTS)
    trace = builder.build()
    assert [place_of(trace, event) for event in range(8)] == [
        Place.FORWARD,
        Place.LOSS,
        Place.LOSS_BACKWARD,
        Place.BACKWARD,
    ] * 2


def test_nothing_is_claimed_where_no_uses_are_known() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    builder.enter(Phase.BACKWARD)
    builder.op("aten.mm", module="head")
    builder.allocate(MiB, Category.TEMPORARIES)
    assert place_of(builder.build(), 0) is Place.BACKWARD


def test_gradients_come_after_the_backward_of_the_loss() -> None:
    assert [place for place in Place if place.is_before_gradients] == [
        Place.START,
        Place.FORWARD,
        Place.LOSS,
        Place.LOSS_BACKWARD,
    ]
