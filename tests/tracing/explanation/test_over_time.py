from __future__ import annotations

import numpy as np
import pytest

from lowtide.tracing.explanation.over_time import (
    attention_scores,
    category_shares,
    check_rule,
    clock_of,
    durations,
    idle_tensors,
    pass_counts,
)
from lowtide.tracing.step_trace import Category, Phase, StepTrace
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


def test_averages_are_weighted_by_time() -> None:
    # 12 MiB throughout; 3 MiB of activations for 5e-5 s, 4 of temporaries for 2e-5 s, 3 of gradients for 5e-5 s.
    shares = {share.category: share for share in category_shares(tiny_trace())}
    area = 12 * 8e-5 + 3 * 5e-5 + 4 * 2e-5 + 3 * 5e-5
    assert shares[Category.WEIGHTS].average == pytest.approx(4 * 8e-5 / area)
    assert shares[Category.ACTIVATIONS].average == pytest.approx(3 * 5e-5 / area)
    assert shares[Category.TEMPORARIES].average == pytest.approx(4 * 2e-5 / area)
    assert shares[Category.GRADIENTS].average == pytest.approx(3 * 5e-5 / area)
    assert shares[Category.OPTIMIZER].at_peak == pytest.approx(8 / 19)


def test_both_kinds_of_shares_sum_to_one() -> None:
    shares = category_shares(transformer_trace(layers=3))
    assert sum(share.average for share in shares) == pytest.approx(1.0)
    assert sum(share.at_peak for share in shares) == pytest.approx(1.0)


def by_the_rule(*, scores: int) -> StepTrace:
    """80 MiB of state, 10 of gradients, 5 of weights; 5 of activations, of which `scores` are of attention."""
    builder = TraceBuilder()
    builder.allocate(80 * MiB, Category.OPTIMIZER)
    builder.allocate(5 * MiB, Category.WEIGHTS, dtype="bfloat16")
    builder.allocate(10 * MiB, Category.GRADIENTS)
    builder.enter(Phase.FORWARD)
    builder.op("aten._softmax", module="attention", seconds=1.0)
    builder.allocate(scores * MiB, Category.ACTIVATIONS, shape=(8, 64, 64))
    builder.op("aten.mm", module="attention.out", seconds=1.0)
    builder.allocate((5 - scores) * MiB, Category.ACTIVATIONS, shape=(8, 64, 64))
    return builder.build()


def test_a_step_by_the_rule_holds() -> None:
    trace = by_the_rule(scores=4)
    check = check_rule(trace, category_shares(trace))
    assert check.holds
    assert check.scores_dominate
    assert "holds for this step" in check.sentence
    assert "attention scores are 4.0 MiB of 5.0 MiB" in check.sentence


def test_it_holds_in_part_where_scores_do_not_dominate() -> None:
    trace = by_the_rule(scores=1)
    check = check_rule(trace, category_shares(trace))
    assert check.holds
    assert not check.scores_dominate
    assert "holds only in part" in check.sentence


def test_where_it_fails_the_sentence_says_why() -> None:
    trace = transformer_trace(layers=4)
    check = check_rule(trace, category_shares(trace))
    assert not check.holds
    assert "does not hold" in check.sentence
    assert "the state (float32) is 2.0 times the weights (bfloat16) where the rule has 16 times" in check.sentence
    assert "no attention scores are kept at all" in check.sentence


def test_without_an_optimizer_it_says_so() -> None:
    builder = TraceBuilder()
    builder.allocate(40 * MiB, Category.WEIGHTS)
    builder.enter(Phase.FORWARD)
    trace = builder.build()
    assert "keeps almost no state (0 B for 40.0 MiB of weights)" in check_rule(trace, category_shares(trace)).sentence


def test_scores_are_of_the_softmax_module_only() -> None:
    trace = by_the_rule(scores=4)
    assert [item.bytes for item in attention_scores(trace, 1)] == [4 * MiB]
