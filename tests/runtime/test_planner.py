"""`plan` and `prepare`: what is promised holds in a run on the emulated device, and bad input is one sentence."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.activations.policy import policy_of
from lowtide.errors import ConfigError, PlanError
from lowtide.hardware import UpdateKind, find_hardware
from lowtide.hardware.rates import HostRates
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.models import resolve_model
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.optim.update_types import numerics_of
from lowtide.planning.placement import assemble
from lowtide.planning.plan import Budgets, Schedule, plan_from_json, plan_to_json
from lowtide.planning.search import Limits, Search, Shape
from lowtide.planning.simulator import lane_rates
from lowtide.planning.step_costs import probe_policies, read_costs
from lowtide.runtime.plan_problem import _Gaps
from lowtide.runtime.prediction.trace import update_kind
from lowtide.units import MiB
from tests.hardware.samples import HOST, calibration

CONFIG = GPTConfig(vocab_size=256, context_length=64, num_layers=6, hidden_size=128, num_heads=4)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, num_steps: int = 4) -> list[float]:
    found = []
    for _ in range(num_steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], int]:
    """Losses of plain torch, and the peak that a trace predicts for it."""
    model = gpt()
    batch = tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peak = lowtide.trace(copy.deepcopy(model), batch, optimizer=torch.optim.AdamW, hardware="cpu").peak_bytes
    return losses(model, optimizer, batch), peak


@pytest.mark.parametrize("share", [0.45, 0.7, 1.5])
def test_a_prepared_run_has_the_same_losses_inside_the_budget(plain: tuple[list[float], int], share: float) -> None:
    expected, peak = plain
    budget = int(peak * share)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokens()
    with lowtide.prepare(model, optimizer, batch, device="cpu", device_memory=budget) as session:
        found = losses(model, optimizer, batch)
        assert session.plan.budgets.device_bytes == budget
        assert session.stats().tiers[0].peak_bytes <= budget
    assert found == expected


def test_the_replayed_peak_is_inside_each_budget_and_more_memory_is_not_slower() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("8x128")
    steps = []
    for budget in ("140MiB", "200MiB", "400MiB"):
        found = lowtide.plan(
            model, batch, optimizer=torch.optim.AdamW, device_memory=budget, hardware="h200", precision="bf16 exact"
        )
        assert found.trace.peak_reserved_bytes <= int(budget.removesuffix("MiB")) * MiB
        assert found.trace.host_bytes is not None
        assert plan_from_json(plan_to_json(found.plan)) == found.plan
        steps.append(found.step_s)
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(steps))


def test_what_was_planned_is_told_in_words() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    found = lowtide.plan(model, batch, optimizer=torch.optim.AdamW, hardware="rtx-4090")
    assert found.words == (
        "all weights stay on the device",
        "all groups are updated on the device, deferred",
        "activations: all blocks keep",
    )
    assert found.num_tokens == 128
    assert found.tokens_per_s == pytest.approx(128 / found.step_s)
    assert "a step in" in repr(found)


def test_a_model_without_blocks_is_planned_too() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16))
    batch = torch.zeros(8, 256)
    found = lowtide.plan(
        model,
        batch,
        optimizer=torch.optim.SGD,
        loss=lambda m, x: m(x).sum(),
        device_memory="80MiB",
        hardware="h200",
        schedule="in_backward",
    )
    assert found.plan.schedule is Schedule.IN_BACKWARD
    assert found.num_tokens == 0
    assert found.tokens_per_s is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"device_memory": "0GiB"}, "device_memory"),
        ({"device_memory": "-3GiB"}, "device_memory: '-3GiB' is not a size"),
        ({"host_memory": "0"}, "host_memory is '0'; give a size such as '24GiB'"),
        ({"sites_of": lowtide.make_plan(nn.Linear(2, 2))}, "sites_of is a plan for another model"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0; give a norm above 0, or leave it out"),
        ({"moments": "8bit"}, "moments='8bit' is for updates through Lowtide's own kernels; give precision="),
        ({"device_memory": "24"}, "device_memory is '24', which has no unit; write '24GiB', or MiB"),
        ({"host_memory": "12.5"}, "host_memory is '12.5', which has no unit"),
        ({"device_memory": "many"}, "device_memory"),
        ({"device_memory": "200GiB"}, "device_memory is 200.0 GiB, and .* has .*; give at most that"),
        ({"hardware": "rtx-9999"}, "rtx-9999"),
        ({"schedule": "in_backward", "max_grad_norm": 1.0}, "max_grad_norm=1.0 needs all gradients"),
        ({"schedule": "sometimes"}, "schedule is 'sometimes'"),
        ({"policies": ["forget"]}, "policies has 'forget'"),
        ({"hardware": "cpu"}, "the memory of cpu is not known; give device_memory"),
    ],
)
def test_bad_input_is_one_sentence(words: dict[str, Any], message: str) -> None:
    source = resolve_model("gpt-tiny")
    given = {"hardware": "rtx-4090", **words}
    with pytest.raises(ValueError, match=message):
        lowtide.plan(source.build(None), source.make_batch("2x64"), optimizer=torch.optim.AdamW, **given)


def test_where_the_host_is_short_its_floor_is_named() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    words: dict[str, Any] = {
        "optimizer": torch.optim.AdamW,
        "loss": lambda m, x: m(x).sum(),
        "hardware": "cpu",
        "device_memory": "12MiB",
    }
    with pytest.raises(PlanError, match="no plan fits 12.0 MiB of device memory and 1.0 MiB of host memory") as caught:
        lowtide.plan(model, torch.ones(4, 512), host_memory="1MiB", **words)
    # Weights, gradients and two moments in fp32.
    assert caught.value.needed_bytes == pytest.approx(4 * sum(each.nbytes for each in model.parameters()), rel=0.1)
    found = lowtide.plan(model, torch.ones(4, 512), host_memory=caught.value.needed_bytes, **words)
    assert found.trace.host_bytes is not None
    assert found.trace.host_bytes <= caught.value.needed_bytes


def test_less_than_the_floor_names_it() -> None:
    source = resolve_model("gpt-tiny")
    with pytest.raises(PlanError, match="no plan fits .* of device memory") as caught:
        lowtide.plan(
            source.build(torch.bfloat16), source.make_batch("8x128"), optimizer=torch.optim.AdamW, device_memory="70MiB"
        )
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > 70 * MiB


def test_an_emulated_device_needs_a_budget() -> None:
    model = gpt()
    with pytest.raises(ConfigError, match="an emulated device has no size of its own; give device_memory"):
        lowtide.prepare(model, torch.optim.AdamW(model.parameters()), tokens(), device="cpu")


class Untraceable(nn.Module):
    """Reads a value that a trace does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden * (2.0 if hidden.sum().item() > 0 else 1.0)).sum()


