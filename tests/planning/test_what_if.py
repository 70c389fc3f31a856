from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import TraceError
from lowtide.hardware import find_hardware
from lowtide.models.batches import TokenBatch
from lowtide.models.deep_one import DeepOne, DeepOneConfig
from lowtide.models.registry import resolve_model
from lowtide.optim.optimizers import Adafactor
from lowtide.planning.techniques import (
    ACCUMULATE,
    FUSED_STEP,
    HOST_UPDATES,
    STREAMED,
    UPDATE_IN_BACKWARD,
    Problem,
    activation_policy,
    attention_backend,
)
from lowtide.planning.what_if import Progress, WhatIf, WhatIfRow, what_if
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import Category, StepTrace
from lowtide.units import MiB, format_bytes

RECOMPUTE = activation_policy("recompute", "recompute")
CONFIG = DeepOneConfig(
    vocab_size=1024, context_length=96, num_layers=6, hidden_size=512, intermediate_size=1344, num_heads=4
)
"""The Peak Memory experiment in small: many tokens for its weights, so that activations outweigh gradients."""


@pytest.fixture(scope="module")
def deep_one() -> Problem:
    with torch.device("meta"):
        model = DeepOne(CONFIG)
    batch = TokenBatch(vocab_size=1024, default_batch=8, default_length=96, max_length=None)("8x96")
    return Problem(model=model, batch=batch, optimizer=Adafactor)


@pytest.fixture(scope="module")
def base(deep_one: Problem) -> StepTrace:
    return deep_one.trace()


@pytest.fixture(scope="module")
def answer(deep_one: Problem, base: StepTrace) -> WhatIf:
    return what_if(deep_one, base, techniques=[RECOMPUTE, UPDATE_IN_BACKWARD])


def row(answer: WhatIf, technique: str) -> WhatIfRow:
    [found] = [row for row in answer.rows if row.technique == technique]
    return found


def gradient_bytes(problem: Problem) -> int:
    return sum(parameter.numel() * 4 for parameter in problem.model.parameters())


def test_an_update_in_the_backward_alone_saves_nothing(answer: WhatIf, base: StepTrace) -> None:
    alone = row(answer, "optimizer in backward")
    assert abs(alone.saved_bytes) < 0.005 * base.peak_bytes
    assert re.match(
        r"the peak is (at|in the backward of) the loss, before any gradient exists; the gradients reach \d",
        alone.reason,
    )


def test_recompute_moves_the_peak_to_where_gradients_are(answer: WhatIf, base: StepTrace) -> None:
    recompute = row(answer, "recompute")
    assert base.at_peak[Category.GRADIENTS] == 0
    assert recompute.saved_bytes > 0.2 * base.peak_bytes
    assert "the activations alive at the peak fall from" in recompute.reason
    assert "(gradients from 0 B to" in recompute.reason


def test_together_they_save_the_gradients_too(answer: WhatIf, deep_one: Problem) -> None:
    together, recompute = row(answer, "recompute + optimizer in backward"), row(answer, "recompute")
    extra = together.saved_bytes - recompute.saved_bytes
    # All gradients but those that the first layers have not made yet; one matrix's update comes instead.
    assert 0.7 * gradient_bytes(deep_one) < extra < gradient_bytes(deep_one)
    assert together.reason.startswith("optimizer in backward saves ")
    assert " on top of recompute: the gradients alive at the peak fall from " in together.reason


def test_on_top_of_recompute_it_saves_about_the_gradients(deep_one: Problem, answer: WhatIf) -> None:
    recomputed = replace(deep_one, settings=StepSettings(activations="recompute"))
    on_top = what_if(recomputed, recomputed.trace(), techniques=[RECOMPUTE, UPDATE_IN_BACKWARD])
    [only] = on_top.rows
    assert only.before_bytes == row(answer, "recompute").after_bytes
    assert only.after_bytes == row(answer, "recompute + optimizer in backward").after_bytes
    [skipped] = on_top.skipped
    assert (skipped.technique, skipped.reason) == ("recompute", "it is on already")


@pytest.mark.slow
def test_all_techniques_on_a_step_whose_peak_is_in_the_update() -> None:
    source = resolve_model("gpt-tiny")
    problem = Problem(
        model=source.build(None), batch=source.make_batch("2x16"), optimizer=torch.optim.AdamW, torch_version="2.13.0"
    )
    base = problem.trace()
    parameters = sum(parameter.numel() * 4 for parameter in problem.model.parameters())
    seen: list[Progress] = []
    answer = what_if(problem, base, on_progress=seen.append)

    assert "the peak is in the update, after the last activation is freed" in row(answer, "recompute").reason
    fused = row(answer, "fused step")
    # foreach keeps one copy of all parameters, rounded up to blocks.
    assert 0.8 * parameters < fused.saved_bytes < 1.1 * parameters
    assert fused.reason.startswith(
        "the temporary copies of the foreach update alive at the peak fall from 3.2 MiB to 0 B"
    )
    bf16 = row(answer, "bf16")
    # Weights, gradients, two moments and the foreach copy lose half of their bytes each.
    assert bf16.saved_bytes == pytest.approx(5 * parameters / 2, rel=0.02)
    assert [progress.number for progress in seen] == sorted({progress.number for progress in seen})
    assert all(progress.number <= progress.total for progress in seen)
    assert seen[0].technique == "bf16"
    assert {row.before_bytes for row in answer.rows} == {base.peak_bytes}
    assert [skipped.technique for skipped in answer.skipped][:2] == ["chunked loss", "fused attention"]


