from __future__ import annotations

import numpy as np
import pytest

from lowtide.tracing.clock import clock_of, durations
from lowtide.tracing.step_trace import Category, Phase
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, tiny_trace, transformer_trace


def test_starts_are_sums_of_seconds() -> None:
    clock = clock_of(tiny_trace())
    assert clock.starts == pytest.approx([0.0, 1e-5, 3e-5, 5e-5, 8e-5])
    assert clock.is_timed
    assert clock.wait(0, 2) == pytest.approx(2e-5)


def test_each_height_lasts_until_the_next_event() -> None:
    # Curve 12, 15, 19, 15, 18, 15, 12 MiB. An op's allocations come at its start, its frees at its end.
    trace = tiny_trace()
    assert durations(trace, clock_of(trace)) == pytest.approx([0.0, 1e-5, 2e-5, 0.0, 2e-5, 3e-5, 0.0])


def test_durations_cover_the_step_and_never_run_backwards() -> None:
    trace = transformer_trace(layers=3)
    clock = clock_of(trace)
    lengths = durations(trace, clock)
    assert (lengths >= 0).all()
    assert lengths.sum() == pytest.approx(clock.total)
    assert len(lengths) == len(trace.curve)


def test_without_times_each_op_is_one_unit() -> None:
    builder = TraceBuilder()
    builder.enter(Phase.FORWARD)
    for _ in range(3):
        builder.op("aten.mm")
        builder.allocate(MiB, Category.ACTIVATIONS)
    trace = builder.build()
    clock = clock_of(trace)
    assert not clock.is_timed
    assert np.array_equal(durations(trace, clock), [0.0, 1.0, 1.0, 1.0])


def test_a_step_without_ops_takes_no_time() -> None:
    trace = TraceBuilder().build()
    assert durations(trace, clock_of(trace)).sum() == 0
