from __future__ import annotations

import pytest

from lowtide.tracing.alive import group_alive, largest_alive
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, tiny_trace, transformer_trace


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
