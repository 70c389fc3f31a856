"""Costs are read off probes: bytes telescope to the trace's own curve, and policies are priced for every member of a kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.activations.policy import policy_of
from lowtide.hardware import UpdateKind, find_hardware
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.planning.placement import assemble, window_bytes_needed
from lowtide.planning.plan import Budgets, Schedule
from lowtide.planning.search import WORTH_IT, Limits, Search, Shape
from lowtide.planning.simulator import lane_rates
from lowtide.planning.step_costs import (
    POLICIES,
    PRICED,
    GroupCosts,
    StepCosts,
    Use,
    UseCost,
    probe_policies,
    read_costs,
)
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
    return probed(gpt(16))


@pytest.fixture(scope="module")
def costs(deep: tuple[Layout, list[tuple[dict[str, str], StepTrace]]]) -> StepCosts:
    layout, probes = deep
    return read_costs(layout, probes, {group.name: 2 * group.nbytes for group in layout.groups})


def test_one_probe_prices_all_policies_of_a_deep_model(costs: StepCosts) -> None:
    blocks = [use for use in costs.uses if use.window.startswith("layers.")]
    assert len(blocks) == 2 * 16
    assert all(set(use.costs) == set(PRICED) for use in blocks)
    assert costs.groups["layers.15"].policies == POLICIES


def test_a_shallow_model_takes_one_probe_for_each_policy() -> None:
    assert [policies["*"] for policies in probe_policies(lay_out(find_groups(gpt(3))))] == list(PRICED)


def test_a_model_of_twelve_blocks_takes_one_probe_without_the_last_policy() -> None:
    (policies,) = probe_policies(lay_out(find_groups(gpt(12))))
    assert set(policies.values()) == {*PRICED[:-1]}


def test_smaller_policies_hold_less_and_compute_more(costs: StepCosts) -> None:
    forward = next(use for use in costs.uses if use.window == "layers.5" and use.phase is Phase.FORWARD)
    backward = next(use for use in costs.uses if use.window == "layers.5" and use.phase is Phase.BACKWARD)
    held = [forward.under(policy).grown_bytes for policy in ("keep", "selective", "recompute", "offload")]
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


def chain(held: int, kept: int, num_blocks: int, stashed: int = 0) -> StepCosts:
    """Blocks that hold so much under keep, and their input under recompute."""
    names = [f"b{number}" for number in range(num_blocks)]
    forward = {
        "keep": UseCost(device_s=1.0, num_ops=10, grown_bytes=held, peak_bytes=held + 5),
        "recompute": UseCost(device_s=1.0, num_ops=10, grown_bytes=kept, peak_bytes=held + 5),
        "offload/all": UseCost(device_s=1.0, num_ops=10, grown_bytes=0, peak_bytes=held + 5),
    }
    backward = {
        "keep": UseCost(device_s=2.0, num_ops=20, grown_bytes=-held, peak_bytes=7),
        "recompute": UseCost(device_s=3.0, num_ops=30, grown_bytes=-kept, peak_bytes=held + 7),
        "offload/all": UseCost(device_s=2.0, num_ops=20, grown_bytes=0, peak_bytes=7),
    }
    uses = [Use(window=name, groups=(name,), phase=Phase.FORWARD, costs=forward) for name in names]
    uses += [Use(window=name, groups=(name,), phase=Phase.BACKWARD, costs=backward) for name in reversed(names)]
    groups = {
        name: GroupCosts(
            name=name, kind=0, weight_bytes=0, trained_bytes=0, state_bytes=0, num_trained=0, policies=POLICIES,
            stashed_bytes={"offload/all": stashed},
        )
        for name in names
    }  # fmt: skip
    return StepCosts(uses=tuple(uses), groups=groups, start_bytes=0)


def test_a_segment_keeps_one_input_and_runs_its_blocks_once_more() -> None:
    costs = chain(held=100, kept=10, num_blocks=5)
    found = costs.under({f"b{number}": "recompute/2" for number in range(5)})
    # Two segments of two, and the last block alone. Inputs of the first blocks are kept.
    assert [use.grown_bytes for use in found[:5]] == [10, 0, 10, 0, 10]
    # In the backward the last of a segment makes its own input again, and its own backward lets it go.
    assert [use.grown_bytes for use in found[5:]] == [-10, 0, -10, 0, -10]
    assert [use.device_s for use in found[5:]] == [3.0, 4.0, 3.0, 4.0, 3.0]
    assert [use.num_ops for use in found[5:]] == [30, 40, 30, 40, 30]
    assert [use.peak_bytes for use in found[5:]] == [107, 117, 107, 117, 107]


def test_a_block_under_another_policy_ends_a_segment() -> None:
    costs = chain(held=100, kept=10, num_blocks=4)
    words = {"b0": "recompute/4", "b1": "keep", "b2": "recompute/4", "b3": "recompute/4"}
    assert costs.segments(words) == [[(2, 5), (3, 4)]]
    assert [use.grown_bytes for use in costs.under(words)[:4]] == [10, 100, 10, 0]


def test_the_first_of_several_backwards_brings_back_its_own_and_the_next_ones_activations() -> None:
    costs = chain(held=100, kept=10, num_blocks=3, stashed=90)
    found = costs.under(dict.fromkeys(costs.groups, "offload/all"))
    assert [use.grown_bytes for use in found] == [0, 0, 0, 90, 0, -90]
    assert [use.peak_bytes for use in found[3:]] == [97, 7, 7]


@pytest.mark.parametrize(("word", "num_others"), [("recompute/2", 0), ("recompute/2", 3), ("recompute/4", 0)])
def test_the_estimate_of_segments_is_that_of_the_trace(
    deep: tuple[Layout, list[tuple[dict[str, str], StepTrace]]], costs: StepCosts, word: str, num_others: int
) -> None:
    layout = deep[0]
    search = Search(costs, layout, lane_rates(find_hardware("h200"), UpdateKind.TORCH_FUSED))
    limits = Limits(device_bytes=1 << 50, host_bytes=1 << 50, pinned_bytes=1 << 50)
    shape = Shape(num_resident=3, num_device=0, small=word, fast="keep", num_fast=num_others)
    placement = search.placement(shape, limits)
    plan = assemble(
        layout,
        weights={name: choice.weights for name, choice in placement.groups.items()},
        sites={chunk.name: placement.groups[chunk.group].site for chunk in layout.chunks},
        schedule=limits.schedule,
        activations={name: policy_of(choice.policy) for name, choice in placement.groups.items()},
        budgets=Budgets(),
    )
    ids = torch.zeros(4, 64, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    traced = lowtide.trace(gpt(16), batch, optimizer=torch.optim.AdamW, plan=plan, hardware="h200")
    assert search.device_bytes(placement) == pytest.approx(traced.peak_bytes, rel=0.03)
    assert placement.window_bytes == window_bytes_needed(layout, plan)
    assert traced.simulated_s is not None
    assert search.simulator.times(placement).step_s == pytest.approx(traced.simulated_s["step"], rel=0.12)
