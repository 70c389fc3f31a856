from __future__ import annotations

import pytest

from lowtide.tracing.idle import idle_tensors, pass_counts
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder


def step() -> StepTrace:
    """Seconds 0-1 layers.0, 1-3 layers.1, 3-4 loss, 4-6 layers.1 back, 6-7 layers.0 back, 7-10 update."""
    builder = TraceBuilder()
    weight = builder.allocate(4 * MiB, Category.WEIGHTS, module="layers.1")
    state = builder.allocate(8 * MiB, Category.OPTIMIZER, module="layers.1")
    builder.enter(Phase.FORWARD)
    outputs = []
    for layer, seconds in ((0, 1.0), (1, 2.0)):
        builder.op("aten.mm", module=f"layers.{layer}", seconds=seconds)
        if layer == 1:
            builder.use(weight)
        outputs.append(builder.allocate(2 * MiB, Category.ACTIVATIONS))
    builder.enter(Phase.LOSS)
    builder.op("aten.sum", seconds=1.0)
    builder.enter(Phase.BACKWARD)
    builder.op("aten.mm", module="layers.1", seconds=2.0)
    builder.use(weight)
    builder.use(outputs[1])
    scratch = builder.allocate(MiB, Category.TEMPORARIES)
    gradient = builder.allocate(4 * MiB, Category.GRADIENTS)
    builder.op("aten.mm", module="layers.0", seconds=1.0)
    builder.use(outputs[0])
    builder.use(scratch)
    for allocation in (*outputs, scratch):
        builder.free(allocation)
    builder.enter(Phase.UPDATE)
    builder.op("aten.add_", seconds=3.0)
    for allocation in (weight, state, gradient):
        builder.use(allocation)
    return builder.build()


def test_idle_time_is_what_lies_between_uses() -> None:
    found = {(group.category, group.module): group for group in idle_tensors(step())}
    # Activations: layers.0 waits from 1 to 6, layers.1 from 3 to 4; together (5 + 1) s on 2 MiB each.
    activations = found[Category.ACTIVATIONS, "layers.*"]
    assert activations.count == 2
    assert activations.bytes == 4 * MiB
    assert activations.idle_s == pytest.approx(3.0)
    assert activations.idle_share == pytest.approx(0.3)
    assert activations.byte_seconds == pytest.approx(6 * 2 * MiB)
    assert activations.next_phase is Phase.BACKWARD
    # The gradient is made by 6 and used from 7 on.
    assert found[Category.GRADIENTS, "layers.1"].idle_s == pytest.approx(1.0)


def test_what_outlives_the_step_also_waits_for_the_next() -> None:
    found = {(group.category, group.module): group for group in idle_tensors(step())}
    # Weight: 3 to 4, 6 to 7, and from 10 around to 1. State: all but the update.
    assert found[Category.WEIGHTS, "layers.1"].idle_s == pytest.approx(3.0)
    assert found[Category.OPTIMIZER, "layers.1"].idle_s == pytest.approx(7.0)
    assert found[Category.OPTIMIZER, "layers.1"].next_phase is Phase.UPDATE


def test_most_byte_seconds_come_first_and_the_busy_are_left_out() -> None:
    groups = idle_tensors(step())
    assert [group.byte_seconds / MiB for group in groups] == pytest.approx([56.0, 12.0, 12.0, 4.0])
    assert all(group.category is not Category.TEMPORARIES for group in groups)
    assert len(idle_tensors(step(), limit=1)) == 1


def test_passes_of_what_is_alive_at_the_peak() -> None:
    # Peak when the gradient is made: weight 3 passes, state 1, both activations and the gradient 2, scratch 1.
    counts = pass_counts(step())
    assert (counts.once, counts.twice, counts.more, counts.forward_and_backward) == (2, 3, 1, 2)
    assert (counts.twice_bytes, counts.total_bytes) == (8 * MiB, 21 * MiB)
    assert counts.sentence.startswith(
        "Of the 6 large tensors alive at the peak 3 (38% of their bytes) are used in exactly"
    )


def test_small_tensors_and_workspaces_do_not_count() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    builder.op("aten.mm")
    builder.allocate(512, Category.ACTIVATIONS)
    builder.allocate(512 * MiB, Category.WORKSPACE)
    counts = pass_counts(builder.build())
    assert counts.total == 0
    assert counts.sentence == "No use of a large tensor was recorded."
