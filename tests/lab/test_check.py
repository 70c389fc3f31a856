"""The check itself: managed runs that are the same as plain ones pass, a run with one wrong weight does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError, HardwareError, LowtideError
from lowtide.lab import check
from lowtide.lab.check import CheckReport, TensorDifference, compare_tensors, run_check
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.lab.recipe_file import FOLDER, read_recipe
from lowtide.lab.recipe_parts import OptimizerRecipe, PlanRecipe, Stories, plan_of
from lowtide.lab.training import find_device, optimizer_over_masters
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.runtime.statistics.session_stats import CacheRow, PhaseSeconds, SessionStats
from lowtide.units import parse_bytes

RECIPES = sorted((FOLDER / "check").glob("*.yaml"))
SMALL = Recipe(model="gpt-tiny", batch="2x16", device="cpu", steps=3)

Manage = Callable[..., Any]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_pass_and_keep_their_budgets(path: Path) -> None:
    # Fewer steps than the command runs: the emulated device is slow.
    recipe = replace(read_recipe(path), device="cpu", steps=6)
    words: list[str] = []
    report = run_check(recipe, words.append)
    assert report.first_difference is None
    assert report.passed
    assert len(report.plain_losses) == recipe.steps
    assert report.plain_losses[-1] < report.plain_losses[0]
    assert report.stats.is_emulated
    assert report.stats.num_steps >= recipe.steps
    assert report.stats.moved_bytes() > 0
    device = next(tier for tier in report.stats.tiers if tier.tier == "device")
    assert device.is_within_budget
    assert recipe.plan.device_memory is not None
    assert device.budget_bytes == parse_bytes(recipe.plan.device_memory)
    assert any(f"plain run, step {recipe.steps} of {recipe.steps}" in text for text in words)
    assert any(f"managed run, step {recipe.steps} of {recipe.steps}" in text for text in words)


def test_a_resident_run_is_the_same_too() -> None:
    assert run_check(replace(SMALL, plan=PlanRecipe(weights=Weights.RESIDENT, update=Site.DEVICE))).is_identical


@pytest.mark.parametrize(
    "plan",
    [StaticPartition(share=0.6, device_memory="16MiB"), WarmUp(device_memory="16MiB")],
    ids=["static", "warm-up"],
)
def test_a_plan_that_makes_itself_is_the_same_too(plan: StaticPartition | WarmUp) -> None:
    assert run_check(replace(SMALL, plan=plan)).is_identical


def with_a_wrong_weight(real: Manage, amount: float) -> Manage:
    def wrong(model: torch.nn.Module, *arguments: Any, **settings: Any) -> Any:
        with torch.no_grad():
            model.get_parameter("layers.2.mlp.up.weight")[0, 0] += amount
        return real(model, *arguments, **settings)

    return wrong


def test_one_wrong_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "manage", with_a_wrong_weight(check.manage, 0.25))
    report = run_check(SMALL)
    assert not report.passed
    assert report.first_differing_step == 0
    assert 0 < report.max_loss_difference < 0.1
    assert 0.2 < report.max_weight_difference < 0.3
    assert "layers.2.mlp.up.weight" in {tensor.name for tensor in report.differing_weights}
    assert run_check(replace(SMALL, tolerance=0.5)).passed


def test_settings_are_put_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenOffError(Exception):
        pass

    def stop(*_: Any, **__: Any) -> Any:
        assert not torch.backends.mkldnn.enabled
        raise BrokenOffError

    before = torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(check, "manage", stop)
    with pytest.raises(BrokenOffError):
        run_check(replace(SMALL, dtype="bfloat16"))
    assert (torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()) == before


def test_a_run_that_diverges_is_no_reference() -> None:
    optimizer = OptimizerRecipe(name="sgd", settings={"lr": 1e30})
    with pytest.raises(ConfigError, match=r"loss of the plain run is \S+ at step \d, so that there is nothing"):
        run_check(replace(SMALL, optimizer=optimizer))


def test_a_budget_that_cannot_hold_the_model_is_refused() -> None:
    with pytest.raises(LowtideError, match="KiB"):
        run_check(replace(SMALL, plan=PlanRecipe(device_memory="64KiB")))


def test_a_plan_has_what_the_recipe_says() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))
    recipe = PlanRecipe(
        weights={"*": Weights.STREAMED, "0": Weights.RESIDENT},
        update=Site.DEVICE,
        schedule=Schedule.IN_BACKWARD,
        prefetch_depth=3,
        device_memory="1MiB",
        host_memory="2MiB",
        window_memory="512KiB",
    )
    plan = plan_of(recipe, model)
    assert {group.name: group.weights for group in plan.groups} == {"0": Weights.RESIDENT, "1": Weights.STREAMED}
    assert {site for group in plan.groups for site in group.sites} == {Site.DEVICE}
    assert (plan.schedule, plan.prefetch_depth) == (Schedule.IN_BACKWARD, 3)
    assert (plan.cached_buffers, plan.defragment_every) == (2, 0)
    tidy = plan_of(replace(recipe, cached_buffers=5, defragment_every=7), model)
    assert (tidy.cached_buffers, tidy.defragment_every) == (5, 7)
    budgets = plan.budgets
    assert (budgets.device_bytes, budgets.host_bytes, budgets.window_bytes) == (2**20, 2**21, 2**19)


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="'gpu' is no device; use cpu, cuda"):
        find_device("gpu")
    with pytest.raises(ConfigError, match="not on 'meta'"):
        find_device("meta")
    with pytest.raises(HardwareError, match=f"torch sees {torch.cuda.device_count()} CUDA devices"):
        find_device("cuda:99")


@pytest.mark.parametrize(
    "changes",
    [{"compile": CompileRecipe()}, {"data": Stories()}, {"plan": None}],
    ids=["compile", "data", "plan"],
)
def test_what_a_check_would_leave_out_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        run_check(replace(Recipe(model="gpt-tiny", device="cpu"), **changes))
    assert next(iter(changes)) in str(caught.value)


def test_settings_of_the_model_are_kept() -> None:
    recipe = Recipe(model="deep-one-tiny", device="cpu", steps=1, batch="2x16", model_settings={"vocab_size": 99})
    assert run_check(recipe).passed
    with pytest.raises(ConfigError, match="did you mean 'norm'"):
        run_check(replace(recipe, model_settings={"nrom": "fused"}))


# The gradient of a key's bias is zero but for rounding, 1e-11, from which Adam with its own eps makes steps of any size up to
# the rate: they would hide what the kernels do.
LEARNING = OptimizerRecipe(settings={"lr": 1e-3, "eps": 1e-6})


@pytest.mark.parametrize(
    ("precision", "dtype", "moments", "tolerance"),
    [
        ("fp32", "float32", "fp32", 1e-6),
        ("fp32", "float32", "bf16", 1e-3),
        ("bf16 exact", "bfloat16", "fp32", 0.01),
        ("bf16 exact", "bfloat16", "8bit", 0.01),
        ("fp16 exact", "float16", "fp32", 0.002),
    ],
)
@pytest.mark.parametrize(
    "plan",
    [PlanRecipe(), PlanRecipe(update=Site.PAGED, schedule=Schedule.IN_BACKWARD), PlanRecipe(update=Site.DEVICE)],
    ids=["host", "paged in backward", "device"],
)
def test_own_kernels_agree_with_torchs_optimizer(
    precision: str, dtype: Any, moments: Any, tolerance: float, plan: PlanRecipe
) -> None:
    recipe = replace(
        SMALL, precision=precision, dtype=dtype, moments=moments, tolerance=tolerance, plan=plan, optimizer=LEARNING
    )
    report = run_check(recipe)
    assert report.passed, report.first_difference
    assert report.plain_losses[0] == report.managed_losses[0], "the first loss is before any update"
    assert report.plain_losses[-1] < report.plain_losses[0]


def test_own_kernels_with_a_wrong_weight_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "manage", with_a_wrong_weight(check.manage, 0.25))
    report = run_check(replace(SMALL, precision="bf16 exact", dtype="bfloat16", tolerance=0.01, optimizer=LEARNING))
    assert not report.passed
    assert report.max_weight_difference > 0.1


def test_a_precision_without_a_tolerance_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision is 'fp32': .* agree within rounding.* Set tolerance") as caught:
        run_check(replace(SMALL, precision="fp32"))
    assert caught.value.key == "tolerance"


def test_masters_keep_what_their_weights_cannot_hold() -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = optimizer_over_masters(OptimizerRecipe(name="sgd", settings={"lr": 1e-3}), model)
    for _ in range(8):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.grad is None
    # Each step alone is less than half a unit in the last place of 1; eight of them are two units.
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.992))


STATS = SessionStats(
    num_steps=2, moved=(), exposed_copy_s=0.0, seconds=PhaseSeconds(), chunks=(), cache=CacheRow(), tiers=()
)


def report(
    plain: tuple[float, ...] = (2.0, 1.0),
    managed: tuple[float, ...] = (2.0, 1.0),
    *,
    weights: tuple[TensorDifference, ...] = (),
    tolerance: float = 0.0,
) -> CheckReport:
    return CheckReport(
        recipe=Recipe(model="gpt-tiny", tolerance=tolerance),
        device="cpu",
        plain_losses=plain,
        managed_losses=managed,
        differing_weights=weights,
        stats=STATS,
    )


def test_identical_runs_pass() -> None:
    found = report()
    assert found.is_identical
    assert found.passed
    assert found.first_difference is None
    assert (found.max_loss_difference, found.max_weight_difference) == (0.0, 0.0)


def test_a_difference_in_a_loss() -> None:
    found = report(managed=(2.0, 1.25))
    assert not found.passed
    assert found.first_differing_step == 1
    assert found.first_difference == "the loss of step 2: 1.0 against 1.25"
    assert found.max_loss_difference == 0.25
    assert report(managed=(2.0, 1.25), tolerance=0.25).passed
    assert not report(managed=(2.0, 1.25), tolerance=0.2).passed


def test_a_difference_in_a_weight() -> None:
    weights = (TensorDifference(name="a", max_difference=1e-3), TensorDifference(name="b", max_difference=1e-2))
    found = report(weights=weights)
    assert not found.passed
    assert found.first_difference == "'a' after the last step, by 0.001"
    assert found.max_weight_difference == 1e-2
    assert report(weights=weights, tolerance=1e-2).passed
    assert not report(weights=weights, tolerance=5e-3).passed


def test_other_bits_of_the_same_value_fail_a_check_for_identity() -> None:
    zeros = (TensorDifference(name="a", max_difference=0.0),)
    assert not report(weights=zeros).passed
    assert report(weights=zeros, tolerance=1e-30).passed


def test_a_loss_that_is_not_a_number_never_passes() -> None:
    found = report(managed=(2.0, math.nan), tolerance=1e9)
    assert not found.passed
    assert found.max_loss_difference == math.inf
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["managed_losses"] == [2.0, "nan"]
    assert record["max_loss_difference"] == "inf"


def test_the_record_is_whole() -> None:
    weights = (TensorDifference(name="a", max_difference=0.5),)
    record = json.loads(json.dumps(report(weights=weights, tolerance=0.5).to_dict(), allow_nan=False))
    assert record["schema"] == "lowtide.check/1"
    assert (record["passed"], record["identical"], record["tolerance"]) == (True, False, 0.5)
    assert record["differing_weights"] == [{"name": "a", "max_difference": 0.5}]
    assert record["plain_losses"] == record["managed_losses"] == [2.0, 1.0]
    assert record["recipe"]["model"] == "gpt-tiny"
    assert SessionStats.from_dict(record["stats"]) == STATS


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.zeros(2), torch.tensor([math.nan, 1.0])
    assert compare_tensors({"a": nan, "n": torch.tensor(3)}, {"a": nan.clone(), "n": torch.tensor(3)}) == ()
    assert compare_tensors({"a": zero}, {"a": -zero}) == (TensorDifference(name="a", max_difference=0.0),)
    assert compare_tensors({"a": nan}, {"a": torch.tensor([math.nan, 3.0])})[0].max_difference == 2.0
    assert compare_tensors({"a": nan}, {"a": torch.tensor([0.0, 1.0])})[0].max_difference == math.inf
    infinite = torch.tensor([math.inf])
    assert compare_tensors({"a": infinite}, {"a": torch.tensor([1.0])})[0].max_difference == math.inf


@pytest.mark.parametrize("other", [{"b": torch.zeros(2)}, {"a": torch.zeros(3)}, {"a": torch.zeros(2).double()}, {}])
def test_other_names_shapes_and_dtypes_differ_without_bound(other: dict[str, torch.Tensor]) -> None:
    found = compare_tensors({"a": torch.zeros(2)}, other)
    assert found[0] == TensorDifference(name="a", max_difference=math.inf)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.integers(0, 7), st.floats(-1, 1, width=32))
def test_the_largest_difference_is_found(values: list[float], index: int, change: float) -> None:
    first = torch.tensor(values)
    second = first.clone()
    second[index % len(values)] += change
    expected = (first.double() - second.double()).abs().max().item()
    found = compare_tensors({"a": first}, {"a": second})
    assert [tensor.max_difference for tensor in found] == ([expected] if expected or found else [])
    assert bool(found) or torch.equal(first, second)
