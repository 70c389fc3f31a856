"""Mistakes are found before a run, and say which recipe and which key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stories.__main__ import write_stories
from lowtide.errors import ConfigError
from lowtide.lab import preflight, training
from lowtide.lab.preflight import refuse_mistakes, unmet_requirements
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.lab.recipe_file import find_recipe, known_recipes, read_recipe
from lowtide.lab.recipe_parts import EvaluationRecipe, HubDataset, OptimizerRecipe, PlanRecipe, Stories, TextFiles
from lowtide.planning.budget_plans import StaticPartition, WarmUp
from lowtide.planning.plan import Site, Weights

RECIPE = Recipe(model="gpt-tiny", model_settings={"vocab_size": 300}, device="cpu")


@pytest.fixture(scope="module")
def cache_with_stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_stories(folder / "lowtide" / "stories", seed=0, training=20_000, validation=500)
    return folder


@pytest.mark.parametrize("name", known_recipes())
def test_recipes_of_the_package_have_none(name: str, cache_with_stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with_stories))
    refuse_mistakes(name, read_recipe(find_recipe(name)))


def test_stories_that_are_not_written_are_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match="'peak_memory/control' cannot run: data: 20,000 .* `python -m benchmarks.stories`"
    ):
        refuse_mistakes("peak_memory/control", read_recipe(find_recipe("peak_memory/control")))


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"model": "gpt-tny", "model_settings": {}}, "model", "model: there is no model named 'gpt-tny'"),
        ({"model": "nowhere", "model_settings": {}}, "model", "there is no model named 'nowhere'"),
        ({"model": "hf:no/folder", "model_settings": {}}, "model", "'no/folder'"),
        (
            {"model_settings": {"vocb_size": 300}},
            "model_settings",
            "unknown key 'vocb_size'; did you mean 'vocab_size'",
        ),
        ({"model_settings": {"vocab_size": "many"}}, "model_settings", "'vocab_size' must be an integer"),
        (
            {"data": Stories(vocab_size=100_000)},
            "data.vocab_size",
            "data.vocab_size is 100000, and the largest embedding",
        ),
        ({"data": TextFiles(path=Path("no/such.txt"))}, "data.path", "there is no file or folder no/such.txt"),
        ({"batch": "2x3x4x5"}, "batch", "'batch': '2x3x4x5' has 4 sizes"),
        ({"batch": "2x1", "data": Stories(vocab_size=260)}, "batch", "batch has sequences of 1 token"),
        (
            {"model": "resnet-50", "model_settings": {}, "data": Stories()},
            "data",
            "data: resnet-50 takes pixel_values, labels, and text makes",
        ),
        ({"evaluation": EvaluationRecipe()}, "evaluation", "random inputs have nothing to evaluate on"),
        (
            {"evaluation": EvaluationRecipe(), "data": Stories(vocab_size=260, num_validation=0)},
            "evaluation",
            "data.num_validation is 0",
        ),
        (
            {"evaluation": EvaluationRecipe(samples=6), "data": Stories(vocab_size=260, num_validation=5)},
            "evaluation.samples",
            "evaluation.samples is 6, and data.num_validation is 5: lower the first, or raise the second",
        ),
        (
            {"model": "no_such_module:factory", "model_settings": {"vocab_size": 64}},
            "model_settings",
            "model_settings has vocab_size: only built-in models have settings, and 'no_such_module:factory' is none",
        ),
        ({"optimizer": OptimizerRecipe(settings={"lr": -1.0})}, "optimizer.settings", "Invalid learning rate: -1.0"),
        ({"optimizer": OptimizerRecipe(settings={"betas": 0.9})}, "optimizer.settings", "TypeError: "),
        (
            {"optimizer": OptimizerRecipe(name="rmsprop"), "precision": "fp32"},
            "precision",
            "precision: there is no kernel for this update: RMSprop is none of the rules",
        ),
        (
            {"plan": PlanRecipe(weights={"blocks.99": Weights.RESIDENT})},
            "plan",
            "plan: there is no group (weights) named 'blocks.99'",
        ),
        (
            {"plan": StaticPartition(share=0.5), "device": "cpu"},
            "plan.device_memory",
            "plan.device_memory: an emulated device has no size of its own to take a share of; give device_memory",
        ),
        (
            {"plan": WarmUp(device_memory="1MiB", activations={"blocks.99": "recompute"})},
            "plan.activations",
            "named 'blocks.99'",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_key(changes: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_mistakes("group/mine", replace(RECIPE, **changes))
    assert str(caught.value).startswith("the recipe 'group/mine' cannot run: ")
    assert message in str(caught.value)
    assert caught.value.key == key


def test_what_may_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("one\n\ntwo", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fine: tuple[dict[str, Any], ...] = (
        {"optimizer": OptimizerRecipe(settings={"fused": True})},
        {"optimizer": OptimizerRecipe(settings={"weight_decay": 0.1}, decay_matrices_only=True)},
        {"data": TextFiles(path=tmp_path, vocab_size=260), "evaluation": EvaluationRecipe()},
        {
            "data": Stories(vocab_size=260, num_stories=9, num_validation=5),
            "evaluation": EvaluationRecipe(samples=5),
        },
        # A budget that is too small is a result, and not a mistake.
        {"plan": PlanRecipe(weights=Weights.RESIDENT, update=Site.DEVICE, device_memory="1KiB")},
        {"plan": StaticPartition(share=0.5, device_memory="1KiB")},
        {"plan": WarmUp(device_memory="1KiB", activations="recompute")},
    )
    for changes in fine:
        refuse_mistakes("mine", replace(RECIPE, **changes))


def test_a_vocabulary_is_lowered_only_where_it_can_be() -> None:
    recipe = replace(RECIPE, data=Stories(vocab_size=301))
    with pytest.raises(ConfigError, match="lower data.vocab_size to 300 or less, or set model_settings.vocab_size"):
        refuse_mistakes("mine", recipe)
    with pytest.raises(ConfigError, match="has 256 rows: set model_settings.vocab_size"):
        refuse_mistakes("mine", replace(recipe, model_settings={}))


def test_a_small_text_must_give_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("one two\n\none two", encoding="utf-8")
    recipe = replace(RECIPE, data=TextFiles(path=tmp_path / "text.txt", vocab_size=299))
    with pytest.raises(
        ConfigError, match=r"'mine' cannot run: data: the training text gives \d+ tokens, and vocab_size is 299"
    ):
        refuse_mistakes("mine", recipe)
    # A long one is for the run to read.
    monkeypatch.setattr(preflight, "SMALL_TEXT_BYTES", 3)
    refuse_mistakes("mine", recipe)


def test_blocks_can_only_be_compiled_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, compile=CompileRecipe(scope="blocks"), plan=None)
    refuse_mistakes("mine", recipe)
    monkeypatch.setattr(training, "find_groups", lambda model: ())
    with pytest.raises(ConfigError, match=r"compile\.scope is 'blocks', and the model has no repeated blocks"):
        refuse_mistakes("mine", recipe)


def test_the_code_of_a_factory_stays_in_its_run() -> None:
    refuse_mistakes("mine", replace(RECIPE, model="no_such_module:factory", model_settings={}))
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        refuse_mistakes(
            "mine",
            replace(
                RECIPE,
                model="no_such_module:factory",
                model_settings={},
                optimizer=OptimizerRecipe(settings={"lr": -1.0}),
            ),
        )


PLAIN_RECIPE = Recipe(model="gpt-tiny", device="cpu")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with torch and nothing else."""
    monkeypatch.setattr(preflight, "_has_package", lambda package: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("bare")
def test_random_inputs_on_the_host_need_nothing() -> None:
    assert unmet_requirements(PLAIN_RECIPE) == ()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"device": "cuda:99"}, ["it needs the device 'cuda:99', and torch sees "]),
        ({"data": Stories()}, ["it trains a tokenizer with the package 'tokenizers'; run: pip install tokenizers"]),
        (
            {"data": HubDataset(name="a/b")},
            ["it reads 'a/b' through the package 'datasets'; run: pip install datasets", "it trains a tokenizer"],
        ),
        ({"model": "hf:some/model"}, ["it builds 'hf:some/model' with the package 'transformers'; run: pip install"]),
        (
            {"compile": CompileRecipe()},
            [
                "torch.compile needs a C++ compiler: none of g++, clang++, c++ is on the path, and CXX names none; install"
            ],
        ),
        ({"compile": CompileRecipe(backend="aot_eager_decomp_partition")}, []),
        ({"compile": CompileRecipe(), "device": "cuda:99"}, ["it needs the device 'cuda:99'"]),
    ],
)
def test_each_lack_is_a_sentence(changes: dict[str, object], messages: list[str]) -> None:
    found = unmet_requirements(replace(PLAIN_RECIPE, **changes))
    assert len(found) == len(messages)
    for sentence, message in zip(found, messages, strict=True):
        assert message in sentence


@pytest.mark.usefixtures("bare", "card")
def test_compilation_for_a_card_needs_triton_and_a_c_compiler() -> None:
    triton, compiler = unmet_requirements(replace(PLAIN_RECIPE, device="cuda", compile=CompileRecipe()))
    assert "'triton'; run: pip install triton" in triton
    assert "needs a C compiler: none of gcc, clang, cc is on the path, and CC names none" in compiler


@pytest.mark.usefixtures("bare")
def test_a_compiler_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "my-compiler"
    program.touch(mode=0o755)
    monkeypatch.setenv("CXX", "my-compiler -O2")
    assert unmet_requirements(replace(PLAIN_RECIPE, compile=CompileRecipe())) == ()
    program.unlink()
    assert len(unmet_requirements(replace(PLAIN_RECIPE, compile=CompileRecipe()))) == 1


def test_a_device_that_is_none_anywhere_is_an_error_of_the_recipe() -> None:
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        unmet_requirements(replace(PLAIN_RECIPE, device="gpu"))
