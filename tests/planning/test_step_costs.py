"""Costs are read off probes: bytes telescope to the trace's own curve, and policies are priced for every member of a kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.hardware import UpdateKind, find_hardware
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.planning.plan import Schedule
from lowtide.planning.search import WORTH_IT, Limits, Search
from lowtide.planning.simulator import lane_rates
from lowtide.planning.step_costs import POLICIES, StepCosts, UseCost, probe_policies, read_costs
from lowtide.tracing.step_trace import Category, Phase, StepTrace

BESIDE_WEIGHTS = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.WORKSPACE)


def gpt(num_layers: int) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=512, context_length=64, num_layers=num_layers, hidden_size=128, num_heads=4))


def probed(model: GPT) -> tuple[Layout, list[tuple[dict[str, str], StepTrace]]]:
    layout = lay_out(find_groups(model))
    ids = torch.zeros(4, 64, dtype=torch.int64)
    probes = []
    for policies in probe_policies(layout):
        plan = lowtide.make_plan(layout, update="host", schedule="in_backward", activations=policies)
        batch = {"input_ids": ids, "labels": ids}
        probes.append((policies, lowtide.trace(model, batch, optimizer=torch.optim.AdamW, plan=plan, hardware="h200")))
    return layout, probes


@pytest.fixture(scope="module")
def deep() -> tuple[Layout, list[tuple[dict[str, str], StepTrace]]]:
    return probed(gpt(14))


@pytest.fixture(scope="module")
def costs(deep: tuple[Layout, list[tuple[dict[str, str], StepTrace]]]) -> StepCosts:
    layout, probes = deep
    return read_costs(layout, probes, {group.name: 2 * group.nbytes for group in layout.groups})


def test_one_probe_prices_all_policies_of_a_deep_model(costs: StepCosts) -> None:
    blocks = [use for use in costs.uses if use.window.startswith("layers.")]
    assert len(blocks) == 2 * 14
    assert all(set(use.costs) == set(POLICIES) for use in blocks)
    assert costs.groups["layers.13"].policies == POLICIES


def test_a_shallow_model_takes_one_probe_for_each_policy() -> None:
    assert [policies["*"] for policies in probe_policies(lay_out(find_groups(gpt(3))))] == list(POLICIES)


def test_smaller_policies_hold_less_and_compute_more(costs: StepCosts) -> None:
    forward = next(use for use in costs.uses if use.window == "layers.5" and use.phase is Phase.FORWARD)
    backward = next(use for use in costs.uses if use.window == "layers.5" and use.phase is Phase.BACKWARD)
    held = [forward.under(policy).grown_bytes for policy in POLICIES]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[1] > held[2]
    assert backward.under("recompute").num_ops > backward.under("selective").num_ops > backward.under("keep").num_ops


def test_bytes_add_up_to_the_curve_of_the_probe(
    deep: tuple[Layout, list[tuple[dict[str, str], StepTrace]]], costs: StepCosts
) -> None:
    """The walk over the uses, each under its probed policy, ends where the trace's own curve ends before the update."""
    _, ((policies, trace),) = deep
    level = costs.start_bytes
    highest = level
    for use in costs.uses:
        cost = use.under(policies.get(use.window, "recompute"))
        highest = max(highest, level + cost.peak_bytes)
        level += cost.grown_bytes
    curve = sum(trace.stacked[category] for category in BESIDE_WEIGHTS)
    # Neighbours under another policy hold a block's input for longer: one hidden state of slack.
    hidden_state = 4 * 64 * 128 * 4
    assert abs(highest - int(curve.max())) <= 2 * hidden_state


def test_costs_one_after_the_other() -> None:
    first = UseCost(device_s=1.0, num_ops=2, grown_bytes=10, peak_bytes=15)
    second = UseCost(device_s=2.0, num_ops=3, grown_bytes=-4, peak_bytes=7)
    assert first.then(second) == UseCost(device_s=3.0, num_ops=5, grown_bytes=6, peak_bytes=17)


def test_a_tied_weight_is_a_group_of_both_its_windows() -> None:
    layout, probes = probed(gpt(2))
    found = read_costs(layout, probes, {})
    groups = {use.window: use.groups for use in found.uses if use.window}
    assert groups["head"] == groups["token_embedding"] == ("token_embedding.weight",)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_more_memory_is_never_slower(
    deep: tuple[Layout, list[tuple[dict[str, str], StepTrace]]], costs: StepCosts, schedule: Schedule
) -> None:
    """For costs of a traced step, over budgets that grow by a sixth each."""
    rates = lane_rates(find_hardware("rtx-4090"), UpdateKind.EXACT)
    search = Search(costs, deep[0], rates)
    limits = Limits(device_bytes=1 << 40, host_bytes=1 << 40, pinned_bytes=1 << 40, schedule=schedule)
    budget = search.device_bytes(search.placement(search.smallest(limits), limits))
    times = []
    while len(times) < 10:
        times.append(search.fastest(replace(limits, device_bytes=int(budget))).best.step_s)
        budget *= 7 / 6
    assert times[-1] < times[0]
    for number, later in enumerate(times):
        assert later <= min(times[: number + 1]) * (1 + 2 * WORTH_IT), times
