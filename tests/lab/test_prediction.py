"""Predictions of recipes against what was measured, and what is not predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import config
from lowtide.lab.preflight import UnpredictedError, predict
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.lab.recipe_parts import OptimizerRecipe, PlanRecipe, RandomInputs
from lowtide.lab.record import EVALUATION, RunRecord, read_record
from lowtide.models import resolve_model
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.plan import Schedule, Site, Weights

RECORDS = sorted((Path(__file__).resolve().parents[2] / "benchmarks/results/lab").glob("*.json"))
TOLERANCE = 0.01
"""A share of the measured peak; all but `streamed` are nearer than 4 KiB."""


def by_step() -> dict[str, list[RunRecord]]:
    """Records whose steps are the same, whatever seed, number and evaluation: one prediction is for all of them."""
    found: dict[str, list[RunRecord]] = {}
    for record in map(read_record, RECORDS):
        recipe = config.from_plain(Recipe, record.recipe)
        alike = replace(recipe, seed=0, steps=1, evaluation=None, data=RandomInputs(), about="", published=None)
        found.setdefault(repr(alike), []).append(record)  # a recipe has mappings in it, which have no hash
    return {f"{number}_{records[0].name.rpartition('/')[2]}": records for number, records in enumerate(found.values())}


@pytest.mark.slow
@pytest.mark.parametrize("records", by_step().values(), ids=by_step())
def test_measured_peaks_are_predicted(records: list[RunRecord]) -> None:
    recipe = config.from_plain(Recipe, records[0].recipe)
    if recipe.compile is not None:
        pytest.skip("compiled code is not predicted")
    predicted = predict(recipe, hardware="h200", say=lambda _: None)
    for record in records:
        assert record.memory is not None
        # The peak of training: an evaluation, where a run had one, is not predicted.
        assert predicted.peak_bytes == pytest.approx(record.memory.training_peak_bytes, rel=TOLERANCE)
        by_phase = {phase: peak for phase, peak in record.memory.by_phase.items() if phase != EVALUATION}
        # The loss is made within what a run calls its forward.
        assert predicted.peak_phase.replace("loss", "forward") == max(by_phase, key=lambda phase: by_phase[phase])


TINY = Recipe(model="deep-one-tiny", batch="2x32", plan=PlanRecipe(weights=Weights.RESIDENT, update=Site.DEVICE))


def peak(**words: object) -> int:
    plan = replace(PlanRecipe(chunk_memory="1MiB"), **words)  # type: ignore[arg-type]  # fields of it
    return predict(replace(TINY, plan=plan), hardware="h200", say=lambda _: None).peak_bytes


def test_updates_on_the_host_take_state_off_the_device() -> None:
    num_parameters = sum(parameter.numel() for parameter in resolve_model(TINY.model).build(None).parameters())
    on_device, on_host = peak(weights=Weights.RESIDENT, update=Site.DEVICE), peak(weights=Weights.RESIDENT)
    assert on_device - on_host > 2 * 4 * num_parameters  # AdamW's, and most of the gradients


def test_a_budget_that_is_too_small_does_not_hide_the_peak() -> None:
    said: list[str] = []
    plan = PlanRecipe(update=Site.DEVICE, schedule=Schedule.IN_BACKWARD, chunk_memory="1MiB", device_memory="12MiB")
    found = predict(replace(TINY, plan=plan), hardware="h200", say=said.append)
    assert found.peak_bytes == peak(update=Site.DEVICE, schedule=Schedule.IN_BACKWARD)
    assert "the budget does not hold the step; tracing it without" in said


@pytest.mark.parametrize("fused", [False, True])
def test_a_static_partition_is_predicted_as_the_plan_that_it_makes(fused: bool) -> None:
    """With room for all it is a plan with everything resident; with little, one that streams."""
    settings = {"optimizer": OptimizerRecipe(settings={"fused": True} if fused else {})}
    ample, tight = (
        predict(
            replace(TINY, **settings, plan=StaticPartition(share=0.9, device_memory=memory)),
            hardware="h200",
            say=lambda _: None,
        )
        for memory in (None, "6MiB")
    )
    by_hand = predict(replace(TINY, **settings), hardware="h200", say=lambda _: None)
    assert (ample.peak_bytes, ample.at_peak) == (by_hand.peak_bytes, by_hand.at_peak)
    assert tight.at_peak["weights"] < ample.at_peak["weights"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (replace(TINY, compile=CompileRecipe()), "compiled code is not predicted"),
        (
            replace(TINY, precision="fp32", plan=PlanRecipe(update=Site.PAGED)),
            "state that visits the device is not predicted",
        ),
        (
            replace(TINY, plan=WarmUp()),
            "a warm-up's plan is made from the first step of the run, and is not known before",
        ),
    ],
)
def test_what_is_not_predicted(recipe: Recipe, message: str) -> None:
    with pytest.raises(UnpredictedError, match=message):
        predict(recipe, hardware="h200", say=lambda _: None)
