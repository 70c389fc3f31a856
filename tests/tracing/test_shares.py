from __future__ import annotations

import pytest

from lowtide.tracing.shares import attention_scores, category_shares, check_rule
from lowtide.tracing.step_trace import Category, Phase, StepTrace
from lowtide.units import MiB
from tests.tracing.samples import TraceBuilder, tiny_trace, transformer_trace


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