def test_what_cannot_be_traced_is_observed_instead() -> None:
    torch.manual_seed(0)
    model = Untraceable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(4, 64)
    with pytest.warns(UserWarning, match="the step could not be traced .*one observed training step"):
        session = lowtide.prepare(model, optimizer, batch, loss=lambda m, x: m(x), device="cpu", device_memory="1MiB")
    with session:
        assert session.is_warming_up
        model(batch).backward()
        optimizer.step()


@pytest.mark.gpu
def test_a_prepared_run_on_a_gpu_stays_inside_what_was_predicted() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=8192, context_length=256, num_layers=16, hidden_size=1024, num_heads=16)
    model = GPT(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 8192, (8, 256), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    budget = 1200 * MiB
    with lowtide.prepare(model, optimizer, batch, device_memory=budget, precision="bf16 exact") as session:
        torch.cuda.reset_peak_memory_stats()
        found = losses(model, optimizer, batch, num_steps=3)
        assert torch.cuda.max_memory_reserved() <= budget
        assert session.plan.budgets.device_bytes == budget
    assert found[-1] < found[0]


@pytest.mark.parametrize("is_measured", [True, False])
def test_prepare_predicts_with_what_this_machine_reached(monkeypatch: pytest.MonkeyPatch, is_measured: bool) -> None:
    found = calibration(has_gpu=False) if is_measured else None
    monkeypatch.setattr("lowtide.hardware.known.find_calibration", lambda device: found)
    hosts: list[HostRates] = []

    def plan_of(*arguments: Any, **settings: Any) -> lowtide.PlannedStep:
        hosts.append(settings["hardware"].host)
        return lowtide.plan(*arguments, **settings)

    monkeypatch.setattr("lowtide.runtime.planner.plan", plan_of)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(4, 64)
    lowtide.prepare(model, optimizer, batch, loss=lambda m, x: m(x).sum(), device="cpu", device_memory="1MiB").close()
    assert hosts == [HOST if is_measured else HostRates()]


@pytest.mark.parametrize(
    ("precision", "moments", "kind"),
    [
        (None, "fp32", UpdateKind.TORCH_FUSED),
        ("bf16 exact", "fp32", UpdateKind.EXACT),
        ("bf16 stochastic", "fp32", UpdateKind.EXACT),
        ("bf16 exact", "8bit", UpdateKind.EIGHT_BIT),
        ("fp32", "fp32", UpdateKind.FP32),
    ],
)
def test_an_update_has_the_rate_of_its_kind(precision: str | None, moments: str, kind: UpdateKind) -> None:
    numerics = None if precision is None else numerics_of(precision, moments)[1]
    assert update_kind(numerics, find_hardware("h200")) is kind


@pytest.mark.gpu
def test_the_hardware_of_a_gpu_is_known_by_its_name() -> None:
    from lowtide.hardware import hardware_of

    found = hardware_of(torch.device("cuda"))
    assert found.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert found.compute_capability == torch.cuda.get_device_capability()


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_the_estimate_of_device_bytes_is_that_of_the_trace(schedule: str) -> None:
    """What waits for its copy to the host is counted: the embedding's gradient, and in the next step too."""
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    layout = lay_out(find_groups(model))
    words: dict[str, Any] = {"optimizer": torch.optim.AdamW, "precision": "bf16 exact", "hardware": "h200"}
    probes = []
    for policies in probe_policies(layout):
        plan = lowtide.make_plan(layout, update="host", schedule="in_backward", activations=policies)
        probes.append((policies, lowtide.trace(model, batch, plan=plan, **words)))
    costs = read_costs(layout, probes, {group.name: 5 * group.nbytes for group in layout.groups})
    search = Search(costs, layout, lane_rates(find_hardware("h200"), UpdateKind.EXACT))
    limits = Limits(device_bytes=1 << 50, host_bytes=1 << 50, pinned_bytes=1 << 50, schedule=Schedule(schedule))
    num_groups = len(layout.groups)
    for num_resident, num_device in (
        (0, 0),
        (0, 2),
        (2, 2),
        (num_groups, 0),
        (2, num_groups),
        (num_groups, num_groups),
    ):
        shape = Shape(num_resident=num_resident, num_device=num_device, small="recompute", fast="keep", num_fast=1)
        placement = search.placement(shape, limits)
        plan = assemble(
            layout,
            weights={name: choice.weights for name, choice in placement.groups.items()},
            sites={chunk.name: placement.groups[chunk.group].site for chunk in layout.chunks},
            schedule=limits.schedule,
            activations={name: policy_of(choice.policy) for name, choice in placement.groups.items()},
            budgets=Budgets(),
        )
        traced = lowtide.trace(model, batch, plan=plan, **words)
        assert search.device_bytes(placement) == pytest.approx(traced.peak_bytes, rel=0.03), (num_resident, num_device)


def test_gaps_are_bracketed_by_replays() -> None:
    gaps = _Gaps(share=0.04)
    gaps.was_too_little(20, 100)  # half of the way to what it held
    assert gaps.share == pytest.approx(0.12)
    gaps.was_too_little(24, 100)  # all of it
    assert gaps.share == pytest.approx(0.24)
    gaps.was_enough(0.1)
    assert gaps.share == pytest.approx(0.18)
    gaps.was_too_little(30, 100)
    assert gaps.share == pytest.approx(0.21)
    roomy = _Gaps(share=0.04)
    roomy.was_enough(0.03)
    assert roomy.share == pytest.approx(0.01)


def test_another_plan_is_simulated_with_the_same_costs() -> None:
    source = resolve_model("gpt-tiny")
    model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
    found = lowtide.plan(
        model, batch, optimizer=torch.optim.AdamW, device_memory="200MiB", hardware="rtx-4090", precision="bf16 exact"
    )
    assert found.simulate(found.plan).step_s == found.step_s
    assert found.simulate(lowtide.make_plan(model)).step_s > found.step_s