def test_accumulation_halves_what_grows_with_the_batch() -> None:
    source = resolve_model("gpt-tiny")
    problem = Problem(model=source.build(None), batch=source.make_batch("16x128"), optimizer=torch.optim.SGD)
    base = problem.trace()
    answer = what_if(problem, base, techniques=[ACCUMULATE, attention_backend(to_math=True)])
    halved = row(answer, "accumulation (half the batch, twice)")
    grows = base.at_peak[Category.ACTIVATIONS] + base.at_peak[Category.TEMPORARIES]
    kept_gradients = sum(parameter.numel() * 4 for parameter in problem.model.parameters())
    assert halved.saved_bytes == pytest.approx(grows / 2 - kept_gradients, abs=2 * MiB)
    math = row(answer, "math attention")
    # Four layers keep the fp32 scores of 16 sequences and 4 heads.
    assert -math.saved_bytes > 4 * 16 * 4 * 128 * 128 * 4 / 2
    assert "the tensors of the attention alive at the peak rise" in math.reason


def test_a_technique_that_cannot_be_traced_is_skipped_with_the_reason() -> None:
    class Loose(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sum() * self.scale).sum()

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1 << 20))  # so that the peak is where the update holds its copies

    problem = Problem(
        model=Loose(), batch=torch.ones(2, 4), optimizer=lambda parameters: torch.optim.RMSprop(parameters)
    )
    answer = what_if(problem, problem.trace(), techniques=[FUSED_STEP])
    assert answer.rows == ()
    assert answer.skipped[0].reason.startswith("it could not be traced: RMSprop has no fused implementation")


@pytest.fixture(scope="module")
def session_answer() -> tuple[Problem, StepTrace, WhatIf]:
    """A step that goes onto its device under a session with recompute only."""
    source = resolve_model("gpt-tiny")
    card = replace(find_hardware("rtx-4090"), memory_bytes=find_hardware("rtx-4090").context_bytes + 51 * MiB)
    problem = Problem(
        model=source.build(torch.bfloat16),
        batch=source.make_batch("8x128"),
        optimizer=torch.optim.AdamW,
        hardware=card,
        trace_session=lowtide.trace,
    )
    base = problem.trace()
    return problem, base, what_if(problem, base, techniques=[RECOMPUTE, HOST_UPDATES, STREAMED])


def test_a_session_saves_what_a_trace_under_its_plan_says(session_answer: tuple[Problem, StepTrace, WhatIf]) -> None:
    problem, base, answer = session_answer
    for name, words in (
        ("updates on the host", {"weights": "resident", "update": "host"}),
        ("weights streamed, updates on the host", {"weights": "streamed", "update": "host"}),
        ("weights streamed, updates on the host + recompute", {"activations": "recompute"}),
    ):
        found = row(answer, name)
        plan = lowtide.make_plan(problem.model, **words)
        expected = lowtide.trace(
            problem.model, problem.batch, optimizer=problem.optimizer, plan=plan, hardware=problem.hardware
        )
        assert (found.before_bytes, found.after_bytes) == (base.peak_bytes, expected.peak_bytes)
        assert (found.reserved_bytes, found.host_bytes) == (expected.peak_reserved_bytes, expected.host_bytes)
        assert expected.simulated_s is not None
        assert found.step_s == expected.simulated_s["step"]
        needed = expected.peak_reserved_bytes + expected.target.context_bytes
        assert found.fits is (needed <= expected.target.capacity_bytes)


def test_the_smallest_change_that_fits_is_told(session_answer: tuple[Problem, StepTrace, WhatIf]) -> None:
    problem, _, answer = session_answer
    assert answer.base_fits is False
    least = answer.least_that_fits
    assert least is not None
    assert least is row(answer, "weights streamed, updates on the host + recompute")
    assert [each.technique for each in answer.rows if each.fits] == [least.technique]
    assert least.technique in answer.verdict
    assert f"reserves {format_bytes(least.reserved_bytes or 0)}, with" in answer.verdict
    assert least.set_ == ("plan.weights=streamed", "plan.update=host", "plan.activations=recompute")
    # The line of code runs: it makes the plan that was traced.
    call = least.code.removeprefix("session = lowtide.manage(model, optimizer, ").removesuffix(")")
    made = eval(call, {"lowtide": lowtide, "model": problem.model})
    assert made == lowtide.make_plan(problem.model, weights="streamed", update="host", activations="recompute")


def test_nothing_that_fits_is_told_too(session_answer: tuple[Problem, StepTrace, WhatIf]) -> None:
    _, _, answer = session_answer
    none = replace(answer, rows=tuple(replace(each, fits=False) for each in answer.rows))
    assert none.verdict.startswith(
        "Nothing that was tried fits; the smallest, weights streamed, updates on the host + recompute, reserves "
    )
    assert replace(answer, base_fits=True).verdict == ""
    assert replace(answer, base_fits=None).verdict == ""


def test_what_is_not_alive_at_the_peak_is_not_traced() -> None:
    source = resolve_model("gpt-tiny")
    problem = Problem(model=source.build(None), batch=source.make_batch("2x16"), optimizer=torch.optim.AdamW)
    base = problem.trace()
    seen: list[Progress] = []
    policies = [activation_policy(word, word) for word in ("selective", "recompute", "offload")]
    answer = what_if(problem, base, techniques=policies, on_progress=seen.append)
    assert seen == []
    # What a trace of each says: the peak does not change.
    assert [each.after_bytes for each in answer.rows] == [
        policy.apply(problem).trace().peak_bytes for policy in policies
    ]
    assert {each.saved_bytes for each in answer.rows} == {0}


def test_a_step_that_fails_by_itself_is_an_error() -> None:
    problem = Problem(model=nn.Linear(2, 2), batch=torch.ones(2, 2), optimizer=torch.optim.SGD)
    with pytest.raises(TraceError, match="the loss must be a scalar"):
        problem.trace()
