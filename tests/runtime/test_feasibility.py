"""What fits: answers are compared with traces of the plans that they name, and shown lines are run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BatchMismatchError, PlanError
from lowtide.hardware import find_hardware
from lowtide.models import resolve_model
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.planning.batch_costs import BatchCosts
from lowtide.planning.changes import Choice, options
from lowtide.planning.search import Limits
from lowtide.runtime.feasibility import at_rates_of, largest, rank, remedies, resized, smallest_change
from lowtide.runtime.plan_problem import PlanProblem
from lowtide.runtime.planner import pose
from lowtide.units import MiB

SOURCE = resolve_model("gpt-tiny")


def posed(batch: str = "8x128", **words: Any) -> tuple[PlanProblem, Limits]:
    given = {"optimizer": torch.optim.AdamW, "hardware": "rtx-4090", "host_memory": "8GiB", **words}
    return pose(SOURCE.build(torch.bfloat16), SOURCE.make_batch(batch), **given)


def test_the_largest_batch_fits_and_one_sample_more_does_not() -> None:
    budget = 80 * MiB
    found = lowtide.largest_batch(
        SOURCE.build(torch.bfloat16),
        SOURCE.make_batch("4x128"),
        optimizer=torch.optim.AdamW,
        device_memory=budget,
        host_memory="8GiB",
        hardware="rtx-4090",
    )
    assert found.found.trace.peak_reserved_bytes <= budget < found.next_bytes
    assert found.found.num_tokens == found.num_samples * 128
    assert f"{found.num_samples} samples, one more takes" in repr(found)
    # The plan is for that batch: traced by itself, it says the same.
    again = lowtide.trace(
        SOURCE.build(torch.bfloat16),
        SOURCE.make_batch(f"{found.num_samples}x128"),
        optimizer=torch.optim.AdamW,
        plan=found.found.plan,
        hardware="rtx-4090",
    )
    assert again.peak_reserved_bytes == found.found.trace.peak_reserved_bytes
    with pytest.raises(PlanError, match="no plan fits 80.0 MiB of device memory"):
        lowtide.plan(
            SOURCE.build(torch.bfloat16),
            SOURCE.make_batch(f"{found.num_samples + 1}x128"),
            optimizer=torch.optim.AdamW,
            device_memory=budget,
            host_memory="8GiB",
            hardware="rtx-4090",
        )


def test_not_even_one_sample() -> None:
    problem, limits = posed("2x128", device_memory="20MiB")
    with pytest.raises(
        PlanError, match="no plan fits 20.0 MiB of device memory: .* reserves .* MiB; give that much"
    ) as caught:
        largest(problem, limits)
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > 20 * MiB


def test_a_batch_without_a_size() -> None:
    problem, limits = posed()
    batch = {"input_ids": torch.zeros(3, 4, dtype=torch.int64), "labels": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(BatchMismatchError, match="share no first dimension"):
        largest(replace(problem, batch=batch), limits)


def test_resized_batches_repeat_or_leave_out() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "scale": torch.tensor(2.0)}
    assert resized(batch, 5)["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert resized(batch, 2)["x"].tolist() == [[0, 1], [2, 3]]
    assert resized(batch, 5)["scale"] is batch["scale"]


def test_costs_between_two_sizes_are_those_of_a_third_trace() -> None:
    problems = {size: posed(f"{size}x128")[0] for size in (8, 16, 24)}
    priced = {size: problem.priced for size, problem in problems.items()}
    line = BatchCosts(sizes=(8, 24), costs=(priced[8][0], priced[24][0]), beyond=(priced[8][1], priced[24][1]))
    for size in (8, 24):
        assert line.at(size) == priced[size]
    costs, _ = line.at(16)
    truth, _ = priced[16]
    seconds = [sum(cost.device_s for use in each.uses for cost in use.costs.values()) for each in (costs, truth)]
    held = [max(cost.peak_bytes for use in each.uses for cost in use.costs.values()) for each in (costs, truth)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
    assert held[0] == pytest.approx(held[1], rel=0.02)
    with pytest.raises(PlanError, match="runs other modules for 24 samples than for 8"):
        replace(line, costs=(priced[8][0], replace(priced[24][0], uses=priced[24][0].uses[1:])))


def test_the_smallest_change_is_the_fewest_words_that_fit() -> None:
    problem, limits = posed(device_memory="60MiB")
    found = smallest_change(problem, limits)
    assert found is not None
    assert found.reserved_bytes <= limits.device_bytes
    # Brute force: every choice of fewer words, traced, is too large.
    for option in options(problem.search, limits):
        if len(option.choice.changed) < len(found.choice.changed):
            words: dict[str, Any] = dict(option.choice.words)
            plan = lowtide.make_plan(problem.model, **words)
            assert problem.under(plan).peak_reserved_bytes > limits.device_bytes, option.choice


def test_where_plain_torch_fits_nothing_is_changed() -> None:
    problem, limits = posed(device_memory="1GiB")
    found = smallest_change(problem, limits)
    assert found is not None
    assert (found.words, found.flags) == ("none, plain torch fits", "")


def test_micro_batches_help_where_no_plan_does() -> None:
    problem, limits = posed("64x128", device_memory="60MiB")
    with pytest.raises(PlanError, match="no plan fits 60.0 MiB of device memory"):
        problem.fastest(limits)
    *_, found = remedies(problem, limits)
    assert found.word is not None
    assert "micro-batches of" in found.words
    assert found.reserved_bytes <= limits.device_bytes
    assert "--set step.accumulate=" in found.flags


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("activations", ["keep", "selective", "recompute", "offload"])
@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_each_shown_line_runs(weights: str, update: str, activations: str, schedule: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=2, hidden_size=32, num_heads=2))
    optimizer = torch.optim.AdamW(model.parameters())
    choice = Choice(weights=weights, update=update, activations=activations, schedule=schedule)
    code = choice.code(8 * MiB).replace("optimizer, plan)", "optimizer, plan, device='cpu')")
    scope: dict[str, Any] = {"lowtide": lowtide, "model": model, "optimizer": optimizer}
    exec(code, scope)
    ids = torch.randint(0, 64, (2, 16))
    with scope["session"] as session:
        assert {group.weights.value for group in session.plan.groups if group.name} == {weights}
        assert session.plan.schedule.value == schedule
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_one_trace_gives_the_seconds_of_other_hardware() -> None:
    problem, _ = posed("8x128")
    (_, there), *_ = replace(problem, hardware=find_hardware("rtx-4090")).probes()
    other = find_hardware("rtx-3090")  # the same kernels
    asked = replace(problem, hardware=other, traced={**problem.traced, "hardware": other})
    (_, truth), *_ = asked.probes()
    told = at_rates_of(other, there)
    assert [op.seconds for op in told.ops] == [op.seconds for op in truth.ops]
    assert [op.seconds for op in told.ops] != [op.seconds for op in there.ops]


def test_all_hardware_is_ranked() -> None:
    problem, limits = posed("8x128")
    rows = rank(problem, limits)
    assert {row.hardware.name for row in rows} >= {"h200", "t4", "rtx-3050", "mi300x"}
    times = [row.step_s for row in rows if row.step_s is not None]
    assert times == sorted(times)
    assert all(row.tokens_per_s == pytest.approx(1024 / row.step_s) for row in rows if row.step_s is not None)
    # With less than any plan takes, nothing fits, and the bytes that it needs are told.
    small, little = posed("8x128", device_memory="10MiB")
    assert all(row.step_s is None and row.device_bytes > 10 * MiB for row in rank(small, little, device_memory="10MiB"))
    assert not any(row.is_host_short for row in rank(small, little, device_memory="10MiB"))
