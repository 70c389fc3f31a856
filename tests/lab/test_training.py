"""From recipe to torch objects, and the loop over them, against loops written out by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lowtide.lab.optimizer_recipe import LinearWarmup, OptimizerRecipe
from lowtide.lab.recipe import Recipe
from lowtide.lab.training import linear_warmup, make_batches, make_model, make_optimizer, make_scheduler, train
from lowtide.models import resolve_model

RECIPE = Recipe(
    model="gpt-tiny",
    batch="2x16",
    steps=3,
    optimizer=OptimizerRecipe(name="sgd", settings={"lr": 0.5, "weight_decay": 0.1}, decay_matrices_only=True),
)
SOURCE = resolve_model("gpt-tiny")
CPU = torch.device("cpu")


def run(recipe: Recipe) -> tuple[nn.Module, tuple[float, ...], list[tuple[int, float]]]:
    model = make_model(recipe, SOURCE)
    optimizer = make_optimizer(recipe.optimizer, model)
    steps: list[tuple[int, float]] = []
    batch = make_batches(recipe, SOURCE)
    losses = train(recipe, model, optimizer, batch, device=CPU, on_step=lambda step, loss: steps.append((step, loss)))
    return model, losses, steps


def test_decay_spares_vectors() -> None:
    model = make_model(RECIPE, SOURCE)
    matrices, vectors = make_optimizer(RECIPE.optimizer, model).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_frozen_parameters_are_not_in_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    (group,) = make_optimizer(OptimizerRecipe(), model).param_groups
    assert group["params"] == list(model[1].parameters())


def test_warm_up_rises_then_falls_and_is_never_zero_in_the_run() -> None:
    factors = [linear_warmup(step, warmup_steps=4, steps=8) for step in range(8)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert linear_warmup(8, warmup_steps=8, steps=8) == 0.0


def test_the_scheduler_moves_the_optimizers_rate() -> None:
    recipe = replace(RECIPE, steps=4, scheduler=LinearWarmup(warmup_steps=2))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make_scheduler(recipe, optimizer)
    assert scheduler is not None
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert make_scheduler(RECIPE, optimizer) is None


def test_batches_differ_and_repeat() -> None:
    batch = make_batches(RECIPE, SOURCE)
    first, second = batch(0), batch(1)
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert torch.equal(second["input_ids"], second["labels"])
    assert torch.equal(first["input_ids"], batch(0)["input_ids"])
    images = make_batches(
        replace(RECIPE, model="resnet-50", batch="2x3x32x32", dtype="bfloat16"), resolve_model("resnet-50")
    )
    assert {key: value.dtype for key, value in images(1).items()} == {
        "pixel_values": torch.bfloat16,
        "labels": torch.int64,
    }


def test_the_same_recipe_gives_the_same_run() -> None:
    (model, losses, steps), (again, losses_again, _) = run(RECIPE), run(RECIPE)
    assert losses == losses_again
    assert steps == list(enumerate(losses))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    _, other_losses, _ = run(replace(RECIPE, seed=1))
    assert other_losses != losses


def test_the_loop_is_the_one_a_person_would_write() -> None:
    recipe = replace(RECIPE, accumulation=2, max_grad_norm=0.1)
    model = make_model(recipe, SOURCE)
    optimizer = make_optimizer(recipe.optimizer, model)
    batch = make_batches(recipe, SOURCE)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        first, second = (model(**batch(2 * step + part)).loss for part in range(2))
        (first / 2).backward()
        (second / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append((first.item() + second.item()) / 2)
    managed, found, _ = run(recipe)
    assert list(found) == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), managed.parameters(), strict=True))


def test_clipping_reaches_the_update() -> None:
    assert run(replace(RECIPE, max_grad_norm=1e-3))[1] != run(RECIPE)[1]


def test_losses_fall() -> None:
    _, losses, _ = run(replace(RECIPE, steps=10))
    assert losses[-1] < 0.9 * losses[0]
