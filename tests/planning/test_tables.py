"""Embeddings that stay on the host, in a search: against brute force, and with the replay as the judge."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations.policy import policy_of
from lowtide.errors import ConfigError
from lowtide.hardware import Hardware, UpdateKind, find_hardware
from lowtide.memory.chunk import Layout, lay_out
from lowtide.memory.groups import find_groups
from lowtide.models import resolve_model
from lowtide.models.llama import Llama, LlamaConfig
from lowtide.planning.improve import Arrangement
from lowtide.planning.lanes import GroupChoice
from lowtide.planning.placement import assemble
from lowtide.planning.plan import Budgets, Schedule, Site, Weights
from lowtide.planning.search import WORTH_IT, Limits, Search, Shape
from lowtide.planning.simulator import lane_rates
from lowtide.planning.step_costs import StepCosts, probe_policies, read_costs
from lowtide.runtime.plan_problem import _words
from lowtide.runtime.planner import pose
from tests.planning.test_search import ENDLESS, RATES, costs, layout, limits

__all__ = ["costs", "layout"]  # fixtures


@pytest.mark.parametrize("share", [1.0, 1.1, 1.3, 2.0])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_near_the_best_of_all_places(layout: Layout, costs: StepCosts, share: float, schedule: Schedule) -> None:
    """The first of five groups could stay on the host; each group's weights and update site are tried."""
    first = next(iter(costs.groups))
    with_table = replace(costs, groups={**costs.groups, first: replace(costs.groups[first], is_table=True)})
    search = Search(with_table, layout, RATES)
    shape = Shape(num_resident=0, num_device=0, small="keep", fast="keep", num_fast=0)
    allowed = limits(int(search.device_bytes(search.placement(shape, limits(ENDLESS))) * share), schedule)
    allowed = replace(allowed, policies=("keep",))
    one = [
        GroupChoice(weights=weights, site=site)
        for weights, site in itertools.product((Weights.RESIDENT, Weights.STREAMED), (Site.DEVICE, Site.HOST))
    ]
    table = [*one, GroupChoice(weights=Weights.HOST, site=Site.HOST)]
    every = [
        search._placed(Arrangement(choices, depth), allowed)
        for choices in itertools.product(table, *[one] * (len(costs.groups) - 1))
        for depth in (0, 1)
    ]
    fitting = [placement for placement in every if search.fits(placement, allowed)]
    best_s = min(search.simulator.times(placement).step_s for placement in fitting)
    found = search.improved(search.fastest(allowed).best, allowed)
    assert search.fits(found.placement, allowed)
    assert found.step_s <= best_s * (1 + 4 * WORTH_IT)


def llama() -> Llama:
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=8192, context_length=64, num_layers=6, hidden_size=128, intermediate_size=256, num_heads=4,
            num_kv_heads=4,
        )  # fmt: skip
        return Llama(config).to(torch.bfloat16)


BATCH = {name: torch.zeros(4, 64, dtype=torch.int64) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_the_estimate_is_that_of_the_replay(schedule: str) -> None:
    layout = lay_out(find_groups(llama()))
    words = {"optimizer": torch.optim.AdamW, "precision": "bf16 exact", "hardware": "h200"}
    probes = []
    for policies in probe_policies(layout):
        plan = lowtide.make_plan(layout, update="host", schedule="in_backward", activations=policies)
        probes.append((policies, lowtide.trace(llama(), BATCH, plan=plan, **words)))
    state_bytes = {group.name: 5 * group.nbytes for group in layout.groups}
    costs = read_costs(layout, probes, state_bytes, ["token_embedding"])
    search = Search(costs, layout, lane_rates(find_hardware("h200"), UpdateKind.EXACT))
    allowed = Limits(device_bytes=ENDLESS, host_bytes=ENDLESS, pinned_bytes=ENDLESS, schedule=Schedule(schedule))
    shape = Shape(num_resident=0, num_device=2, small="recompute", fast="keep", num_fast=1, tables_stay=True)
    placement = search.placement(shape, allowed)
    plan = assemble(
        layout,
        weights={name: choice.weights for name, choice in placement.groups.items()},
        sites={chunk.name: placement.groups[chunk.group].site for chunk in layout.chunks},
        schedule=allowed.schedule,
        activations={name: policy_of(choice.policy) for name, choice in placement.groups.items()},
        budgets=Budgets(),
    )
    traced = lowtide.trace(llama(), BATCH, plan=plan, **words)
    assert search.device_bytes(placement) == pytest.approx(traced.peak_bytes, rel=0.04)
    host_bytes, pinned_bytes = search.host_bytes(placement)
    assert host_bytes == pytest.approx(traced.host_bytes, rel=0.04)
    assert pinned_bytes == pytest.approx(traced.pinned_bytes, rel=0.06)


def test_a_table_is_named_among_what_a_plan_does() -> None:
    plan = lowtide.make_plan(llama(), weights={"*": "streamed", "token_embedding": "host"})
    assert next(iter(_words(plan))).startswith("1 of 9 groups stays on the device, token_embedding stays on the host")


@pytest.mark.parametrize(("dtype", "allow", "found"), [
    (torch.float32, [], ["token_embedding"]),
    (torch.bfloat16, [], []),
    (torch.bfloat16, ["tables"], ["token_embedding"]),
])  # fmt: skip
def test_a_16_bit_table_needs_the_users_word(dtype: torch.dtype, allow: list[str], found: list[str]) -> None:
    problem, _ = pose(llama().to(dtype), BATCH, optimizer=torch.optim.AdamW, hardware="rtx-4090", allow=allow)
    assert problem._tables == found


def test_why_a_16_bit_table_needs_it() -> None:
    """The host adds gradient rows to one another in the table's own type."""
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.ones(4096, 1, dtype=torch.bfloat16)
    nn.functional.embedding(torch.zeros(4096, dtype=torch.int64), weight).backward(rows)
    assert weight.grad is not None
    assert float(weight.grad) == 256


def test_a_tied_embedding_cannot_stay() -> None:
    tied = resolve_model("gpt-tiny")
    problem, _ = pose(tied.build(None), tied.make_batch("2x64"), optimizer=torch.optim.AdamW, hardware="rtx-4090")
    assert "token_embedding.weight" not in problem._tables


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="allow has 'everything'; give words of tables"):
        pose(llama(), BATCH, optimizer=torch.optim.AdamW, hardware="rtx-4090", allow=["everything"])


def test_what_the_word_would_gain_is_told_and_the_word_takes_it() -> None:
    words = {
        "optimizer": torch.optim.AdamW,
        "hardware": slow_link(),
        "schedule": "in_backward",
        "device_memory": "88MiB",
    }
    without = lowtide.plan(llama(), BATCH, **words)
    assert all(group.weights is not Weights.HOST for group in without.plan.groups)
    assert without.with_tables_s is not None
    allowed = lowtide.plan(llama(), BATCH, allow=["tables"], **words)
    assert allowed.step_s <= without.with_tables_s * 1.01
    assert allowed.with_tables_s is None
    assert "token_embedding stays on the host" in allowed.words[0]


def slow_link() -> Hardware:
    """Where what travels bounds the step."""
    card = find_hardware("rtx-4090")
    assert card.rates is not None
    rates = replace(card.rates, to_device_bytes_per_s=2e8, to_host_bytes_per_s=2e8)
    return replace(card, measured=rates)
