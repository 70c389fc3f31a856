"""Recipes shown as YAML: what is shown can be read again, and says where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import config, plain_text
from lowtide.lab.recipe_file import FOLDER, find_recipe, recipe_names, resolve_recipe
from lowtide.lab.shown_recipe import annotated_yaml, source_name


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_can_be_read_again(name: str, tmp_path: Path) -> None:
    resolved = resolve_recipe(find_recipe(name), ["seed=3"])
    again = tmp_path / "again.yaml"
    again.write_text(annotated_yaml(config.to_plain(resolved.recipe), resolved.sources), encoding="utf-8")
    assert resolve_recipe(again).recipe == resolved.recipe


def test_words_that_yaml_reads_otherwise_stay_what_they_are() -> None:
    words = [
        "# no comment",
        "null",
        "1e-4",
        ":4096:8",
        "two\nlines",
        "word " * 40,
        "✓ 🙂",
        'it\'s "so"',
        "",
        "- a",
        "a: b",
    ]
    plain = {word or "empty": word for word in words}
    nested = {
        "plan": {"weights": {"*": "streamed", "layers.0": "resident"}},
        "betas": [0.9, 0.95],
        "one": ["a"],
        "settings": {},
    }
    whole = {**plain, **nested}
    text = annotated_yaml(whole, dict.fromkeys([*plain, "betas", "settings", "plan.weights.*"], "a file.yaml"))
    assert plain_text.parse(text, "yaml") == whole
    assert text.count("# a file.yaml") == len(plain) + 3


def test_only_what_was_set_has_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("model: gpt-tiny\nplan: {weights: resident}\n", encoding="utf-8")
    Path("mine.yaml").write_text("extends: base.yaml\nsteps: 20\n", encoding="utf-8")
    resolved = resolve_recipe("mine.yaml", ["seed=3"])
    lines = annotated_yaml(config.to_plain(resolved.recipe), resolved.sources).splitlines()
    assert "model: gpt-tiny  # base.yaml" in lines
    assert "  weights: resident  # base.yaml" in lines
    assert "  update: host" in lines
    assert "steps: 20  # mine.yaml" in lines  # also where it is the default
    assert "seed: 3  # --set" in lines
    assert sum("#" in line for line in lines) == 4


def test_files_are_called_by_their_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert source_name(str(FOLDER / "peak_memory" / "_base.yaml")) == "peak_memory/_base.yaml"
    assert source_name(str(tmp_path / "a" / "b.yaml")) == "a/b.yaml"
    assert source_name("/elsewhere/b.yaml") == "/elsewhere/b.yaml"
    assert source_name("--set") == "--set"
    # A recipe that is made small from another one names that one.
    sources = resolve_recipe(find_recipe("peak_memory_tiny/streamed")).sources
    assert source_name(sources["plan.weights"]) == "peak_memory/streamed.yaml"
