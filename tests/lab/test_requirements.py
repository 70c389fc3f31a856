"""What a recipe needs is found before it runs, and said with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.lab import requirements
from lowtide.lab.data_recipe import HubDataset, Stories
from lowtide.lab.recipe import CompileRecipe, Recipe
from lowtide.lab.requirements import unmet_requirements

RECIPE = Recipe(model="gpt-tiny", device="cpu")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with torch and nothing else."""
    monkeypatch.setattr(requirements, "_has", lambda package: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("bare")
def test_random_inputs_on_the_host_need_nothing() -> None:
    assert unmet_requirements(RECIPE) == ()


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
    found = unmet_requirements(replace(RECIPE, **changes))
    assert len(found) == len(messages)
    for sentence, message in zip(found, messages, strict=True):
        assert message in sentence


@pytest.mark.usefixtures("bare", "card")
def test_compilation_for_a_card_needs_triton_and_a_c_compiler() -> None:
    triton, compiler = unmet_requirements(replace(RECIPE, device="cuda", compile=CompileRecipe()))
    assert "'triton'; run: pip install triton" in triton
    assert "needs a C compiler: none of gcc, clang, cc is on the path, and CC names none" in compiler


@pytest.mark.usefixtures("bare")
def test_a_compiler_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "my-compiler"
    program.touch(mode=0o755)
    monkeypatch.setenv("CXX", "my-compiler -O2")
    assert unmet_requirements(replace(RECIPE, compile=CompileRecipe())) == ()
    program.unlink()
    assert len(unmet_requirements(replace(RECIPE, compile=CompileRecipe()))) == 1


def test_a_device_that_is_none_anywhere_is_an_error_of_the_recipe() -> None:
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        unmet_requirements(replace(RECIPE, device="gpu"))
