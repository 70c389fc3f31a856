from __future__ import annotations

from lowtide.tracing.instant import decisive_event, instant_of
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import GiB, MiB
from tests.tracing.samples import TraceBuilder, tiny_trace


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
