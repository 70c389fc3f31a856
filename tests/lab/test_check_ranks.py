"""The check over ranks: ranks that train as one process does pass, and one that does otherwise is found or named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.errors import ConfigError, HardwareError, RankFailedError
from lowtide.lab.check import CheckReport
from lowtide.lab.check_ranks import ROUNDINGS, SHARES, Gap, RanksReport, run_check_on_ranks
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import OptimizerRecipe, PlanRecipe, Stories
from lowtide.planning.budget_plans import WarmUp
from lowtide.planning.plan import Collective, Schedule, Sharding, Weights
from lowtide.runtime.statistics.session_stats import CacheRow, PhaseSeconds, SessionStats

LEARNING = OptimizerRecipe(settings={"lr": 1e-3})
SMALL = Recipe(model="gpt-tiny", batch="2x16", device="cpu", steps=4, optimizer=LEARNING)
OTHERS = Recipe(model="tests.lab.rank_models:right", batch=None, device="cpu", steps=4, optimizer=LEARNING)


def test_a_sum_of_two_has_the_same_bits() -> None:
    words: list[str] = []
    report = run_check_on_ranks(SMALL, 2, words.append)
    assert report.passed
    assert report.runs.is_identical
    assert report.runs.plain_losses[-1] < report.runs.plain_losses[0]
    assert report.runs.stats.num_steps == 4
    assert report.loss.difference == report.weight.difference == 0
    assert any("plain run, step 4 of 4" in text for text in words)
    assert any("2 ranks, managed run, step 4 of 4" in text for text in words)
    assert not any("rounded otherwise" in text for text in words)


def test_one_rank_is_one_process() -> None:
    assert run_check_on_ranks(replace(SMALL, accumulation=2), 1).runs.is_identical


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": "4x16", "accumulation": 2, "max_grad_norm": 0.5},
        {"batch": "4x16", "dtype": "bfloat16", "plan": PlanRecipe(schedule=Schedule.IN_BACKWARD)},
        {"batch": "4x16", "precision": "fp32", "tolerance": 1e-6},
    ],
    ids=["accumulated and clipped", "bf16 in backward", "own kernels"],
)
def test_four_ranks_differ_by_the_order_of_the_sum(changes: dict[str, Any]) -> None:
    report = run_check_on_ranks(replace(SMALL, **changes), 4)
    assert report.passed, report.to_dict()
    assert not report.runs.is_identical
    assert report.weight.by_rounding > 0
    assert report.loss.difference <= SHARES[report.runs.recipe.dtype] * report.loss.size


def peaks(report: RanksReport) -> dict[str, int]:
    return {tier.tier: tier.peak_bytes for tier in report.runs.stats.tiers}


def test_weights_that_are_spread_train_as_in_one_process() -> None:
    whole = peaks(run_check_on_ranks(SMALL, 2))
    sharding = Sharding(shards=2)
    on_devices = run_check_on_ranks(replace(SMALL, plan=PlanRecipe(weights=Weights.SHARDED, sharding=sharding)), 2)
    assert on_devices.runs.is_identical
    assert peaks(on_devices)["host"] == 0 < whole["host"]
    one = Sharding(shards=2, collective=Collective.ONE_TO_ALL)
    on_hosts = run_check_on_ranks(replace(SMALL, plan=PlanRecipe(sharding=one)), 2)
    assert on_hosts.runs.is_identical
    assert peaks(on_hosts)["host"] < 0.75 * whole["host"]


def test_each_rank_has_the_random_numbers_and_statistics_of_its_part() -> None:
    assert run_check_on_ranks(OTHERS, 2).runs.is_identical
    assert run_check_on_ranks(replace(OTHERS, accumulation=2), 4).passed


def test_a_rank_that_computes_something_else_is_found() -> None:
    report = run_check_on_ranks(replace(OTHERS, model="tests.lab.rank_models:wrong"), 2)
    assert not report.passed
    assert report.runs.first_differing_step == 0
    assert report.loss.excess > 100


@pytest.mark.parametrize(
    ("model", "words"),
    [("raising", "rank 1 of 2: ValueError: on purpose"), ("killed", "rank 1 of 2: it ended with exit code -9")],
)
def test_a_rank_that_fails_is_named(model: str, words: str) -> None:
    with pytest.raises(RankFailedError, match=words):
        run_check_on_ranks(replace(OTHERS, model=f"tests.lab.rank_models:{model}"), 2)


def test_what_all_ranks_refuse_is_a_mistake_in_the_recipe() -> None:
    recipe = replace(OTHERS, model="tests.lab.rank_models:sparse", optimizer=OptimizerRecipe(name="sgd"))
    with pytest.raises(ConfigError, match=r"the gradient of table\.weight will be sparse"):
        run_check_on_ranks(recipe, 2)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "words"),
    [
        ({}, 0, "the number of ranks is 0; give 1 or more"),
        ({}, 3, "batch is 2x16 of gpt-tiny, whose 2 samples cannot be divided among 3 ranks; set a batch of 3 samples"),
        ({"batch": "6x16"}, 4, "set a batch of 8 samples, or give another number of ranks"),
        ({"batch": None}, 16, "batch is the default of gpt-tiny, whose 8 samples"),
        ({"plan": WarmUp(device_memory="16MiB")}, 2, "plan is a warm-up, .* all ranks need the same one"),
        (
            {"plan": PlanRecipe(sharding=Sharding(shards=4))},
            2,
            "spreads weights over 4 ranks, and there are 2: give as many",
        ),
        ({"plan": None}, 2, "give a plan"),
        ({"data": Stories()}, 2, "the recipe sets data"),
        ({"precision": "fp32"}, 2, "Set tolerance"),
    ],
)
def test_what_ranks_cannot_train_is_refused(changes: dict[str, Any], num_ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_check_on_ranks(replace(SMALL, **changes), num_ranks)


def test_one_device_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device is 'cuda:1', which is one device, and each rank has its own"):
        run_check_on_ranks(replace(SMALL, device="cuda:1"), 2)
    with pytest.raises(HardwareError, match="4 ranks need 4 CUDA devices, one each, and torch sees 2"):
        run_check_on_ranks(replace(SMALL, device="cuda", batch="4x16"), 4)


STATS = SessionStats(
    num_steps=2, moved=(), exposed_copy_s=0.0, seconds=PhaseSeconds(), chunks=(), cache=CacheRow(), tiers=()
)


def gap(difference: float, allowed: float = 1.0) -> Gap:
    return Gap(where="step 1", size=2.0, difference=difference, by_rounding=0.0, allowed=allowed)


def report(loss: Gap, *, tolerance: float = 0.0, parted: tuple[int, ...] = ()) -> RanksReport:
    runs = CheckReport(
        recipe=Recipe(model="gpt-tiny", tolerance=tolerance),
        device="cpu",
        plain_losses=(2.0,),
        managed_losses=(2.0 + loss.difference,),
        differing_weights=(),
        stats=STATS,
    )
    return RanksReport(num_ranks=2, runs=runs, loss=loss, weight=gap(0.0), parted=parted)


def test_what_passes() -> None:
    assert report(gap(0.0, allowed=0.0)).passed
    assert report(gap(1.0)).passed
    assert not report(gap(1.5)).passed
    assert report(gap(1.5), tolerance=2.0).passed, "the recipe accepts it"
    assert not report(gap(0.0), parted=(1,)).passed
    assert not report(gap(math.inf)).passed
    assert not report(gap(math.inf, allowed=math.inf)).passed
    assert not report(gap(1.0, allowed=math.nan)).passed
    assert report(gap(0.0, allowed=math.nan)).passed, "the same bits, which are no number"
    assert (gap(0.5).excess, gap(0.0, allowed=0.0).excess, gap(0.5, allowed=0.0).excess) == (0.5, 0.0, math.inf)


def test_the_record_is_whole() -> None:
    record = json.loads(json.dumps(report(gap(math.inf), tolerance=0.5, parted=(1,)).to_dict(), allow_nan=False))
    assert record["schema"] == "lowtide.check-ranks/1"
    assert (record["passed"], record["num_ranks"], record["parted"]) == (False, 2, [1])
    assert record["loss"] == {"where": "step 1", "size": 2.0, "difference": "inf", "by_rounding": 0.0, "allowed": 1.0}
    assert (
        f"1e-05 of each loss and of each tensor's norm, and {ROUNDINGS} times what other last bits"
        in record["tolerance"]
    )
    assert "or 0.5 in each loss and weight, as the recipe says" in record["tolerance"]
