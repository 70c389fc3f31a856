"""Recipes: what a file may say, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.config import from_plain, to_plain, write_config
from lowtide.errors import ConfigError
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import FOLDER, read_recipe
from lowtide.lab.recipe_parts import OPTIMIZERS, Constant, EvaluationRecipe, LinearWarmup, OptimizerRecipe, PlanRecipe
from lowtide.lab.records import flat_settings
from lowtide.planning.budget_plans import MonitorMode, StaticPartition, WarmUp
from lowtide.planning.plan import Schedule, Site, Weights


def read(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return read_recipe(file, list(overrides))


def test_a_whole_recipe(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        """
model: gpt-tiny
batch: 2x64
dtype: bfloat16
device: cpu
steps: 12
seed: 3
accumulation: 2
max_grad_norm: 1
optimizer:
  name: adamw
  settings: {lr: 1e-3, betas: [0.9, 0.95], weight_decay: 0.1, foreach: false}
  decay_matrices_only: true
scheduler: {kind: linear-warmup, warmup_steps: 4}
plan:
  weights: {"*": streamed, head: resident}
  update: 0.25
  prefetch_depth: 2
  device_memory: 14GiB
  window_memory: 1048576
tolerance: 1e-6
""",
    )
    assert recipe == Recipe(
        model="gpt-tiny",
        batch="2x64",
        dtype="bfloat16",
        device="cpu",
        steps=12,
        seed=3,
        accumulation=2,
        max_grad_norm=1.0,
        optimizer=OptimizerRecipe(
            name="adamw",
            settings={"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": False},
            decay_matrices_only=True,
        ),
        scheduler=LinearWarmup(warmup_steps=4),
        plan=PlanRecipe(
            weights={"*": Weights.STREAMED, "head": Weights.RESIDENT},
            update=0.25,
            prefetch_depth=2,
            device_memory="14GiB",
            window_memory=1048576,
        ),
        tolerance=1e-6,
    )
    assert recipe.torch_dtype is torch.bfloat16


def test_only_the_model_is_needed(tmp_path: Path) -> None:
    recipe = read(tmp_path, "model: gpt-tiny\n")
    assert recipe.tolerance == 0.0
    assert recipe.scheduler == Constant()
    assert recipe.plan == PlanRecipe(weights=Weights.STREAMED, update=Site.HOST, schedule=Schedule.DEFERRED)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        (
            "{kind: static-partition, share: 0.5, device_memory: 64MiB, activations: {'layers.*': recompute}}",
            StaticPartition(share=0.5, device_memory="64MiB", activations={"layers.*": "recompute"}),
        ),
        (
            "{kind: warm-up, warm_up_share: 0.2, monitor: boundaries, schedule: in_backward, cached_buffers: 0}",
            WarmUp(warm_up_share=0.2, monitor=MonitorMode.BOUNDARIES, schedule=Schedule.IN_BACKWARD, cached_buffers=0),
        ),
        ("{kind: by-hand, update: device}", PlanRecipe(update=Site.DEVICE)),
        ("{cached_buffers: 0, defragment_every: 3}", PlanRecipe(cached_buffers=0, defragment_every=3)),
    ],
)
def test_plans_of_each_kind(tmp_path: Path, text: str, plan: object) -> None:
    recipe = read(tmp_path, f"{{model: gpt-tiny, plan: {text}}}")
    assert recipe == Recipe(model="gpt-tiny", plan=plan)
    write_config(recipe, tmp_path / "again.yaml")
    assert read_recipe(tmp_path / "again.yaml") == recipe


def test_the_plans_of_the_documentation_are_plans(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
    block = page.partition("### Plans in recipes")[2].partition("```yaml\n")[2].partition("```")[0]
    kinds = [type(read(tmp_path, f"model: gpt-tiny\n{line}\n").plan) for line in block.splitlines()]
    assert kinds == [PlanRecipe, StaticPartition, WarmUp]


def test_a_plan_by_hand_is_the_configuration_that_it_was() -> None:
    """Records from before the kinds and the cache had names are runs of the same configuration."""
    new = flat_settings(to_plain(Recipe(model="gpt-tiny")))
    assert {key.partition("plan.")[2] for key in new if key.startswith("plan.")} == {
        *("weights", "update", "schedule", "prefetch_depth")
    }


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_type_has_one_name_however_it_is_written(tmp_path: Path, word: str) -> None:
    recipe = read(tmp_path, f"{{model: gpt-tiny, dtype: {word}}}")
    assert recipe == read(tmp_path, "model: gpt-tiny\n", f"dtype={word}") == Recipe(model="gpt-tiny", dtype="bfloat16")
    assert to_plain(recipe)["dtype"] == "bfloat16"


def test_written_and_read_back(tmp_path: Path) -> None:
    recipe = Recipe(
        model="gpt-tiny",
        optimizer=OptimizerRecipe(name="sgd", settings={"lr": 0.1, "momentum": 0.9, "foreach": None}),
        scheduler=LinearWarmup(warmup_steps=2),
        plan=PlanRecipe(update={"*": Site.DEVICE}, schedule=Schedule.IN_BACKWARD),
    )
    write_config(recipe, tmp_path / "again.yaml")
    assert read_recipe(tmp_path / "again.yaml") == recipe
    assert to_plain(recipe)["scheduler"] == {"kind": "linear-warmup", "warmup_steps": 2}


def test_overrides(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        "model: gpt-tiny\n",
        "plan.update=device",
        "plan.weights=resident",
        "optimizer.settings.lr=1e-4",
        "scheduler.kind=linear-warmup",
        "scheduler.warmup_steps=3",
    )
    assert recipe.plan.update is Site.DEVICE
    assert recipe.plan.weights is Weights.RESIDENT
    assert recipe.optimizer.settings == {"lr": 1e-4}
    assert recipe.scheduler == LinearWarmup(warmup_steps=3)
    assert read(tmp_path, "model: gpt-tiny\n", "plan.update=0.5").plan.update == 0.5
    evaluated = read(tmp_path, "{model: gpt-tiny, evaluation: {samples: 9}}", "evaluation.after=[8, 12]")
    assert evaluated.evaluation == EvaluationRecipe(samples=9, after=(8, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: 2x64", "missing key 'model'"),
        ("{model: a, bach: 2x64}", "unknown key 'bach'; did you mean 'batch'"),
        ("{model: a, plan: {weigths: resident}}", "unknown key 'plan.weigths'; did you mean 'plan.weights'"),
        ("{model: a, plan: {weights: {head: residnt}}}", "did you mean 'resident'"),
        ("{model: a, plan: {schedule: in-backward}}", "did you mean 'in_backward'"),
        ("{model: a, plan: {update: 1.5}}", "1.5 is not between 0 and 1"),
        ("{model: a, plan: {update: {head: -0.5}}}", "-0.5 is not between 0 and 1"),
        ("{model: a, plan: {device_memory: 14GiX}}", "unknown unit 'GiX'"),
        ("{model: a, plan: {prefetch_depth: -1}}", "prefetch_depth is -1; give 0 or more"),
        ("{model: a, plan: {cached_buffers: -1}}", "cached_buffers is -1; give 0 or more"),
        ("{model: a, plan: {defragment_every: -1}}", "defragment_every is -1; give 0 or more"),
        ("{model: a, plan: {cached_buffers: many}}", "'plan.cached_buffers' must be an integer, got 'many'"),
        ("{model: a, plan: {kind: static-partitoin}}", "did you mean 'static-partition'"),
        ("{model: a, plan: {kind: static-partition}}", "missing key 'plan.share', which has no default"),
        ("{model: a, plan: {kind: static-partition, share: 1.5}}", "share is 1.5; give a share of the device above 0"),
        ("{model: a, plan: {kind: static-partition, share: 1, shar: 1}}", "did you mean 'plan.share'"),
        (
            "{model: a, plan: {kind: static-partition, share: 1, weights: resident}}",
            "unknown key 'plan.weights' of the kind static-partition: it is a setting of by-hand",
        ),
        ("{model: a, plan: {share: 0.5}}", "unknown key 'plan.share' of the kind by-hand: it is a setting of static-"),
        ("{model: a, plan: {kind: warm-up, device_memory: 14GiX}}", "device_memory: unknown unit 'GiX'"),
        ("{model: a, plan: {kind: warm-up, activations: recomput}}", "no activation policy named 'recomput'; did you"),
        ("{model: a, plan: {kind: warm-up, monitor: peak}}", "'plan.monitor' cannot be 'peak'; did you mean 'peaks'"),
        ("{model: a, plan: {kind: warm-up, host_share: 0}}", "host_share is 0.0; give a share above 0 to 1"),
        (
            "{model: a, steps: 1, plan: {kind: warm-up}}",
            "plan is a warm-up, which watches the first step and plans those",
        ),
        (
            "{model: a, max_grad_norm: 1, plan: {kind: warm-up, schedule: in_backward}}",
            "needs all gradients before the first",
        ),
        ("{model: a, optimizer: {name: adamv}}", "no optimizer named 'adamv'; did you mean 'adam"),
        (
            "{model: a, optimizer: {settings: {betaz: [0.9, 0.9]}}}",
            "adamw takes no setting 'betaz'; did you mean 'beta",
        ),
        ("{model: a, optimizer: {settings: {params: 1}}}", "adamw takes no setting 'params'"),
        ("{model: a, optimizer: {decay_matrices_only: true}}", "no weight_decay above 0"),
        ("{model: a, scheduler: {kind: linear-warmup}}", "missing key 'scheduler.warmup_steps'"),
        ("{model: a, scheduler: {warmup_steps: 3}}", "'scheduler.kind' is missing"),
        ("{model: a, scheduler: {kind: linear-warmup, warmup_steps: 0}}", "warmup_steps is 0; give 1 or more"),
        ("{model: a, steps: 2, scheduler: {kind: linear-warmup, warmup_steps: 3}}", "more than the 2 steps"),
        ("{model: a, steps: 0}", "steps is 0; give 1 or more"),
        ("{model: a, accumulation: 0}", "accumulation is 0"),
        ("{model: a, seed: -1}", "seed is -1"),
        ("{model: a, tolerance: -1e-9}", "tolerance is -1e-09"),
        ("{model: a, max_grad_norm: 0}", "max_grad_norm is 0.0; give a number above 0"),
        ("{model: a, dtype: float8}", "dtype is 'float8'; give float32, bfloat16 or float16"),
        ("{model: a, max_grad_norm: 1, plan: {schedule: in_backward}}", "needs all gradients before the first"),
        ("{model: a, accumulation: 2, plan: {schedule: in_backward}}", "allows one backward to an update"),
        (
            "{model: a, precision: bf16 exact}",
            "is for weights in bfloat16, and dtype is float32: set dtype to bfloat16",
        ),
        ("{model: a, precision: fp32, dtype: bfloat16}", "is for weights in float32, and dtype is bfloat16"),
        (
            "{model: a, precision: bf16 exakt, dtype: bfloat16}",
            "there is no precision named 'bf16 exakt'; did you mean",
        ),
        ("{model: a, moments: 8bit}", "moments is '8bit', which is for updates through Lowtide's own kernels"),
        ("{model: a, plan: {update: paged}}", "plan.update is 'paged', which is for updates through Lowtide's own"),
        ("{model: a, plan: {update: {head: paged}}}", "plan.update is 'paged'"),
        ("{model: a, evaluation: {after: 3}}", "'evaluation.after' must be a list"),
        ("{model: a, evaluation: {after: [0, 3]}}", "'evaluation': after is [0, 3]; give numbers of steps from 1 on"),
        ("{model: a, evaluation: {after: [3, 3]}}", "after is [3, 3]; give numbers of steps from 1 on, each larger"),
        ("{model: a, evaluation: {after: [4, 3]}}", "after is [4, 3]"),
        (
            "{model: a, steps: 5, evaluation: {after: [3, 5]}}",
            "evaluation.after has 5, and steps is 5: the last evaluation is always after the last step",
        ),
    ],
)
def test_wrong_recipes_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "recipe.yaml" in str(caught.value)


def test_the_key_of_a_step_beyond_the_last_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(model="gpt-tiny", steps=5, evaluation=EvaluationRecipe(after=(6,)))
    assert caught.value.key == "evaluation.after"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_without_a_closure(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones_like(parameter)
    OPTIMIZERS[name]([parameter]).step()
    assert not torch.equal(parameter, torch.ones(3, 2))


def test_the_recipes_for_checks_can_be_read() -> None:
    files = sorted((FOLDER / "check").glob("*.yaml"))
    assert len(files) >= 3
    for file in files:
        assert read_recipe(file).tolerance == 0.0


@pytest.mark.parametrize("key", ["device_memory", "host_memory", "window_memory", "chunk_memory"])
def test_a_size_that_is_none_names_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'plan': {key}: 'lots' is not a size"):
        from_plain(Recipe, {"model": "gpt-tiny", "plan": {key: "lots"}})
