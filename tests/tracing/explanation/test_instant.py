from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.tracing.explanation.instant import (
    Place,
    decisive_event,
    group_alive,
    instant_of,
    largest_alive,
    place_of,
    where,
)
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import GiB, MiB
from tests.tracing.samples import TraceBuilder, tiny_trace, transformer_trace


def test_the_instant_of_the_peak_is_named() -> None:
    trace = tiny_trace()
    moment = instant_of(trace, trace.peak_event)
    assert (moment.phase, moment.op, moment.source) == (Phase.LOSS, "aten._log_softmax", "tiny.py:20")
    assert moment.place == "(outside the model) aten._log_softmax"
    assert instant_of(trace, 0).place == "head aten.mm"


def test_before_the_step_there_is_no_op() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    trace = builder.build()
    assert trace.peak_event == -1
    assert instant_of(trace, trace.peak_event).place == "before the step begins"


def test_an_event_before_the_first_op_is_known_by_what_it_allocates() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.allocate(MiB, Category.WORKSPACE, module="handle")
    assert instant_of(builder.build(), 0).module == "handle"


def test_a_scalar_on_top_is_not_the_cause() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.LOSS)
    builder.op("aten._log_softmax", source="loss.py:1")
    builder.allocate(GiB, Category.ACTIVATIONS)
    builder.op("aten.sum", source="loss.py:2")
    gone = builder.allocate(100 * MiB, Category.TEMPORARIES)
    builder.free(gone)
    builder.op("aten.nan_to_num", source="loss.py:3")
    held = builder.allocate(100 * MiB, Category.TEMPORARIES)
    builder.allocate(4, Category.ACTIVATIONS)
    trace = builder.build()
    assert trace.peak_event == 4
    assert trace.events[decisive_event(trace)].allocation == held


def test_what_was_freed_before_the_peak_is_not_the_cause() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.LOSS)
    builder.op("aten.mm")
    kept = builder.allocate(GiB, Category.ACTIVATIONS)
    builder.op("aten.cat")
    builder.free(builder.allocate(2 * MiB, Category.TEMPORARIES))
    for _ in range(5000):
        builder.allocate(512, Category.ACTIVATIONS)
    trace = builder.build()
    assert trace.events[decisive_event(trace)].allocation == kept


def test_a_step_that_allocates_nothing_has_no_cause() -> None:
    builder = TraceBuilder()
    builder.allocate(MiB, Category.WEIGHTS)
    assert decisive_event(builder.build()) == -1


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


@pytest.mark.parametrize("event", [-1, 0, 20, 60])
def test_groups_sum_to_the_curve(event: int) -> None:
    trace = transformer_trace(layers=5)
    groups = group_alive(trace, event)
    assert sum(group.bytes for group in groups) == trace.curve[event + 1]
    assert sum(group.count for group in groups) == len(list(trace.alive_at(event)))
    assert [group.bytes for group in groups] == sorted((group.bytes for group in groups), reverse=True)


def test_equal_tensors_of_equal_layers_are_one_line() -> None:
    trace = transformer_trace(layers=5, width=512, tokens=1024)
    [group] = [g for g in group_alive(trace, trace.peak_event) if g.module.endswith("mlp.up")]
    assert (group.module, group.op, group.count) == ("layers.*.mlp.up", "aten.addmm", 5)
    assert group.bytes == 5 * 1024 * 4 * 512 * 2
    assert (group.shape, group.dtype, group.category) == ((1024, 2048), "bfloat16", Category.ACTIVATIONS)


def test_only_numbers_that_differ_become_stars() -> None:
    builder = TraceBuilder()
    for layer in (3, 4):
        builder.allocate(MiB, Category.WEIGHTS, module=f"layers.{layer}.experts.0.up")
    builder.allocate(MiB, Category.WEIGHTS, module="conv2d.7x7")
    assert {g.module: g.count for g in group_alive(builder.build(), -1)} == {
        "layers.*.experts.0.up": 2,
        "conv2d.7x7": 1,
    }


def test_one_layer_keeps_its_number() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm", module="layers.3")
    builder.allocate(MiB, Category.ACTIVATIONS)
    assert [group.module for group in group_alive(builder.build(), 0)] == ["layers.3"]


def test_largest_are_the_largest_alive() -> None:
    trace = tiny_trace()
    largest = largest_alive(trace, trace.peak_event, 2)
    assert [item.bytes // MiB for item in largest] == [8, 4]
    assert all(item.died is None or item.died > trace.peak_event for item in largest)
