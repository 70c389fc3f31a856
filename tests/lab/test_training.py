"""From recipe to torch objects, and the loop over them, against loops written out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import LinearWarmup, OptimizerRecipe
from lowtide.lab.training import (
    linear_warmup,
    make_batches,
    make_model,
    make_optimizer,
    make_scheduler,
    materialise,
    train,
)
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


def drawn(spec: str, dtype: str = "float32") -> nn.Module:
    return make_model(Recipe(model=spec, dtype=dtype, seed=7), resolve_model(spec))


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("spec", ["gpt-tiny", "llama-tiny", "deep-one-tiny"])
def test_built_in_models(spec: str) -> None:
    model = drawn(spec)
    assert same(model, drawn(spec))
    source = resolve_model(spec)
    loss = model(**source.make_batch("2x16")).loss
    # An untrained model knows nothing: its loss is that of a guess among 256 bytes.
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.1)
    assert {parameter.dtype for parameter in drawn(spec, "bfloat16").parameters()} == {torch.bfloat16}


def test_a_tied_weight_stays_one() -> None:
    model = drawn("gpt-tiny")
    assert model.get_parameter("head.weight") is model.get_parameter("token_embedding.weight")


def hugging_face_config(folder: Path) -> str:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return f"hf:{folder}"


def test_hugging_face_models_are_as_their_constructor_makes_them(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    spec = hugging_face_config(tmp_path)
    model = drawn(spec)
    assert isinstance(model, LlamaForCausalLM)
    torch.manual_seed(7)
    built = LlamaForCausalLM(model.config)
    assert same(model, built)
    # Buffers that are in no state dict, such as the rotary frequencies, must be real too.
    for (name, buffer), (_, other) in zip(model.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in drawn(spec, "bfloat16").parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


class Scale(nn.Module):
    """Holds a parameter that nobody can draw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Tied(nn.Module):
    """Two layers of one weight, without a reset of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def test_other_models_are_drawn_module_by_module() -> None:
    with torch.device("meta"):
        model = Tied()
    torch.manual_seed(7)
    made = materialise(model, name="tied")
    assert made.first.weight is made.second.weight
    assert made.first.weight.abs().max() <= 0.5  # uniform within 1/sqrt(4)
    assert made.first.weight.std() > 0
    assert torch.equal(made.norm.running_var, torch.ones(4))


def test_a_module_that_cannot_be_drawn_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Scale())
    with pytest.raises(ConfigError, match="my-model cannot be given first weights: Scale at 1 holds tensors"):
        materialise(model, name="my-model")


def test_a_real_model_is_left_alone() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight.detach().clone()
    assert materialise(model, name="linear") is model
    assert torch.equal(model.weight, weight)


class Own(nn.Module):
    """Draws its weights otherwise than its modules would, and holds what nobody else can make."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("positions", torch.arange(4.0))
        nn.init.normal_(self.tokens.weight, std=1e-3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.tokens(input_ids) * self.scale + self.positions).sum() + labels.sum()


def own() -> nn.Module:
    return Own()


def own_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4))


def own_pair() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return own_on_meta(), {"input": torch.zeros(2, 4)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_factory_has_its_own_weights(dtype: str) -> None:
    source = resolve_model(f"{__name__}:own")
    assert source.build(torch.float32).tokens.weight.device.type == "meta"  # predictions still need no memory
    model = drawn(f"{__name__}:own", dtype)
    torch.manual_seed(7)
    assert same(model, Own().to(getattr(torch, dtype)))
    assert 0 < model.tokens.weight.abs().max() < 0.01
    assert model.training


def test_a_factory_that_builds_on_meta_leaves_its_weights_to_its_modules() -> None:
    model = drawn(f"{__name__}:own_pair")
    weight = model[0].weight
    assert weight.device.type == "cpu"
    assert weight.std() > 0
